# mypy: ignore-errors
"""An agent's arithmetic, compiled: acting, normalising, advantages, gradients of the PPO loss.

Functions work on one agent and one thread, with a fixed order of sums, so an agent's numbers do not
depend on others. The networks are dense layers with tanh between them. The optimizer keeps weights
row by row; :func:`pack` copies them, padded to whole vectors, into a *workspace* that also holds
activations and their derivatives. :class:`upgd.rl.network.Network` defines the layout.
:mod:`upgd.rl.ppo` has the same mathematics for tensors.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

from upgd.kernels import compiling
from upgd.kernels.cpu_functions import COEFFICIENTS, draw_words, normals
from upgd.kernels.cpu_math import EXP2, OPTIONS, bits_float, float_bits
from upgd.kernels.vectors import LANES, load, minimum, spread, store

_compiled = compiling.njit(nogil=True, error_model="numpy")
_helper = njit(nogil=True, error_model="numpy")

# The columns of a layer's row: sizes, padded sizes, and where its numbers begin.
INPUTS, OUTPUTS, IN_PITCH, OUT_PITCH, WEIGHT, BIAS = range(6)  # the last two in the parameters
ACROSS, ALONG, OFFSET, BEFORE, AFTER, DELTA, DELTA_BEFORE, HIDDEN = range(6, 14)  # the workspace
COLUMNS = 14
# The purpose of a random number, in place of the tensor number of optimizers.
ACTION, SHUFFLE, RESET, INITIAL = (0x80000000 + k for k in range(4))
# Places of the results of an agent's loss.
POLICY_LOSS, VALUE_LOSS, ENTROPY, APPROX_KL, CLIP_FRACTION, POLICY_NORM, VALUE_NORM = range(7)
LOSS = MEASURES = 7
FOUND = 8
# The normalisers' numbers before the observations' means and variances.
COUNT, RETURN, RETURN_MEAN, RETURN_VAR, RETURN_COUNT, NORMALISERS = range(6)
EPSILON = 1e-8
LOG_ROOT_TAU = 0.5 * math.log(2 * math.pi)

_F, _I = np.float32, np.int32
# ``tanh x ≈ x + x³·Σ _TANH[k]·x²ᵏ`` for ``|x| ≤ ½``, to 1e-8 of x.
_TANH = (
    -0.3333333278984987,
    0.1333322420077543,
    -0.05393302436059887,
    0.021467024549193803,
    -0.006934024396536238,
)
_LOG2E2 = 2 / math.log(2)


# ---------------------------------------------------------------------------- networks
@njit(forceinline=True, **OPTIONS)
def tanh32(x):
    """The hyperbolic tangent of a float32, to about 1e-7 of its value; loops with it vectorise."""
    size = abs(x)
    # e^(2|x|) = 2ⁿ·2ᶠ; beyond 2^30 the result is 1. See cpu_math.sigmoid32.
    y = minimum(size * _F(_LOG2E2), _F(30))
    shifted = y + _F(12582912)
    f = y - (shifted - _F(12582912))
    p = _F(EXP2[5])
    p = p * f + _F(EXP2[4])
    p = p * f + _F(EXP2[3])
    p = p * f + _F(EXP2[2])
    p = p * f + _F(EXP2[1])
    p = p * f + _F(EXP2[0])
    e = bits_float(_I(float_bits(p) + _I(float_bits(shifted) << _I(23))))
    far = _F(1) - _F(2) / (e + _F(1))
    s = size * size
    q = _F(_TANH[4])
    q = q * s + _F(_TANH[3])
    q = q * s + _F(_TANH[2])
    q = q * s + _F(_TANH[1])
    q = q * s + _F(_TANH[0])
    near = size + size * s * q
    found = near if size < _F(0.5) else far
    return -found if x < _F(0) else found


def _tanh(x):
    raise NotImplementedError


@overload(_tanh, jit_options=dict(OPTIONS))
def _tanh_of(x):
    if x == types.float32:
        return lambda x: tanh32(x)
    return lambda x: math.tanh(x)


@njit(**OPTIONS)
def _squash(values, start, count):
    """tanh in place."""
    some = values[start : start + count]  # loops from zero on vectorise
    for i in range(count):
        some[i] = _tanh(some[i])


@_helper
def _product(out, o, pitch, a, at, row, step, b, bt, width, rows, inner, columns, bias, bias_at):
    """out[r, c] = bias[c] + Σₖ a[at + r·row + k·step] · b[bt + k·width + c]

    `columns` is a whole number of vectors; `row` and `step` say how `a` lies, transposed or not.
    """
    for c in range(0, columns, LANES):
        start = load(bias, bias_at + c)
        r = 0
        while r + 4 <= rows:
            s0, s1, s2, s3 = start, start, start, start
            i = at + r * row
            for k in range(inner):
                v = load(b, bt + k * width + c)
                s0 = s0 + a[i] * v
                s1 = s1 + a[i + row] * v
                s2 = s2 + a[i + 2 * row] * v
                s3 = s3 + a[i + 3 * row] * v
                i += step
            place = o + r * pitch + c
            store(out, place, s0)
            store(out, place + pitch, s1)
            store(out, place + 2 * pitch, s2)
            store(out, place + 3 * pitch, s3)
            r += 4
        while r < rows:
            s0 = start
            i = at + r * row
            for k in range(inner):
                s0 = s0 + a[i] * load(b, bt + k * width + c)
                i += step
            store(out, o + r * pitch + c, s0)
            r += 1


@_helper
def _column_sums(out, o, a, at, pitch, rows, columns):
    zero = spread(out.dtype.type(0))
    for c in range(0, columns, LANES):
        s = zero
        for r in range(rows):
            s = s + load(a, at + r * pitch + c)
        store(out, o + c, s)


@_compiled
def orthonormalise(rows):
    """Gram-Schmidt, twice, in place; results of libraries depend on their threads."""
    for i in range(len(rows)):
        for k in range(2 * i):
            j = k % i
            share = 0.0
            for c in range(rows.shape[1]):
                share += rows[i, c] * rows[j, c]
            for c in range(rows.shape[1]):
                rows[i, c] -= share * rows[j, c]
        square = 0.0
        for c in range(rows.shape[1]):
            square += rows[i, c] * rows[i, c]
        for c in range(rows.shape[1]):
            rows[i, c] /= math.sqrt(square)


@_compiled
def pack(layers, weights, work):
    """Copy all layers' weights into the workspace: transposed, as they are, and biases."""
    for l in range(len(layers)):
        t = layers[l]
        inputs, outputs = t[INPUTS], t[OUTPUTS]
        for o in range(outputs):
            w, along = t[WEIGHT] + o * inputs, t[ALONG] + o * t[IN_PITCH]
            across, pitch = t[ACROSS] + o, t[OUT_PITCH]
            for i in range(inputs):
                value = weights[w + i]
                work[along + i] = value
                work[across + i * pitch] = value
            work[t[OFFSET] + o] = weights[t[BIAS] + o]


@_compiled
def forward(layers, work, rows):
    """Outputs of the packed networks for `rows` inputs in the workspace."""
    for l in range(len(layers)):
        t = layers[l]
        _product(
            *(work, t[AFTER], t[OUT_PITCH], work, t[BEFORE], t[IN_PITCH], 1),
            *(work, t[ACROSS], t[OUT_PITCH], rows, t[INPUTS], t[OUT_PITCH], work, t[OFFSET]),
        )
        if t[HIDDEN]:
            _squash(work, t[AFTER], rows * t[OUT_PITCH])


@_helper
def _backward(layers, work, gradient, rows, scratch, zeros):
    """Gradients of all weights, from derivatives with respect to the outputs."""
    for l in range(len(layers) - 1, -1, -1):
        t = layers[l]
        inputs, outputs = t[INPUTS], t[OUTPUTS]
        delta, pitch, before = t[DELTA], t[OUT_PITCH], t[IN_PITCH]
        _product(
            *(work, scratch, before, work, delta, 1, pitch),
            *(work, t[BEFORE], before, outputs, rows, before, work, zeros),
        )
        for o in range(outputs):
            w, s = t[WEIGHT] + o * inputs, scratch + o * before
            for i in range(inputs):
                gradient[w + i] = work[s + i]
        _column_sums(work, scratch, work, delta, pitch, rows, pitch)
        for o in range(outputs):
            gradient[t[BIAS] + o] = work[scratch + o]
        if t[DELTA_BEFORE] >= 0:
            d, h = t[DELTA_BEFORE], t[BEFORE]
            _product(
                *(work, d, before, work, delta, pitch, 1),
                *(work, t[ALONG], before, rows, outputs, before, work, zeros),
            )
            _through_tanh(work, d, h, rows * before)


@njit(**OPTIONS)
def _through_tanh(work, d, h, count):
    one = work.dtype.type(1)
    delta, output = work[d : d + count], work[h : h + count]
    for i in range(count):
        delta[i] = delta[i] * (one - output[i] * output[i])


# ------------------------------------------------------------------------------- acting
@_helper
def _moments(mean, var, count, value):
    """Update a running mean and variance with one value, as gymnasium's RunningMeanStd does."""
    delta = value - mean
    total = count + 1.0
    return mean + delta / total, (var * count + delta * delta * count / total) / total


@_compiled
def count_observation(normalisers, raw):
    """Update the running mean and variance with an observation."""
    size = len(raw)
    count = normalisers[COUNT]
    for i in range(size):
        m, v = NORMALISERS + i, NORMALISERS + size + i
        normalisers[m], normalisers[v] = _moments(normalisers[m], normalisers[v], count, raw[i])
    normalisers[COUNT] = count + 1.0


@_compiled
def normalise_observation(normalisers, raw, clip, out):
    """Normalise an observation by its running deviation; returns whether it is finite."""
    size, sound = len(raw), True
    for i in range(size):
        sound = sound and math.isfinite(raw[i])
        mean, var = normalisers[NORMALISERS + i], normalisers[NORMALISERS + size + i]
        out[i] = min(max((raw[i] - mean) / math.sqrt(var + EPSILON), -clip), clip)
    return sound


@_compiled
def normalise_reward(normalisers, reward, terminated, gamma, clip):
    """A reward in units of the running deviation of the discounted return."""
    kept = 0.0 if terminated else normalisers[RETURN] * gamma
    value = normalisers[RETURN] = kept + reward
    mean, var = normalisers[RETURN_MEAN], normalisers[RETURN_VAR]
    count = normalisers[RETURN_COUNT]
    normalisers[RETURN_MEAN], normalisers[RETURN_VAR] = _moments(mean, var, count, value)
    normalisers[RETURN_COUNT] = count + 1.0
    return min(max(reward / math.sqrt(normalisers[RETURN_VAR] + EPSILON), -clip), clip)


@_compiled
def act(layers, work, deviations, observation, low, high, seed, step, action, clipped):
    """Draw an action; returns its log probability and the state's value.

    `deviations` are logarithms; seed and step determine the draw. `action` receives it, and
    `clipped` the same within its bounds.
    """
    first = layers[0, BEFORE]
    for i in range(len(observation)):
        work[first + i] = observation[i]
    forward(layers, work, 1)
    last = len(layers) // 2 - 1
    mean, value = layers[last, AFTER], work[layers[2 * last + 1, AFTER]]
    real = work.dtype.type
    log_probability = 0.0
    quads = (len(action) + 3) // 4
    pitch = -(-quads // LANES) * LANES
    drawn, words = np.empty(4 * pitch), np.empty(4 * pitch, np.uint32)
    normals(drawn, words, COEFFICIENTS, pitch, quads, 0, np.uint32(ACTION), step, seed)
    for i in range(len(action)):
        z = drawn[i % 4 * pitch + i // 4]
        deviation = np.float64(deviations[i])
        action[i] = real(np.float64(work[mean + i]) + math.exp(deviation) * z)
        clipped[i] = min(max(np.float64(action[i]), low[i]), high[i])
        # As in the update: from the stored action.
        z = (np.float64(action[i]) - np.float64(work[mean + i])) * math.exp(-deviation)
        log_probability -= 0.5 * z * z + deviation + LOG_ROOT_TAU
    return log_probability, value


@_compiled
def value(layers, work, observation):
    """The value of a normalised observation."""
    first = layers[0, BEFORE]
    for i in range(len(observation)):
        work[first + i] = observation[i]
    half = layers[len(layers) // 2 :]
    forward(half, work, 1)
    return work[half[len(half) - 1, AFTER]]


@_compiled
def receive(normalisers, raw, reward, terminated, gamma, clip_seen, clip_reward, out, rewards, t):
    """Update the normalisers with a step and normalise it; returns whether it is finite."""
    if not math.isfinite(reward):
        return False
    rewards[t] = normalise_reward(normalisers, reward, terminated, gamma, clip_reward)
    count_observation(normalisers, raw)
    return normalise_observation(normalisers, raw, clip_seen, out)


@_compiled
def reset_seed(seed, episode):
    """The environment's seed for an episode."""
    words = np.empty(4 * LANES, np.uint32)
    draw_words(words, LANES, 1, 0, np.uint32(RESET), episode, seed)
    return np.int64(words[0] >> np.uint32(1))


# ---------------------------------------------------------------------------- learning
@_compiled
def advantages_and_returns(rewards, values, ends, gamma, decay, advantages, returns):
    """Generalised advantage estimates; see :func:`upgd.rl.ppo.advantages_and_returns`."""
    last = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        goes_on = 1.0 - ends[t + 1]
        delta = rewards[t] + gamma * values[t + 1] * goes_on - values[t]
        last = delta + gamma * decay * goes_on * last
        advantages[t] = last
        returns[t] = advantages[t] + values[t]


@_compiled
def permutation(out, seed, number):
    """Fill `out` with a permutation, a function of seed and number: the Fisher-Yates shuffle."""
    quads = (len(out) + 3) // 4
    pitch = -(-quads // LANES) * LANES
    words = np.empty(4 * pitch, np.uint32)
    draw_words(words, pitch, quads, 0, np.uint32(SHUFFLE), number, seed)
    for i in range(len(out)):
        out[i] = i
    for i in range(len(out) - 1, 0, -1):
        word = words[i % 4 * pitch + i // 4]
        j = np.int64((np.uint64(word) * np.uint64(i + 1)) >> np.uint64(32))
        out[i], out[j] = out[j], out[i]


# fmt: off
@_compiled
def gradient(
    layers, work, scratch, zeros, weights, deviations_at, gradients,
    observations, actions, log_probabilities, advantages, returns, values, index,
    clip, value_weight, entropy_weight, largest_norm, normalise, clip_values, found,
):
    """The gradient of the PPO loss on one minibatch, its norm clipped.

    The workspace has room for a layer's gradient at `scratch`, and zeros at `zeros`; `index` has
    the minibatch's steps. Losses and norms are added to `found`; the loss itself is overwritten.
    """
    # fmt: on
    count, size, inputs = len(index), actions.shape[1], observations.shape[1]
    last = len(layers) // 2 - 1
    policy, value = layers[last], layers[2 * last + 1]
    pack(layers, weights, work)
    first, pitch = layers[0, BEFORE], layers[0, IN_PITCH]
    for b in range(count):
        for i in range(inputs):
            work[first + b * pitch + i] = observations[index[b], i]
    forward(layers, work, count)

    mean, deviation = 0.0, 0.0
    for b in range(count):
        mean += np.float64(advantages[index[b]])
    mean /= count
    for b in range(count):
        deviation += (np.float64(advantages[index[b]]) - mean) ** 2
    deviation = math.sqrt(deviation / (count - 1)) + EPSILON
    if not normalise:
        mean, deviation = 0.0, 1.0

    real = work.dtype.type
    inverse = np.empty(size)  # 1/σ
    constant = 0.0
    for i in range(size):
        log_deviation = np.float64(weights[deviations_at + i])
        inverse[i] = math.exp(-log_deviation)
        constant += log_deviation + LOG_ROOT_TAU
    deviations = np.zeros(size)
    total, value_total, kl, clipped = 0.0, 0.0, 0.0, 0.0
    for b in range(count):
        t = index[b]
        out, d_out = policy[AFTER] + b * policy[OUT_PITCH], policy[DELTA] + b * policy[OUT_PITCH]
        log_probability = -constant
        for i in range(size):
            z = (np.float64(actions[t, i]) - np.float64(work[out + i])) * inverse[i]
            log_probability -= 0.5 * z * z
        log_ratio = log_probability - np.float64(log_probabilities[t])
        ratio = math.exp(log_ratio)
        advantage = (np.float64(advantages[t]) - mean) / deviation
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total += max(-advantage * ratio, -advantage * bounded)
        kl += ratio - 1 - log_ratio
        clipped += 1.0 if abs(ratio - 1) > clip else 0.0
        # Where clipping is active the gradient is zero.
        slope = 0.0 if -advantage * ratio < -advantage * bounded else -advantage * ratio / count
        for i in range(size):
            z = (np.float64(actions[t, i]) - np.float64(work[out + i])) * inverse[i]
            work[d_out + i] = real(slope * z * inverse[i])
            deviations[i] += slope * (z * z - 1)

        out, d_out = value[AFTER] + b * value[OUT_PITCH], value[DELTA] + b * value[OUT_PITCH]
        new, old, target = np.float64(work[out]), np.float64(values[t]), np.float64(returns[t])
        error = new - target
        kept = old + min(max(new - old, -clip), clip) - target if clip_values else error
        value_total += 0.5 * max(error * error, kept * kept)
        held = abs(new - old) > clip and error * error < kept * kept
        slope = 0.0 if held else value_weight * error / count
        work[d_out] = real(slope)

    _backward(layers[: last + 1], work, gradients, count, scratch, zeros)
    _backward(layers[last + 1 :], work, gradients, count, scratch, zeros)
    entropy = 0.0
    for i in range(size):
        gradients[deviations_at + i] = real(deviations[i] - entropy_weight)
        entropy += 0.5 + LOG_ROOT_TAU + np.float64(weights[deviations_at + i])

    split = layers[last + 1, WEIGHT]
    policy_square, value_square = 0.0, 0.0
    for i in range(split):
        policy_square += np.float64(gradients[i]) ** 2
    for i in range(split, len(gradients)):
        value_square += np.float64(gradients[i]) ** 2
    factor = largest_norm / (math.sqrt(policy_square + value_square) + 1e-6)
    if factor < 1.0:
        for i in range(len(gradients)):
            gradients[i] = real(np.float64(gradients[i]) * factor)
    found[POLICY_LOSS] += total / count
    found[VALUE_LOSS] += value_total / count
    found[ENTROPY] += entropy
    found[APPROX_KL] += kl / count
    found[CLIP_FRACTION] += clipped / count
    found[LOSS] = total / count + value_weight * value_total / count - entropy_weight * entropy
    found[POLICY_NORM] += math.sqrt(policy_square)
    found[VALUE_NORM] += math.sqrt(value_square)


@_compiled
def value_error(layers, work, weights, observations, returns, index):
    """The mean squared error of the value network on a minibatch."""
    half = layers[len(layers) // 2 :]
    pack(half, weights, work)
    first, pitch = layers[0, BEFORE], layers[0, IN_PITCH]
    for b in range(len(index)):
        for i in range(observations.shape[1]):
            work[first + b * pitch + i] = observations[index[b], i]
    forward(half, work, len(index))
    last, total = half[len(half) - 1], 0.0
    for b in range(len(index)):
        error = np.float64(work[last[AFTER] + b * last[OUT_PITCH]]) - returns[index[b]]
        total += error * error
    return total / len(index)
