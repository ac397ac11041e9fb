"""Stacks of learners that see their layers, on CUDA: a method's kernel as source.

A program is a learner: it goes through all steps of a chunk by itself, with barriers between what
its threads tell each other (:mod:`upgd.kernels.triton_network`). The source has the network's
sizes as numbers and its layers one after the other, so states of layers and of the network are
variables.

A step of the paper's network, 784-300-150-10 in float32, with n states per weight: the floor is
to read and write each of its 287 200 numbers, padding included, once per state and once for the
weights, 2.3·(1+n) MB. The first layer, 84% of that, is read and written once: the products with
this sample and with the next are formed while its weights are in registers. The other layers are
also read once to go back and once to go forward, for both samples together: 0.38 MB, so a step
moves 1.16 times the floor of a method without states. A method that divides by the largest trace
(η) reads weights and traces once more, which its floor has, too. All else stays in the caches.
Inputs of the next sample are asked for when a step begins and stored before the update.

At 4.8 TB/s the floor allows some 2 000 000 learner-steps/s without states. What keeps a program
from it is waiting: for a tile of weights (8 KB, of which a learner has 165) about a microsecond,
unless others fill the time. So as many programs as fit should share a multiprocessor, and a tile's
loads are issued before the one before it is stored (`stages`).
"""

from __future__ import annotations

from typing import Any

from upgd.kernels.layered import (
    INPUT_DECAY,
    INPUT_FLOOR,
    LAYER_NORM_EPSILON,
    phase_function,
)
from upgd.kernels.rules import MOST_NUMBERS, load_module
from upgd.kernels.triton_program import Program, block
from upgd.kernels.triton_recycle import RecycleWriter
from upgd.kernels.triton_rules import helpers

_HEADER = """
from upgd.kernels.triton_network import (
    backward, column_sizes, fetch, gradient_norms, lowest, normalised, normals_of, products, renew,
    row_sizes, settle, sums_of, unsettle,
)
from upgd.kernels.triton_random import four_normals
from upgd.kernels.triton_sample import losses

real = tl.constexpr(tl.{real})
tiny = tl.constexpr({tiny!r})
"""
_TINY = {"float32": 2.0**-126, "float64": 2.0**-1022}
_ARGUMENTS = (
    *("W", "S", "kept", "statistics", "hyper", "decays", "corrections", "seeds", "began"),
    *("scratch", "data", "index", "permutations", "slots", "labels", "targets", "series"),
    *("diverged", "measured", "start", "steps", "window", "windows", "first", "mine", "runs"),
    "LENGTH",
)
_INTEGERS = ("start", "steps", "window", "windows", "first", "mine", "runs", "LENGTH")
_NORMS = ("nonzero", "l1", "l2")


def compile_program(program: Program) -> Any:
    """The kernel ``learn``, see :func:`written`."""
    return load_module(written(program), f"layered_{program.real}").learn


def written(program: Program) -> str:
    """A module with the kernel ``learn``, to be launched with a program per learner."""
    return _Kernel(program).module()


def arguments() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the kernel's arguments, and of those that are whole numbers."""
    return _ARGUMENTS, _INTEGERS


class _Kernel(RecycleWriter):
    """Writes a kernel around the phases."""

    def module(self) -> str:
        p, jit = self.p, "@triton.jit\n"
        header = _HEADER.format(real=p.real, tiny=_TINY[p.real])
        functions = [
            jit + phase_function(self.method, number, "triton")
            for number in range(len(self.method.phases))
        ]
        self.kernel()
        start = f"@triton.jit(do_not_specialize={list(_INTEGERS)!r})\n"
        start += f"def learn({', '.join(_ARGUMENTS)}):"
        return "\n\n".join([helpers(p.real) + header, *functions, start]) + "\n" + self.text

    # ---------------------------------------------------------------------- the kernel
    def kernel(self) -> None:
        self.pointers()
        self.load_scalars()
        self.first_sample()
        with self.inside("for here in range(steps):"):
            self.hide_pointers()
            self("step = begin + here", "t = (step - born + 1).to(real)")
            self(f"x_now = even + (here % 2) * {self.layers[0].stride}")
            self(f"x_next = even + (1 - here % 2) * {self.layers[0].stride}")
            self(self.fetched("following", "here + 1"))
            self.loss()
            self.go_back()
            if self.p.diagnosed:
                self.diagnose()
            self.store_input("following", "x_next", "t + 1.0", "here + 1 < steps")
            self.barrier()
            self.phases()
            if self.method.recycle is not None:
                self.recycle()
            self.forward()
            self.progress()
        self.store_scalars()

    def pointers(self) -> None:
        p = self.p
        count, inputs = len(self.layers), p.layout.sizes[0]
        self("own = tl.program_id(0).to(tl.int64)", "run = first + own")
        self(f"W += run * {p.layout.size}", f"S += own * {p.layout.size}")
        self(f"gap = (own * 0 + mine) * {p.layout.size}", f"kept += own * {max(1, p.kept.size)}")
        self(f"hyper += run * {MOST_NUMBERS * count}")
        self(f"decays += run * {p.slots * count}", f"corrections += run * {p.slots * count}")
        self(f"statistics += run * {2 * inputs}", f"series += run * windows * {8}")
        self("index += run * LENGTH", "labels += run * LENGTH")
        self(f"targets += run * LENGTH * {p.layout.sizes[-1]}", f"permutations += run * {inputs}")
        self(f"scratch += own * {p.scratch['size']}")
        self.divide_scratch()
        self("seed = tl.load(seeds + run)", "born = tl.load(began + run)")
        self("begin = born * 0 + start", "bad = tl.load(diverged + run)")

    def divide_scratch(self) -> None:
        for name, at in self.p.scratch.items():
            if name not in ("odd", "size"):
                self(f"{name} = scratch + {at}")

    def hide_pointers(self) -> None:
        """Let pointers be unknown to the compiler in each step, as if they changed.

        Otherwise it computes the addresses of all a step's passes before the first step, and has no
        registers for them.
        """
        self("zero = 16 * (tl.load(began + run, volatile=True) - born)")
        self("W += zero", "S += zero", "kept += zero", "scratch += zero")
        self.divide_scratch()

    def scalars(self) -> list[tuple[str, str]]:
        """Variables that last from step to step, and where they lie."""
        kept, found = self.p.kept, []
        for layer in self.layers:
            for name in self.method.states_of("layers"):
                at = kept.at("layers", name, layer.number)
                found.append((f"layer{layer.number}_{name}", f"kept + {at}"))
            for k, state in enumerate(self.method.states):
                if state in self.method.decays:
                    at = self.p.slots * layer.number + k
                    found.append((f"c{layer.number}_{state}", f"corrections + {at}"))
        for name in self.method.states_of("network"):
            found.append((f"network_{name}", f"kept + {kept.at('network', name)}"))
        return found

    def load_scalars(self) -> None:
        for name, place in self.scalars():
            self(f"{name} = tl.load({place})")

    def store_scalars(self) -> None:
        self.barrier()
        for name, place in self.scalars():
            self(f"tl.store({place}, {name})")
        self("tl.store(diverged + run, bad)")

    # ------------------------------------------------------------------------- samples
    def fetched(self, name: str, here: str) -> str:
        inputs = self.p.layout.sizes[0]
        return (
            f"{name} = fetch(data, index, permutations, slots, {here}, runs, {inputs}, "
            f"{self.p.permuted}, {block(inputs)})"
        )

    def store_input(self, name: str, place: str, t: str, counts: str) -> None:
        inputs = self.p.layout.sizes[0]
        if self.p.input_norm:
            self(
                f"{name} = normalised({name}, statistics, {t}, {counts}, {inputs}, "
                f"{INPUT_DECAY!r}, {INPUT_FLOOR!r}, {block(inputs)})"
            )
        self(f"{name}_at = tl.arange(0, {block(inputs)})")
        self(f"tl.store({place} + {name}_at, {name}, mask={name}_at < {inputs})")

    def first_sample(self) -> None:
        self(self.fetched("opening", "0"))
        self.store_input("opening", "even", "(begin - born + 1).to(real)", "steps > 0")
        self.barrier()
        self.first_products("even", "even")
        self.forward()

    def first_products(self, now: str, was: str) -> None:
        layer = self.layers[0]
        rows, columns, _ = self.tile(layer)
        self(
            f"products(W, {now}, {was}, z_now, z_was, {self.sizes(layer)}, {rows}, {columns}, "
            f"{self.p.stages})"
        )

    # ------------------------------------------------------------------------- network
    def forward(self) -> None:
        """From the first layer's products to the last one's."""
        for layer, after in zip(self.layers[:-1], self.layers[1:], strict=True):
            n, at = after.number, layer.row_at
            self.barrier()
            self(
                f"settle(z_now + {at}, z_was + {at}, W + {layer.base}, act{n}, after{n}, "
                f"normal + {at}, scale + {layer.number}, {self.sizes(layer)}, "
                f"{block(layer.outputs)}, {self.p.activation}, {self.p.layer_norm}, "
                f"{LAYER_NORM_EPSILON!r})"
            )
            self.barrier()
            rows, columns, _ = self.tile(after, 1)
            self(
                f"products(W + {after.base}, act{n}, after{n}, z_now + {after.row_at}, "
                f"z_was + {after.row_at}, {self.sizes(after)}, {rows}, {columns}, "
                f"{self.p.stages})"
            )
        self.barrier()

    def score(self, z: str) -> None:
        """The loss of a sample and what is known with it."""
        last = self.layers[-1]
        wide = block(last.outputs)
        self(f"unit = tl.arange(0, {wide})", f"valid = unit < {last.outputs}")
        if self.p.squared:
            self("answer = 0", f"aim = targets + here * {last.outputs} + unit")
            self("aim = tl.load(aim, mask=valid, other=0.0)")
        else:
            self("answer = tl.load(labels + here)", "aim = valid")
        self(f"output = sums_of({z} + {last.row_at}, W + {last.base}, {self.sizes(last)}, {wide})")
        self(
            f"value, by_output, _curve, right = losses(output, answer, aim, valid, {last.outputs}, "
            f"{self.p.squared})"
        )

    def loss(self) -> None:
        self("spot = series + (step // window) * 8")
        self.score("z_now")
        self("loss = value.to(tl.float64)")
        self(f"tl.store(delta + {self.layers[-1].row_at} + unit, by_output, mask=valid)")
        self("tl.store(spot, tl.load(spot) + loss)")
        self("tl.store(spot + 2, tl.load(spot + 2) + right)")
        self('finite = (loss == loss) & (tl.abs(loss) < float("inf"))')
        self("bad = tl.where((bad < 0) & (finite == 0), step, bad)")
        self.barrier()

    def go_back(self) -> None:
        for layer in reversed(self.layers[1:]):
            below, n = self.layers[layer.number - 1], layer.number
            self(
                f"largest = backward(W + {layer.base}, delta + {layer.row_at}, act{n}, "
                f"delta + {below.row_at}, {self.sizes(layer)}, {self.back_tile(layer)}, "
                f"{self.p.activation})"
            )
            self('bad = tl.where((bad < 0) & (largest == float("inf")), step, bad)')
            self.barrier()
            if self.p.layer_norm:
                self(
                    f"unsettle(delta + {below.row_at}, normal + {below.row_at}, "
                    f"scale + {below.number}, {below.outputs}, {block(below.outputs)})"
                )
                self.barrier()

    def diagnose(self) -> None:
        hidden, weights = max(1, sum(self.p.layout.sizes[1:-1])), self.p.layout.parameters
        with self.inside("if tl.load(measured + step) != 0:"):
            for name in (*_NORMS, "zeros"):
                self(f"{name} = tl.zeros([], tl.float64)")
            for layer in self.layers:
                self(
                    f"a, b, c, d = gradient_norms({self.input_of(layer)}, delta + {layer.row_at}, "
                    f"{layer.inputs}, {layer.outputs}, 256)"
                )
                self("nonzero += a", "l1 += b", "l2 += c")
                if layer.number:
                    self("zeros += d")
            values = [f"zeros / {hidden}", f"nonzero / {weights}", "l1", "tl.sqrt(l2)", "1.0"]
            for column, value in enumerate(values, 3):
                self(f"tl.store(spot + {column}, tl.load(spot + {column}) + {value})")

    def progress(self) -> None:
        """How much less the same sample's loss is after the update."""
        self.score("z_was")
        self("gained = 1.0 - value.to(tl.float64) / tl.maximum(loss, 1e-8)")
        self("gained = tl.minimum(tl.maximum(gained, 0.0), 1.0)")
        self("gained = tl.where(value == value, gained, 0.0)")
        self("tl.store(spot + 1, tl.load(spot + 1) + gained)")
