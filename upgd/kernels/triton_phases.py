"""The phases of a layered method as lines of a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from upgd.kernels.layout import Layer
from upgd.kernels.rules import MOST_NUMBERS
from upgd.kernels.triton_program import Writer, block
from upgd.rules.vocabulary import Phase, Place


class PhaseWriter(Writer):
    """Writes a step's phases. They find inputs, deltas and states where `pointers` put them."""

    def phases(self) -> None:
        """All phases; those over weights that follow each other directly are one pass."""
        for layer in self.layers:
            for k, state in enumerate(self.method.states):
                if state in self.method.decays:
                    at = self.p.slots * layer.number + k
                    name = f"c{layer.number}_{state}"
                    self(f"decay = tl.load(decays + {at})")
                    self(f"{name} = {name} * decay + (1.0 - decay)")
        if self.method.recycle is not None:
            self.grow_older()
        waiting: list[int] = []
        for number, phase in enumerate(self.method.phases):
            known = {name for k in waiting for name in self.method.phases[k].sums}
            if waiting and (phase.over != "weights" or phase.reduce or known & {*phase.reads}):
                self.pass_over_weights(waiting)
                waiting = []
            if phase.over == "weights":
                if phase.reduce:
                    self.largest_trace(number)
                waiting.append(number)
            elif phase.over == "network":
                self.run_scalars(number, None)
            elif phase.over == "layers":
                for layer in self.layers:
                    self.run_scalars(number, layer)
                for name in phase.sums:
                    terms = [f"{name}{layer.number}" for layer in self.layers]
                    self(f"network_{name} = {' + '.join(terms)}")
            else:
                self.run_vectors(number)
        if waiting:
            self.pass_over_weights(waiting)
        if self.last_move < 0:  # products with the next sample are needed all the same
            self.first_products("x_next", "x_now")

    def grow_older(self) -> None:
        """Count the age of all hidden units."""
        for layer in self.layers[:-1]:
            place = self.places("features", layer)["age"]
            self(f"i = tl.arange(0, {block(layer.outputs)})", f"inside = i < {layer.outputs}")
            self(f"tl.store({place}, tl.load({place}, mask=inside) + 1.0, mask=inside)")

    def first_products(self, now: str, was: str) -> None:
        """The first layer's products with two vectors."""
        raise NotImplementedError

    # -------------------------------------------------------------------------- values
    def numbers(self, names: Iterable[str], layer: Layer) -> None:
        """Load a layer's hyperparameters among `names`."""
        for k, name in enumerate(self.method.numbers):
            if name in names:
                self(f"n_{name} = tl.load(hyper + {MOST_NUMBERS * layer.number + k})")

    def shared(self, name: str, layer: Layer | None) -> str:
        """What a phase reads that is no vector's: of a layer, of the network, hyperparameters."""
        number = layer.number if layer else 0
        if layer is not None and name in self.method.states_of("layers"):
            return f"layer{number}_{name}"
        if name in self.method.states_of("network"):
            return f"network_{name}"
        last = number == len(self.layers) - 1
        constants = {"head": float(last), "first": float(number == 0 and not last)}
        constants["bound"] = max(1, self.layers[number].inputs) ** -0.5
        if layer is not None and name in constants:
            return f"tl.full([], {constants[name]!r}, real)"
        if name == "eta":
            return f"eta{number}"
        if name.startswith("c_") and name[2:] in self.method.states:
            state = name[2:]
            return f"c{number}_{state}" if state in self.method.decays else "tl.full([], 1.0, real)"
        return "t" if name == "t" else f"n_{name}"

    def call(
        self, number: int, values: dict[str, str], layer: Layer | None, prefix: str = "r"
    ) -> list[str]:
        """Run a phase on these values and what it shares; returns the names of its results.

        Within loops they need a `prefix` of their own: Triton's variables keep their shapes.
        """
        phase = self.method.phases[number]
        count = len(phase.writes) + len(phase.sums)
        results = [f"{prefix}{k}" for k in range(count)]
        given = [values.get(name) or self.shared(name, layer) for name in phase.reads]
        self(f"{', '.join(results)} = phase_{number}({', '.join(given)})")
        return results

    # ------------------------------------------------------------------------- scalars
    def run_scalars(self, number: int, layer: Layer | None) -> None:
        """A phase over the network, or over one layer; `<sum><layer>` are what it sums up."""
        phase = self.method.phases[number]
        self.numbers(phase.reads, layer or self.layers[0])
        results = self.call(number, {}, layer)
        owner = f"layer{layer.number}" if layer else "network"
        names = [f"{owner}_{name}" for name in phase.writes]
        names += [f"{name}{layer.number}" for name in phase.sums] if layer else []
        for name, result in zip(names, results, strict=True):
            self(f"{name} = tl.zeros([], real) + {result}")

    # ------------------------------------------------------------------------- vectors
    def run_vectors(self, number: int) -> None:
        """A phase over inputs, units, features or biases."""
        phase = self.method.phases[number]
        if phase.over == "features":
            for layer in self.layers[1:]:
                self.measure(phase, layer)
            self.barrier()
        for layer in self.layers:
            if phase.over != "features" or layer.number:
                self.run_vector(number, layer)
        self.barrier()

    def run_vector(self, number: int, layer: Layer) -> None:
        phase, place = self.method.phases[number], self.method.phases[number].over
        of = self.layers[layer.number - 1] if place == "features" else layer
        count = layer.inputs if place in ("inputs", "features") else layer.outputs
        self(f"i = tl.arange(0, {block(count)})", f"inside = i < {count}")
        where = {
            "x": f"{self.input_of(layer)} + i",
            "d": f"delta + {layer.row_at} + i",
            "w_in": f"w_in + {of.row_at} + i",
            "w_out": f"w_out + {of.row_at} + i",
        }
        values, stores = {}, {}
        if place == "biases":
            column = f"{layer.base + layer.inputs} + i * {layer.stride}"
            stores = {"w": f"W + {column}"} | {
                state: f"S + {k} * gap + {column}" for k, state in enumerate(self.method.states)
            }
            where |= {"g": where["d"], **stores, **self.places("units", layer)}
            values["x"] = "tl.full([], 1.0, real)"
            if "noise" in phase.reads:
                values["noise"] = self.bias_noise(layer)
        else:
            stores = self.places(place, of)
            where |= stores
        self.numbers(phase.reads, layer)
        for name in phase.reads:
            if name in where and name not in values:
                self(f"v_{name} = tl.load({where[name]}, mask=inside, other=0.0)")
                values[name] = f"v_{name}"
        results = self.call(number, values, layer)
        for name, result in zip(phase.writes, results, strict=False):
            self(f"tl.store({stores[name]}, tl.where(inside, {result}, 0.0), mask=inside)")
        for name, result in zip(phase.sums, results[len(phase.writes) :], strict=True):
            self(f"layer{layer.number}_{name} = tl.sum(tl.where(inside, {result}, 0.0), 0)")

    def places(self, place: Place, layer: Layer, index: str = "i") -> dict[str, str]:
        """Where the states of a place lie."""
        at = self.p.kept.at
        return {
            name: f"kept + {at(place, name, layer.number)} + {index}"
            for name in self.method.states_of(place)
        }

    def bias_noise(self, layer: Layer) -> str:
        if not self.p.noisy:
            return "tl.full([], 0.0, real)"
        self(
            f"noise = normals_of(seed, i, i % {layer.span}, i * 0 + {2 * layer.number + 1}, step, "
            f"{layer.outputs}, real)"
        )
        return "noise"

    def measure(self, phase: Phase, layer: Layer) -> None:
        """The mean magnitude of weights into and out of the units before a layer."""
        before = self.layers[layer.number - 1]
        if "w_in" in phase.reads and not self.sizes_in_passing:
            rows, columns, _ = self.tile(before, 1)
            self(
                f"row_sizes(W + {before.base}, w_in + {before.row_at}, {self.sizes(before)}, "
                f"{rows}, {columns}, {self.p.stages})"
            )
        if "w_out" in phase.reads:
            self(
                f"column_sizes(W + {layer.base}, w_out + {before.row_at}, {self.sizes(layer)}, "
                f"{self.back_tile(layer)})"
            )

    # ------------------------------------------------------------------------- weights
    def largest_trace(self, number: int) -> None:
        """η from a first pass that stores nothing."""
        trace = self.method.phases[number].writes[0]
        for layer in self.layers:
            self.run_tiles([number], layer, measuring=True)
        corrected = trace in self.method.decays
        for layer in self.layers:
            terms = []
            for other in self.layers:
                ratio = f"(c{layer.number}_{trace} / c{other.number}_{trace}).to(real)"
                terms.append(f"top{other.number}" + (f" * {ratio}" if corrected else ""))
            self(f"eta{layer.number} = {terms[0]}")
            for term in terms[1:]:
                self(f"eta{layer.number} = tl.maximum(eta{layer.number}, {term})")
            self(f"eta{layer.number} = tl.maximum(tl.abs(eta{layer.number}), tiny)")
        self.barrier()

    def pass_over_weights(self, numbers: Sequence[int]) -> None:
        for layer in self.layers:
            self.run_tiles(numbers, layer)
        self.barrier()

    def run_tiles(self, numbers: Sequence[int], layer: Layer, measuring: bool = False) -> None:
        """Phases over a layer's weights, tile by tile: all loads of a tile, then its stores.

        The last pass that moves weights also forms the first layer's products with this sample and
        the next, and measures rows. With `measuring` only the largest trace, ``top<layer>``, is
        found.
        """
        phases = [self.method.phases[k] for k in numbers]
        reads = {name for phase in phases for name in phase.reads}
        noisy = self.draws() and "noise" in reads
        rows, columns, lanes = self.tile(layer)
        if not noisy:
            rows, lanes = rows * lanes, 1
        passing = self.last_move in numbers and not measuring
        forms = passing and layer.number == 0
        sizes = passing and self.sizes_in_passing and layer is not self.layers[-1]
        span = layer.span if noisy else layer.outputs
        shape = f"[{rows}, {columns}]"
        sums = [] if measuring else [name for phase in phases for name in phase.sums]
        self.numbers(reads, layer)
        if measuring:
            self(f'top = tl.full({shape}, float("-inf"), real)')
        for name in sums:
            self(f"sum_{name} = tl.zeros({shape}, real)")
        each = range(lanes)
        made = [*(("now", "was") if forms else ()), *(("size",) if sizes else ())]
        with self.inside(f"for r in range(0, {span}, {rows}):"):
            self(f"quad = r + tl.arange(0, {rows})")
            for j in each:
                self(f"row{j} = quad + {j * span}")
                self(f"on{j} = (quad < {span}) & (row{j} < {layer.outputs})")
                if reads & {"d", "g"}:
                    self(f"d{j} = tl.load(delta + {layer.row_at} + row{j}, mask=on{j}, other=0.0)")
                for name, place in self.places("units", layer, f"row{j}").items():
                    if name in reads:
                        self(f"u{j}_{name} = tl.load({place}, mask=on{j}, other=0.0)")
                self(*(f"{name}{j} = tl.zeros({shape}, real)" for name in made))
            with self.inside(
                f"for c in tl.range(0, {layer.stride}, {columns}, num_stages={self.p.stages}):"
            ):
                self.columns(reads, layer, columns, forms, noisy)
                for j in each:
                    self.load_tile(phases, layer, j)
                for j in each:
                    self.run_tile(numbers, layer, j, measuring, noisy)
                    if forms:
                        self(f"now{j} = tl.fma(w{j}, y[None, :], now{j})")
                        self(f"was{j} = tl.fma(w{j}, x[None, :], was{j})")
                    if sizes:
                        weights = f"tl.where((cols < {layer.inputs})[None, :], tl.abs(w{j}), 0.0)"
                        self(f"size{j} += {weights}")
                for j in each if not measuring else ():
                    self.store_tile(phases, j)
            for j in each:
                if forms:
                    self(f"tl.store(z_now + row{j}, tl.sum(now{j}, 1), mask=on{j})")
                    self(f"tl.store(z_was + row{j}, tl.sum(was{j}, 1), mask=on{j})")
                if sizes:
                    value = f"tl.sum(size{j}, 1) / {layer.inputs}"
                    self(f"tl.store(w_in + {layer.row_at} + row{j}, {value}, mask=on{j})")
        if measuring:
            self(f"top{layer.number} = tl.max(tl.max(top, 1), 0)")
        for name in sums:
            self(f"layer{layer.number}_{name} = tl.sum(tl.sum(sum_{name}, 1), 0)")

    def columns(
        self, reads: set[str], layer: Layer, columns: int, forms: bool, noisy: bool
    ) -> None:
        """What a tile's columns share."""
        within = f"mask=cols < {layer.stride}, other=0.0"
        self(f"cols = c + tl.arange(0, {columns})")
        if forms or reads & {"x", "g"}:
            self(f"x = tl.load({self.input_of(layer)} + cols, {within})")
            bias = f"tl.where(cols == {layer.inputs}, 1.0, x)"
            self(f"one = {'x' if self.own_biases else bias}")
        if forms:
            self(f"y = tl.load(x_next + cols, {within})")
        for name, place in self.places("inputs", layer, "cols").items():
            if name in reads:
                self(f"i_{name} = tl.load({place}, {within})")
        self(f"owned = (cols {'<' if self.own_biases else '<='} {layer.inputs})[None, :]")
        if noisy:
            inputs, tensor = layer.inputs, 2 * layer.number
            self(f"bias = (cols == {inputs})[None, :]")
            self(f"counter = quad[:, None] * {inputs} + cols[None, :]")
            self("counter = tl.where(bias, quad[:, None], counter)")
            self(f"tensor = tl.where(bias, {tensor + 1}, {tensor}) + counter * 0")
            self("z0, z1, z2, z3 = four_normals(seed, counter, tensor, step, real)")

    def load_tile(self, phases: Sequence[Phase], layer: Layer, j: int) -> None:
        """Weights ``w<j>`` and states ``s<j>_…`` of a tile."""
        named = {name for phase in phases for name in (*phase.reads, *phase.writes)}
        self(f"inside{j} = on{j}[:, None] & (cols < {layer.stride})[None, :]")
        self(f"place{j} = {layer.base} + row{j}[:, None] * {layer.stride} + cols[None, :]")
        self(f"w{j} = tl.load(W + place{j}, mask=inside{j}, other=0.0)")
        for k, state in enumerate(self.method.states):
            if state in named:
                place = f"S + {k} * gap + place{j}"
                self(f"s{j}_{state} = tl.load({place}, mask=inside{j}, other=0.0)")

    def run_tile(
        self, numbers: Sequence[int], layer: Layer, j: int, measuring: bool, noisy: bool
    ) -> None:
        """A tile through the phases, which change ``w<j>`` and ``s<j>_…``."""
        values = {"w": f"w{j}", "g": f"(d{j}[:, None] * one[None, :])"}
        values |= {"d": f"d{j}[:, None]", "x": "one[None, :]"}
        values["noise"] = f"z{j}" if noisy else "tl.full([], 0.0, real)"
        values |= {name: f"u{j}_{name}[:, None]" for name in self.method.states_of("units")}
        values |= {name: f"i_{name}[None, :]" for name in self.method.states_of("inputs")}
        values |= {state: f"s{j}_{state}" for state in self.method.states}
        mine = f"inside{j} & owned"
        for number in numbers:
            phase = self.method.phases[number]
            results = self.call(number, values, layer, "q")
            if measuring:
                self(f'top = tl.maximum(top, tl.where({mine}, {results[0]}, float("-inf")))')
                return
            for name, result in zip(phase.writes, results, strict=False):
                self(f"{values[name]} = tl.where(owned, {result}, {values[name]})")
            for name, result in zip(phase.sums, results[len(phase.writes) :], strict=True):
                self(f"sum_{name} += tl.where({mine}, {result}, 0.0)")

    def store_tile(self, phases: Sequence[Phase], j: int) -> None:
        written = {name for phase in phases for name in phase.writes}
        if "w" in written:
            self(f"tl.store(W + place{j}, w{j}, mask=inside{j})")
        for k, state in enumerate(self.method.states):
            if state in written:
                self(f"tl.store(S + {k} * gap + place{j}, s{j}_{state}, mask=inside{j})")
