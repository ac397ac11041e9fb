# mypy: ignore-errors
# fmt: off
"""A stack of dense learners on CUDA: loss, backward, the next sample.

Hidden layers go forward while they are updated (:mod:`upgd.kernels.triton_update`). ``head_kernel``
(two programs per learner) takes the last layer: it finishes the last sample, whose loss after its
update is measured together with this sample's, since both read the same weights; it takes loss and
metrics of this sample and goes back to the last hidden layer; its second program fetches the next
sample. ``backward_kernel`` takes one hidden layer of all learners. Both trace the utilities of the
units that they have come to, where a learner's method has utilities of features.

No sum's order depends on how many learners there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from upgd.kernels.triton_numbers import DUE, SHARE, TIMES

# Activations by number, as in upgd.networks.
RELU, LEAKY_RELU, TANH, LINEAR = (tl.constexpr(i) for i in range(4))
# What inputs are: rows of a table under a permutation, or as they are.
PERMUTED, TABLE = (tl.constexpr(i) for i in range(2))
# What features' utilities are divided by: the learner's largest, or their norm in a layer.
LARGEST, NORM = tl.constexpr(1), tl.constexpr(2)
# The columns of the metrics.
LOSS, PLASTICITY, ACCURACY, ZEROS, GRAD_L0, GRAD_L1, GRAD_L2, MEASURED, METRICS = (
    tl.constexpr(i) for i in range(9)
)


# ---------------------------------------------------------------------- early launches
@triton.jit
def take_over():
    """Wait until the previous kernel has finished, then let the next one be launched.

    All kernels of a step do so, hence each goes on when everything before it is there. Until then
    it may ask the cache for something, and read what no kernel of a step writes (tables, samples,
    and the clock, which moves behind a graph's last step). What the kernel before the one before it
    has written is there, too, since that one was waited for; it is read with ``.cg``, past the
    first-level cache, where an older value may lie.
    """
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


# ------------------------------------------------------------------------ activations
@triton.jit
def activate(a, kind: tl.constexpr):
    """A unit's output."""
    if kind == RELU:
        a = tl.where(a > 0, a, a * 0.0)  # keeps NaN
    elif kind == LEAKY_RELU:
        a = tl.where(a > 0, a, a * 0.01)
    elif kind == TANH:
        e = tl.exp(-2.0 * tl.abs(a))
        t = (1.0 - e) / (1.0 + e)
        a = tl.where(a < 0, -t, t)
    return a


@triton.jit
def slope(h, kind: tl.constexpr):
    """The activation's derivative, from the unit's output."""
    d = h * 0.0 + 1.0
    if kind == RELU:
        d = tl.where(h > 0, d, h * 0.0)
    elif kind == LEAKY_RELU:
        d = tl.where(h > 0, d, d * 0.01)
    elif kind == TANH:
        d = 1.0 - h * h
    return d


# ----------------------------------------------------------------------- one per learner
@triton.jit
def losses(z, y, target, inside, outputs, squared: tl.constexpr):
    """Loss, its first and second derivatives by the outputs, and whether the guess is right."""
    if squared:
        error = tl.where(inside, z - target, 0.0)
        loss = tl.sum(error * error, 0) / outputs
        first = 2.0 * error / outputs
        second = tl.where(inside, 2.0 / outputs, 0.0) + z * 0.0
        right = 0
    else:
        z = tl.where(inside, z, float("-inf"))
        largest = tl.max(z, 0)
        e = tl.exp(z - largest)
        total = tl.sum(e, 0)
        column = tl.arange(0, z.shape[0])
        mine = column == y
        loss = tl.log(total) - (tl.sum(tl.where(mine, z, 0.0), 0) - largest)
        p = e / total
        first = tl.where(mine, p - 1.0, p)
        second = p - p * p
        right = (tl.argmax(z, 0) == y).to(tl.int32)
    return loss, first, second, right


@triton.jit
def both_inputs(pre, run, runs, UNITS, at, col, inputs, ACTIVATION: tl.constexpr):
    """What units `at`, `at` + 1, … say to the last sample after its update, and to the next one.

    Behind them, as everywhere, there is a one for the bias.
    """
    known = col < inputs
    bias = tl.where(col == inputs, 1.0, 0.0).to(pre.dtype.element_ty)
    was = tl.load(pre + run * UNITS + at + col, mask=known, other=0.0)
    now = tl.load(pre + (runs + run) * UNITS + at + col, mask=known, other=0.0)
    was = tl.where(known, activate(was, ACTIVATION), bias)
    now = tl.where(known, activate(now, ACTIVATION), bias)
    return was, now


@triton.jit
def _fold_rows(products):
    """Sums of every fourth row, which one thread holds: so they take a few registers."""
    rows: tl.constexpr = products.shape[0]
    return tl.sum(tl.reshape(products, [rows // 4, 4, products.shape[1]]), 0)


@triton.jit
def _tile(W, row, col, units, pitch):
    """Some rows and columns of a layer. Beyond them there are zeros, which nobody fetches."""
    inside = (row < units)[:, None] & (col < pitch)[None, :]
    place = row[:, None] * pitch + col[None, :]
    return tl.load(W + place, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit(
    do_not_specialize=[
        "offset", "window", "windows", "runs", "UNITS", "LENGTH", "wide", "inputs", "outputs",
    ]
)
def head_kernel(
    W, acts, delta, hess, utility, squares, kinds, pre, loss_before, series, diverged,
    partial, corrections, decays, began, layer_table, data, index, labels, targets, permutations,
    slots, clock, offset, window, windows, runs, P, A, UNITS, LENGTH, wide, first_pitch,
    first_begin, inputs, outputs, pitch, base, LAYERS: tl.constexpr, BC: tl.constexpr,
    PART: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr,
    SQUARED: tl.constexpr, INPUTS: tl.constexpr, SECOND: tl.constexpr, FEATURES: tl.constexpr,
    TRACE: tl.constexpr, FORWARD: tl.constexpr, DUES: tl.constexpr, APART: tl.constexpr,
    SLOTS: tl.constexpr, EARLY: tl.constexpr,
):
    """The last layer and the loss: finish the last sample, score this one, fetch the next."""
    run = tl.program_id(0).to(tl.int64)
    step = tl.load(clock) + offset
    here = step - tl.load(clock + 1)  # position in the chunk of samples that lies on the device
    if tl.program_id(1) == 1:
        place = first_begin - ((step + 1) % 2) * first_pitch
        _fetch(
            acts + run * A + place, run, here + 1, wide, data, index, permutations, slots, runs,
            LENGTH, INPUTS, IN, EARLY,
        )
        _keep_activations(
            acts + run * A, pre, layer_table, run, runs, UNITS, LAYERS, BC, ACTIVATION
        )
    else:
        _head(
            W + run * P + base, delta, hess, utility, squares, kinds, pre, loss_before,
            series, diverged, partial, corrections, decays, began, labels, targets, run, step, here,
            window, windows, runs, UNITS, LENGTH, inputs, outputs, pitch, LAYERS, BC, PART, OUT,
            ACTIVATION, SQUARED, SECOND, FEATURES, TRACE, FORWARD, DUES, APART, SLOTS, EARLY,
        )


@triton.jit
def _keep_activations(
    acts, pre, layer_table, run, runs, UNITS, LAYERS: tl.constexpr, BC: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Put the hidden units' outputs where the backward passes and the updates read them."""
    for layer in tl.static_range(1, LAYERS):
        inputs = tl.load(layer_table + 6 * layer)
        begin = tl.load(layer_table + 6 * layer + 4) * 16
        at = tl.load(layer_table + 6 * layer + 5) - inputs
        for c in range(0, inputs, BC):
            col = c + tl.arange(0, BC)
            _was, now = both_inputs(pre, run, runs, UNITS, at, col, inputs, ACTIVATION)
            tl.store(acts + begin + col, now, mask=col < inputs)


@triton.jit
def _head(
    W, delta, hess, utility, squares, kinds, pre, loss_before, series, diverged, partial,
    corrections, decays, began, labels, targets, run, step, here, window, windows, runs, UNITS,
    LENGTH, inputs, outputs, pitch, LAYERS: tl.constexpr, BC: tl.constexpr, PART: tl.constexpr,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, SQUARED: tl.constexpr, SECOND: tl.constexpr,
    FEATURES: tl.constexpr, TRACE: tl.constexpr, FORWARD: tl.constexpr, DUES: tl.constexpr,
    APART: tl.constexpr, SLOTS: tl.constexpr, EARLY: tl.constexpr,
):
    real: tl.constexpr = W.dtype.element_ty
    # What will be added to is read here: behind the first write every read would wait its turn.
    # What of it a step's kernels write, they write before the updates, of which one comes between.
    series += run * windows * METRICS
    last_spot = series + (tl.maximum(step - 1, 0) // window) * METRICS
    spot = series + (step // window) * METRICS
    progress_before = tl.load(last_spot + PLASTICITY, cache_modifier=".cg")
    loss_sum = tl.load(spot + LOSS, cache_modifier=".cg")
    right_sum = tl.load(spot + ACCURACY, cache_modifier=".cg")
    old_loss = tl.load(loss_before + run, cache_modifier=".cg").to(tl.float64)
    old_diverged = tl.load(diverged + run, cache_modifier=".cg")
    state = tl.arange(0, SLOTS)  # of all layers
    decays += run * LAYERS * TIMES
    corrections += run * LAYERS * TIMES
    there = state < LAYERS * TIMES
    betas = tl.load(decays + state, mask=there, other=0.0)
    old_corrections = tl.load(corrections + state, mask=there, other=0.0, cache_modifier=".cg")
    if APART:  # what the correction of the trace that makes η is, and that of the first layer
        own_beta = tl.load(decays + state // TIMES * TIMES, mask=there, other=0.0)
        own = tl.load(
            corrections + state // TIMES * TIMES, mask=there, other=0.0, cache_modifier=".cg"
        )
        first_beta = tl.load(decays)
        first_own = tl.load(corrections, cache_modifier=".cg")
    o = tl.arange(0, OUT)
    valid = o < outputs
    columns = tl.arange(0, BC)
    at = UNITS - outputs - inputs  # the units that the last layer reads
    # ---- what the samples are
    y = 0
    y_before = 0
    earlier = tl.maximum(here - 1, 0)
    if SQUARED:
        t = tl.load(targets + (run * LENGTH + here) * outputs + o, mask=valid, other=0.0)
        t_before = tl.load(targets + (run * LENGTH + earlier) * outputs + o, mask=valid, other=0.0)
    else:
        y = tl.load(labels + run * LENGTH + here)
        y_before = tl.load(labels + run * LENGTH + earlier)
        t, t_before = valid, valid  # unused
    kind, beta = -1, 0.0
    if FEATURES:
        kind, beta = tl.load(kinds + run), tl.load(decays + (LAYERS - 2) * TIMES)
    first_tile = tl.zeros([OUT, BC], real)
    if LAYERS > 2:  # else the kernel before this one has updated the last layer
        first_tile = _tile(W, o, columns, outputs, pitch)
    if EARLY:
        take_over()
    if LAYERS == 2:
        first_tile = _tile(W, o, columns, outputs, pitch)
    if LAYERS == 1:
        z = tl.load(pre + (runs + run) * outputs + o, mask=valid, other=0.0)
        z_after = tl.load(pre + run * outputs + o, mask=valid, other=0.0)
    else:
        now = tl.zeros([OUT, BC], real)
        was = tl.zeros([OUT, BC], real)
        before, first_h = both_inputs(pre, run, runs, UNITS, at, columns, inputs, ACTIVATION)
        w, h = first_tile, first_h
        for c in range(BC, pitch + BC, BC):  # prefetch for the next iteration
            col = c + columns
            next_w = _tile(W, o, col, outputs, pitch)
            next_before, next_h = both_inputs(pre, run, runs, UNITS, at, col, inputs, ACTIVATION)
            was += w * before[None, :]
            now += w * h[None, :]
            w, before, h = next_w, next_before, next_h
        z = tl.sum(now, 1)
        z_after = tl.sum(was, 1)

    # ---- losses
    if here > 0:
        late, _f, _s, _r = losses(z_after, y_before, t_before, valid, outputs, SQUARED)
        progress = 1.0 - late.to(tl.float64) / tl.maximum(old_loss, 1e-8)
        progress = tl.minimum(tl.maximum(progress, 0.0), 1.0)
        progress = tl.where(late == late, progress, 0.0)
        tl.store(last_spot + PLASTICITY, progress_before + progress)
    if FORWARD:
        loss, first, second, right = losses(z, y, t, valid, outputs, SQUARED)
        tl.store(loss_before + run, loss)
        tl.store(spot + LOSS, loss_sum + loss.to(tl.float64))
        tl.store(spot + ACCURACY, right_sum + right.to(tl.float64))
        tl.store(partial + run, float("-inf"))
        corrected = old_corrections * betas + (1.0 - betas)
        if DUES:
            period = tl.maximum(betas, 1.0).to(tl.int64)
            age = step - tl.load(began + run) + 1
            due = (age % period == 0).to(tl.float64)
            corrected = tl.where(state % TIMES == DUE, due, corrected)
        if APART:
            share = own * own_beta + (1.0 - own_beta)
            share = share / (first_own * first_beta + (1.0 - first_beta))
            corrected = tl.where(state % TIMES == SHARE, share, corrected)
        tl.store(corrections + state, corrected, mask=there)
        row_at = UNITS - outputs
        tl.store(delta + run * UNITS + row_at + o, first, mask=valid)
        if SECOND:
            tl.store(hess + run * UNITS + row_at + o, second, mask=valid)
        finite = (loss == loss) & (tl.abs(loss) < float("inf"))
        if (old_diverged < 0) & (finite == 0):
            tl.store(diverged + run, step)
        if LAYERS > 1:
            units = run * UNITS + at
            w, h, u = first_tile, first_h, first_h
            if FEATURES:
                u = tl.load(utility + units + columns, mask=columns < inputs, other=0.0)
            for c in range(BC, inputs + BC, BC):
                col = c + columns
                next_w = _tile(W, o, col, outputs, pitch)
                _b, next_h = both_inputs(pre, run, runs, UNITS, at, col, inputs, ACTIVATION)
                next_u = next_h
                if FEATURES:
                    next_u = tl.load(utility + units + col, mask=col < inputs, other=0.0)
                back = tl.sum(w * first[:, None], 0)
                curve = back
                if SECOND:
                    curve = tl.sum(w * w * second[:, None], 0)
                _send_back(
                    back, curve, h, delta, hess, diverged, run, step, units + col - BC,
                    col - BC < inputs, ACTIVATION, SECOND,
                )
                if FEATURES:
                    _trace_features(
                        u, back, curve, h, kind, beta, utility, squares, partial + run, units,
                        c - BC, columns, inputs, SECOND, FEATURES, TRACE, PART,
                    )
                w, h, u = next_w, next_h, next_u


@triton.jit
def _send_back(
    back, curve, h, delta, hess, diverged, run, step, place, inside, ACTIVATION: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Derivatives by a layer's inputs become those by the sums in the units before it."""
    k = slope(h, ACTIVATION)
    tl.store(delta + place, back * k, mask=inside)
    if SECOND:
        bend = curve * k * k
        if ACTIVATION == TANH:
            bend += -2.0 * h * k * back
        tl.store(hess + place, bend, mask=inside)
    largest = tl.max(tl.where(inside, tl.abs(back), 0.0), 0)
    if largest == float("inf"):  # noqa: SIM102 - the second question costs a read
        if tl.load(diverged + run) < 0:
            tl.store(diverged + run, step)


@triton.jit
def _trace_features(
    u, back, curve, h, kind, beta, utility, squares, partial, place, c, columns, units,
    SECOND: tl.constexpr, FEATURES: tl.constexpr, TRACE: tl.constexpr, PART: tl.constexpr,
):
    """Trace the utilities `u` of a layer's units from `c` on, and leave what η is made of.

    That is the learner's largest, or sums of `PART` squares, put where the layer's units begin.
    """
    if kind >= 0:  # the learner's method has them
        inside = c + columns < units
        f = back * h
        s = f
        if SECOND:
            s = curve * h * h
        u = TRACE(kind, f, s, u, beta)
        tl.store(utility + place + c + columns, u, mask=inside)
        if LARGEST & FEATURES:
            top = tl.max(tl.where(inside, u, float("-inf")), 0) + 0.0  # not -0: see reduce_kernel
            tl.atomic_max(partial, top, sem="relaxed")
        if NORM & FEATURES:
            parts: tl.constexpr = columns.shape[0] // PART
            wide = tl.where(inside, u, 0.0).to(tl.float64)
            sums = tl.sum(tl.reshape(wide * wide, [parts, PART]), 1)
            part = c // PART + tl.arange(0, parts)
            tl.store(squares + place + part, sums, mask=part * PART < units)


@triton.jit(
    do_not_specialize=["offset", "UNITS", "inputs", "units", "row_at", "decay_at", "decay_pitch"]
)
def backward_kernel(
    W, acts, delta, hess, utility, squares, kinds, decays, partial, diverged, clock, offset, inputs,
    units, pitch, base, begin, row_at, decay_at, decay_pitch, P, A, UNITS,
    ACTIVATION: tl.constexpr, SECOND: tl.constexpr, FEATURES: tl.constexpr, TRACE: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):
    """From a layer's deltas to those of the layer before."""
    chunk = tl.program_id(0)
    # Backwards: the weights that were updated last are still in the cache.
    run = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    real: tl.constexpr = W.dtype.element_ty
    step = tl.load(clock) + offset
    W += run * P + base
    col = chunk * BC + tl.arange(0, BC)
    rows = tl.arange(0, BR)
    back = tl.zeros([4, BC], real)
    curve = tl.zeros([4, BC], real)
    before_at = row_at - inputs
    # Read before the head has finished: neither weights nor these utilities are its own.
    w = _tile(W, rows, col, units, pitch)
    if FEATURES:
        kind, beta = tl.load(kinds + run), tl.load(decays + run * decay_pitch + decay_at)
        place = utility + run * UNITS + before_at + col
        u = tl.load(place, mask=col < inputs, other=0.0, cache_modifier=".cg")
    if EARLY:
        take_over()
    h = tl.load(acts + run * A + begin + col, mask=col < inputs, other=0.0)
    first_row = run * UNITS + row_at
    d = tl.load(delta + first_row + rows, mask=rows < units, other=0.0)
    s = d
    if SECOND:
        s = tl.load(hess + first_row + rows, mask=rows < units, other=0.0)
    for r in range(BR, units + BR, BR):  # prefetch for the next iteration
        row = r + rows
        next_w = _tile(W, row, col, units, pitch)
        next_d = tl.load(delta + first_row + row, mask=row < units, other=0.0)
        back += _fold_rows(w * d[:, None])
        if SECOND:
            next_s = tl.load(hess + first_row + row, mask=row < units, other=0.0)
            curve += _fold_rows(w * w * s[:, None])
            s = next_s
        w, d = next_w, next_d
    by_inputs, twice = tl.sum(back, 0), tl.sum(curve, 0)
    _send_back(
        by_inputs, twice, h, delta, hess, diverged, run, step, run * UNITS + before_at + col,
        col < inputs, ACTIVATION, SECOND,
    )
    if FEATURES:
        _trace_features(
            u, by_inputs, twice, h, kind, beta, utility, squares, partial + run,
            run * UNITS + before_at, chunk * BC, tl.arange(0, BC), inputs, SECOND, FEATURES, TRACE,
            BC,
        )


@triton.jit(do_not_specialize=["offset", "window", "windows", "UNITS"])
def diagnose_kernel(
    acts, delta, series, measured, layer_table, clock, offset, window, windows, A, UNITS,
    LAYERS: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):
    """Zeros among all hidden outputs; norms of a rank-one gradient, products of two norms."""
    run = tl.program_id(0).to(tl.int64)
    if EARLY:
        take_over()
    step = tl.load(clock) + offset
    columns = tl.arange(0, BC)
    acts += run * A
    delta += run * UNITS
    if tl.load(measured + step) != 0:
        nonzero = 0.0
        l1 = 0.0
        l2 = 0.0
        weights = 0.0
        zeros = 0.0
        hidden = 0.0
        for layer in tl.static_range(LAYERS):
            inputs = tl.load(layer_table + 6 * layer)
            units = tl.load(layer_table + 6 * layer + 1)
            begin = tl.load(layer_table + 6 * layer + 4) * 16
            if layer == 0:
                begin -= (step % 2).to(tl.int32) * tl.load(layer_table + 2) * 16
            row_at = tl.load(layer_table + 6 * layer + 5)
            x0, x1, x2 = norms(acts + begin, inputs + 1, columns, BC)
            d0, d1, d2 = norms(delta + row_at, units, columns, BC)
            nonzero += x0 * d0
            l1 += x1 * d1
            l2 += x2 * d2
            weights += ((inputs + 1) * units).to(tl.float64)
            if layer > 0:
                zeros += inputs + 1 - x0
                hidden += inputs.to(tl.float64)
        spot = series + run * windows * METRICS + (step // window) * METRICS
        share = zeros / (hidden if LAYERS > 1 else 1.0)
        tl.store(spot + ZEROS, tl.load(spot + ZEROS) + share)
        tl.store(spot + GRAD_L0, tl.load(spot + GRAD_L0) + nonzero / weights)
        tl.store(spot + GRAD_L1, tl.load(spot + GRAD_L1) + l1)
        tl.store(spot + GRAD_L2, tl.load(spot + GRAD_L2) + tl.sqrt(l2))
        tl.store(spot + MEASURED, tl.load(spot + MEASURED) + 1.0)


@triton.jit
def norms(values, count, columns, BC: tl.constexpr):
    """How many are not zero, the sum of magnitudes, and that of squares."""
    n0 = tl.zeros([BC], tl.float64)
    n1 = tl.zeros([BC], tl.float64)
    n2 = tl.zeros([BC], tl.float64)
    for c in range(0, count, BC):
        col = c + columns
        x = tl.load(values + col, mask=col < count, other=0.0).to(tl.float64)
        n0 += tl.where(x != 0, 1.0, 0.0)
        n1 += tl.abs(x)
        n2 += x * x
    return tl.sum(n0, 0), tl.sum(n1, 0), tl.sum(n2, 0)


@triton.jit
def _fetch(
    place, run, here, inputs, data, index, permutations, slots, runs, LENGTH, INPUTS: tl.constexpr,
    IN: tl.constexpr, EARLY: tl.constexpr,
):
    """Copy one sample's inputs to where the first layer reads them."""
    source = data + tl.load(index + run * LENGTH + here).to(tl.int64) * inputs
    col = tl.arange(0, IN)
    if INPUTS == PERMUTED:
        slot = tl.load(slots + here).to(tl.int64)
        permutations += (slot * runs + run) * inputs
    x = _some_inputs(source, permutations, col, inputs, INPUTS)
    if EARLY:
        take_over()
    tl.store(place + col, x, mask=col < inputs)
    for c in range(IN, inputs, IN):
        x = _some_inputs(source, permutations, c + col, inputs, INPUTS)
        tl.store(place + c + col, x, mask=c + col < inputs)


@triton.jit
def _some_inputs(source, permutation, col, inputs, INPUTS: tl.constexpr):
    at = col
    if INPUTS == PERMUTED:
        at = tl.load(permutation + col, mask=col < inputs)
    return tl.load(source + at, mask=col < inputs, other=0.0)


@triton.jit(do_not_specialize=["runs", "LENGTH"])
def fetch_kernel(
    acts, layer_table, data, index, permutations, slots, clock, runs, A, LENGTH,
    INPUTS: tl.constexpr, IN: tl.constexpr,
):
    """Fetch the chunk's first sample."""
    run = tl.program_id(0).to(tl.int64)
    step = tl.load(clock)
    here = step - tl.load(clock + 1)
    inputs = tl.load(layer_table)
    pitch = tl.load(layer_table + 2) * 16
    place = acts + run * A + tl.load(layer_table + 4) * 16 - (step % 2) * pitch
    _fetch(place, run, here, inputs, data, index, permutations, slots, runs, LENGTH, INPUTS, IN, 0)
