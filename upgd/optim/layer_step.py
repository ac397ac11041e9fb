"""One step of a layered method: its phases on tensors, one after the other. The reference.

It knows no method. A parameter outside of linear layers is a layer of its own that has biases and
no inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from upgd.optim.batch import compute_dtype
from upgd.optim.layers import WatchedLayer
from upgd.rules.vocabulary import Method, Phase, Place, as_numbers, rounded_period

if TYPE_CHECKING:
    from upgd.optim.layered import LayerOptimizer


class Layer:
    """What a step knows of one layer: its samples, what phases made of them, its constants.

    Attributes:
        owner: The parameter with which states of the layer are kept.
        active: Its parameters that have a gradient; the others are left alone.
        x, d: Samples, see :meth:`WatchedLayer.samples`; None outside of linear layers.
        live: Layer states of this step for each sample.
    """

    def __init__(
        self, owner: Tensor, active: Iterable[Tensor], watched: WatchedLayer | None = None
    ) -> None:
        self.owner, self.active, self.watched = owner, list(active), watched
        self.weight = self._if_active(watched.weight) if watched else None
        self.bias = self._if_active(watched.bias) if watched else owner
        role = watched.role if watched else "hidden"
        self.constants = {"head": float(role == "head"), "first": float(role == "input")}
        self.constants["bound"] = watched.bound if watched else 1.0
        self.constants["outside"] = float(watched is None)
        self.x: Tensor | None = None
        self.d: Tensor | None = None
        self.live: dict[str, Tensor] = {}

    def _if_active(self, p: Tensor | None) -> Tensor | None:
        return p if any(p is q for q in self.active) else None

    @property
    def before(self) -> WatchedLayer | None:
        """The layer whose units are this one's inputs, the features."""
        return self.watched.before if self.watched else None


def place_shape(owner: Tensor, watched: WatchedLayer | None, place: str) -> tuple[int, ...]:
    """The shape of a state at a place of a layer, or of the network."""
    if place in ("layers", "network"):
        return ()
    if watched is None:
        return (owner.numel() if place == "units" else 0,)
    return (watched.weight.shape[0 if place == "units" else 1],)


class LayerStep:
    """Runs the phases of an optimizer's method on some layers, then renews units."""

    def __init__(self, opt: LayerOptimizer, layers: list[Layer]) -> None:
        self.opt, self.method, self.layers = opt, self._method(opt), layers
        self.groups = {p: group for group in opt.param_groups for p in group["params"]}
        clocks = {id(state["step"]): state["step"] for state in opt.state.values()}
        counts = {key: float(clock) for key, clock in clocks.items()}
        self.counts = {p: counts[id(state["step"])] for p, state in opt.state.items()}
        samples = {0 if layer.x is None else len(layer.x) for layer in layers}
        self.alike = len(samples) == 1 and 0 not in samples  # sums of layers have the same samples
        self.by_sample, self.samples = self.alike, 1

    def _method(self, opt: LayerOptimizer) -> Method:
        return opt.method

    def run(self) -> None:
        """All phases, then recycling."""
        if self.method.recycle is not None:
            for layer in self.layers:
                if layer.before is not None:
                    self._kept(layer, "features")["age"].add_(1)
        self._run_phases()
        if self.method.recycle is not None:
            for layer in self.layers:
                if self._renewable(layer):
                    self._renew(layer, self._chosen(layer))

    def _run_phases(self) -> None:
        self.network = self._network_states()
        for phase in self.method.phases:
            if phase.over == "network":
                self._run_network(phase)
            else:
                for layer in self.layers:
                    self._run(phase, layer)
            if phase.over == "layers":
                for name in phase.sums:
                    self._keep_network(name, sum(layer.live.pop(name) for layer in self.layers))

    # -------------------------------------------------------------------------- states
    def _state(self, owner: Tensor, place: Place) -> dict[str, Tensor]:
        """States of a place, which are made when they are first asked for."""
        state, found = self.opt.state[owner], {}
        for name in self.method.states_of(place):
            key = f"{place}.{name}"
            if key not in state:
                state[key] = self.opt._fresh(owner, key)
            found[name] = state[key]
        return found

    def _kept(self, layer: Layer, place: Place) -> dict[str, Tensor]:
        return self._state(layer.owner, place)

    def _network_states(self) -> dict[str, Tensor]:
        return self._state(self.opt.param_groups[0]["params"][0], "network")

    def _numbers(self, p: Tensor, t: float) -> dict[str, Any]:
        """The hyperparameters of a parameter's group, and the step's number."""
        group = self.groups[p]
        values = {name: group[name] for name in self.method.hyper}
        return {**as_numbers({**values, "lr": float(group["lr"])}), "t": t}

    def _of_layer(self, layer: Layer) -> dict[str, Any]:
        return self._numbers(layer.owner, max(self.counts[p] for p in layer.active))

    # -------------------------------------------------------------------------- phases
    def _run(self, phase: Phase, layer: Layer) -> None:
        """Run a phase over its elements in one layer."""
        if phase.over in ("weights", "biases"):
            self._run_weights(phase, layer)
            return
        if phase.over == "features" and layer.before is None:
            return
        env = {**self._of_layer(layer), **layer.constants}
        column = phase.over != "layers"
        for name, value in {**self._kept(layer, "layers"), **layer.live, **self.network}.items():
            env[name] = value.unsqueeze(-1) if column and value.dim() else value
        if column:
            env |= self._kept(layer, phase.over)
        x, d = layer.x, layer.d
        if x is None:
            x, d = layer.owner.new_zeros(1, 0), self._gradient(layer.owner).reshape(1, -1)
        env |= {"x": x, "d": d}
        if phase.over == "features":
            env |= _magnitudes(layer)
        results = _results(phase, env)
        for name, value in zip(phase.writes, results, strict=False):
            self._write(layer, phase.over, name, value)
        for name, value in zip(phase.sums, results[len(phase.writes) :], strict=True):
            if column:
                shape = place_shape(layer.owner, layer.watched, phase.over)
                self._write(layer, "layers", name, value.expand(len(x), *shape).sum(-1))
            else:
                layer.live[name] = self._summand(value)

    def _summand(self, value: Tensor) -> Tensor:
        """What a layer adds to a sum over the network."""
        return value if self.alike else value.mean()

    def _write(self, layer: Layer, place: Place, name: str, value: Tensor) -> None:
        """Keep a state: the samples' mean; those of layers for each sample until the step ends."""
        kept = self._kept(layer, place)[name]
        if value.dim() > kept.dim():
            if place == "layers" and self.by_sample:
                layer.live[name] = value
            value = value.mean(0)
        elif place == "layers":
            layer.live.pop(name, None)
        kept.copy_(value)

    def _keep_network(self, name: str, value: Any) -> None:
        """A value of the network: of each sample for the rest of this step, their mean after it."""
        self._network_states()[name].copy_(value.mean())
        self.network[name] = value

    def _run_network(self, phase: Phase) -> None:
        t = max(self.counts[p] for layer in self.layers for p in layer.active)
        env = {**self._numbers(self.opt.param_groups[0]["params"][0], t), **self.network}
        env["samples"] = self.samples
        for name, value in zip(phase.writes, _results(phase, env), strict=True):
            self._keep_network(name, value)

    def _run_weights(self, phase: Phase, layer: Layer) -> None:
        shared = {**layer.constants, **self._network_states(), **self._kept(layer, "layers")}
        units, sums = self._kept(layer, "units"), list[Tensor]()
        d = self._gradient(layer.bias) if layer.bias is not None else None
        if d is None:
            assert layer.d is not None
            d = layer.d.mean(0)
        if phase.over == "weights" and layer.weight is not None:
            assert layer.x is not None
            env = {name: value.unsqueeze(1) for name, value in units.items()}
            env |= {**self._kept(layer, "inputs"), "x": layer.x.mean(0), "d": d.unsqueeze(1)}
            sums = self._run_tensor(phase, layer.weight, {**shared, **env})
        has_own = any(other.over == "biases" for other in self.method.phases)
        if layer.bias is not None and (phase.over == "biases" or not has_own):
            env = {name: value.view_as(layer.bias) for name, value in units.items()}
            one = torch.ones((), dtype=d.dtype, device=d.device)
            more = self._run_tensor(phase, layer.bias, {**shared, **env, "x": one, "d": d})
            sums = [a + b for a, b in zip(sums, more, strict=True)] if sums else more
        for name, value in zip(phase.sums, sums, strict=False):
            self._write(layer, "layers", name, value)

    def _run_tensor(self, phase: Phase, p: Tensor, env: dict[str, Any]) -> list[Tensor]:
        """Run a phase over a weight or bias tensor; returns its sums."""
        w, state = p.detach().to(compute_dtype(p.dtype)), self.opt.state[p]
        numbers = self._numbers(p, self.counts[p])
        for name, decay in self.method.decays.items():
            env[f"c_{name}"] = 1 - numbers[decay] ** numbers["t"]
        env = {**numbers, **env, "w": w, "g": self._gradient(p)}
        env |= {name: state[name] for name in self.method.states}
        if "noise" in phase.reads:
            env["noise"] = self._normal(p)
        results = _results(phase, env)
        for name, value in zip(phase.writes, results, strict=False):
            (p if name == "w" else state[name]).copy_(value)
        return [value.expand(w.shape).sum() for value in results[len(phase.writes) :]]

    def _gradient(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        grad = p.grad.to(compute_dtype(p.dtype))
        return -grad if self.groups[p]["maximize"] else grad

    def _normal(self, p: Tensor) -> Tensor:
        """The standard normal numbers of this step for a parameter."""
        offset = 0
        for q in self.groups:
            if q is p:
                break
            offset += q.numel()
        group = self.opt.param_groups[0]
        return self.opt.noise.draw(
            [p.numel()], [offset], seed=group["seed"], step=group["noise_step"], device=p.device,
            dtype=compute_dtype(p.dtype),
        ).view(p.shape)  # fmt: skip

    # ----------------------------------------------------------------------- recycling
    def _renewable(self, layer: Layer) -> bool:
        """Whether the weights into and out of a layer's features are updated."""
        before = layer.before
        into = before is not None and any(before.weight is p for o in self.layers for p in o.active)
        return into and layer.weight is not None

    def _chosen(self, layer: Layer) -> Tensor:
        """The numbers of the hidden units before this layer that are re-initialised now."""
        rule, numbers = self.method.recycle, self._of_layer(layer)
        assert rule is not None
        kept = self._kept(layer, "features")
        score, age = kept[rule.score], kept["age"]
        if rule.every is not None and numbers["t"] % rounded_period(numbers[rule.every]):
            return torch.empty(0, dtype=torch.long, device=score.device)
        mature = age > (numbers[rule.mature] if rule.mature is not None else -1)
        if rule.threshold is not None:
            low = score <= numbers[rule.threshold] * score.mean()
            found: Tensor = (low & mature).nonzero().squeeze(1)
            return found
        assert rule.share is not None
        owed = self._kept(layer, "layers")["owed"]
        eligible = int(mature.sum())
        owed += numbers[rule.share] * eligible  # not the tensor's count: a product in float32
        count = int(owed)
        owed -= count
        order = score.masked_fill(~mature, torch.inf).argsort(stable=True)
        chosen: Tensor = order[: min(count, eligible)]
        return chosen

    def _renew(self, layer: Layer, units: Tensor) -> None:
        """Give units before a layer new weights into them, and none out of them."""
        if not len(units):
            return
        rule, before, weight = self.method.recycle, layer.before, layer.weight
        assert rule is not None
        assert before is not None
        assert weight is not None
        kept = self._kept(layer, "features")
        if rule.average is not None and layer.bias is not None:
            average = kept[rule.average]
            layer.bias += weight[:, units].to(average.dtype) @ average[units]
        weight[:, units] = 0
        fresh = self._normal(before.weight)[units] * (before.bound * 3**-0.5)
        before.weight[units] = fresh.to(before.weight.dtype)
        places: list[tuple[Tensor, Any]] = [(weight, (slice(None), units)), (before.weight, units)]
        if before.bias is not None and any(before.bias is p for o in self.layers for p in o.active):
            before.bias[units] = 0
            places.append((before.bias, units))
        for p, where in places:
            for name in self.method.states:
                begins = p[where].to(self.opt.state[p][name].dtype)
                as_weight = name in self.method.starts_as_weight
                self.opt.state[p][name][where] = begins if as_weight else 0.0
        for name, value in kept.items():
            value[units] = self.method.starts.get(name, 0.0)


def _magnitudes(layer: Layer) -> dict[str, Tensor]:
    """The mean magnitude of the weights into and out of each hidden unit."""
    assert layer.before is not None
    assert layer.watched is not None
    into, out = layer.before.weight.detach(), layer.watched.weight.detach()
    dtype = compute_dtype(out.dtype)
    sums = {"w_in": into.abs().to(dtype).sum(1), "w_out": out.abs().to(dtype).sum(0)}
    return {"w_in": sums["w_in"] / max(1, into.shape[1]), "w_out": sums["w_out"] / max(1, len(out))}


def _results(phase: Phase, env: Mapping[str, Any]) -> tuple[Any, ...]:
    found = phase.fn(*[env[name] for name in phase.reads])
    return found if isinstance(found, tuple) else (found,)
