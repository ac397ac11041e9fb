"""The units that a layered method renews, as lines of a Triton kernel."""

from __future__ import annotations

from upgd.kernels.layout import Layer, padded
from upgd.kernels.triton_phases import PhaseWriter
from upgd.kernels.triton_program import block


class RecycleWriter(PhaseWriter):
    """Writes what follows a step's phases."""

    def recycle(self) -> None:
        """Renew hidden units; see :class:`upgd.optim.layered.LayerOptimizer`."""
        for layer in self.layers[:-1]:
            self.choose(layer)
            with self.inside("for _ in range(count):"):
                self.renew(layer)
            if layer.number == 0:
                self("renewed = count")
        if len(self.layers) > 1:
            with self.inside("if renewed > 0:"):  # the same sums as at the beginning of a chunk
                self.first_products("x_next", "x_now")
            self.barrier()

    def choose(self, layer: Layer) -> None:
        """Which units of a layer go: those of lowest `score` that are `left`, `count` of them."""
        rule, units = self.method.recycle, layer.outputs
        assert rule is not None
        after = self.layers[layer.number + 1]
        places = self.places("features", layer)
        self(f"i = tl.arange(0, {block(units)})", f"inside = i < {units}")
        self(f"score = tl.load({places[rule.score]}, mask=inside, other=0.0)")
        names = {rule.share, rule.threshold, rule.mature, rule.every} - {None}
        self.numbers([name for name in names if name], after)
        self("left = inside")
        if rule.mature is not None:
            self(f"age = tl.load({places['age']}, mask=inside, other=0.0)")
            self(f"left = left & (age.to(tl.float64) > n_{rule.mature})")
        self("due = step == step")
        if rule.every is not None:
            self(f"period = tl.maximum(tl.floor(n_{rule.every} + 0.5), 1.0).to(tl.int64)")
            self("due = (step - born + 1) % period == 0")
        if rule.threshold is not None:
            mean = f"(tl.sum(score, 0) / {units})"
            self(f"left = left & (score <= n_{rule.threshold}.to(real) * {mean})")
            self("count = tl.where(due, tl.sum(left.to(tl.int32), 0), 0)")
            return
        owed = f"layer{after.number}_owed"
        self("ready = tl.sum(left.to(tl.int32), 0)")
        self(f"{owed} += tl.where(due, (n_{rule.share} * ready).to(real), 0.0)")
        self(f"count = tl.where(due, {owed}.to(tl.int32), 0)")
        self(f"{owed} -= count.to(real)", "count = tl.minimum(count, ready)")

    def renew(self, layer: Layer) -> None:
        """Renew the next unit of a layer."""
        rule, method = self.method.recycle, self.method
        assert rule is not None
        after = self.layers[layer.number + 1]
        places = self.places("features", layer, "chosen")
        copies = sum(1 << k for k, s in enumerate(method.states) if s in method.starts_as_weight)
        scale = max(1, layer.inputs) ** -0.5 * 3**-0.5
        self(f"chosen = lowest(score, left, {block(layer.outputs)})")
        with self.inside(f"if chosen < {layer.outputs}:"):
            mean = f"tl.load({places[rule.average]})" if rule.average else "tl.zeros([], real)"
            self(f"mean = {mean}")
            self.barrier()
            self(
                f"renew(W + {layer.base}, S + {layer.base}, gap, W + {after.base}, "
                f"S + {after.base}, chosen, mean, seed, step, tl.full([], {scale!r}, tl.float64), "
                f"{layer.number}, {self.sizes(layer)}, {after.outputs}, {after.stride}, "
                f"{block(padded(layer.inputs + 1))}, {block(after.outputs)}, "
                f"{len(method.states)}, {copies})"
            )
            for name, place in places.items():
                self(f"tl.store({place}, tl.full([], {method.starts.get(name, 0.0)!r}, real))")
            self("left = left & (i != chosen)")
            self.barrier()
