"""The optimizer that every layered rule shares: the plain version, which is the reference.

:class:`LayerOptimizer` knows no method. It runs the phases of a layered
:class:`~upgd.rules.vocabulary.Method` on tensors, one phase after the other, over the linear layers
of a model (:class:`~upgd.optim.layers.Layers`). A parameter outside of linear layers is a layer of
its own that has biases and no inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from upgd.optim import checks
from upgd.optim.layers import Layers, WatchedLayer
from upgd.optim.noise import GeneratorNoise, NoiseSource
from upgd.rules.vocabulary import Method, Phase, Place, as_numbers

_AT_LAYER: tuple[Place, ...] = ("inputs", "units", "features", "layers")


class _Layer:
    """What a step knows of one layer: its samples, what phases made of them, its constants."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, watched: WatchedLayer | None):
        self.weight, self.bias, self.watched = weight, bias, watched
        self.owner: Tensor = cast(Tensor, weight if weight is not None else bias)
        role = watched.role if watched else "hidden"
        self.constants = {"head": float(role == "head"), "first": float(role == "input")}
        self.constants["bound"] = watched.bound if watched else 1.0
        self.x: Tensor | None = None
        self.d: Tensor | None = None
        self.live: dict[str, Tensor] = {}  # of this step, for each sample

    @property
    def before(self) -> WatchedLayer | None:
        return self.watched.before if self.watched else None


class LayerOptimizer(Optimizer):
    """Base class: runs a layered :class:`~upgd.rules.vocabulary.Method` as a PyTorch optimizer.

    Args:
        params: A model, or parameters or groups of them, with `layers`.
        method: The rule to run.
        hyper: Values of the method's hyperparameters; groups may override them.
        layers: The layers of the model whose parameters these are.
        seed: Determines noise and fresh weights, together with the step.
        noise: Where they come from.
        maximize: Ascend instead of descend.
        nonfinite: ``"raise"`` raises FloatingPointError before anything changes where a gradient is
            not finite; ``"skip"`` leaves out the step and counts it in `skipped_steps`.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        method: Method,
        hyper: Mapping[str, Any],
        *,
        layers: Layers | None = None,
        seed: int | None = None,
        noise: NoiseSource | None = None,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        owner = type(self).__name__
        if isinstance(params, nn.Module):
            layers = layers or Layers(params)
            params = params.parameters()
        if layers is None:
            raise ValueError(
                f"{owner}: give the model itself, or parameters and layers=Layers(model)"
            )
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"{owner}: nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        self.method, self.layers, self.nonfinite = method, layers, nonfinite
        self.noise: NoiseSource = noise if noise is not None else GeneratorNoise()
        self.skipped_steps = 0
        defaults = {**hyper, **checks.plain(hyper, method.hyperparameters), "maximize": maximize}
        defaults |= {"seed": checks.checked_seed(owner, seed), "steps": 0}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(checks.plain(group, self.method.hyperparameters))
        for hyperparameter in self.method.hyperparameters.values():
            hyperparameter.check(type(self).__name__, group[hyperparameter.name])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and what was recorded of layers' inputs."""
        super().zero_grad(set_to_none)
        self.layers.reset()

    # --------------------------------------------------------------------------- step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one update; with `closure`, evaluate it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._groups = {p: group for group in self.param_groups for p in group["params"]}
        layers = self._gather()
        if layers and self._check_finite(layers):
            self._advance(layers)
        self.layers.reset()
        return loss

    def _gather(self) -> list[_Layer]:
        """The layers that have gradients, in the model's order; then all other parameters."""
        found, seen = [], set()
        for watched in self.layers.all:
            mine = [p if p in self._groups else None for p in (watched.weight, watched.bias)]
            with_gradient = [p for p in mine if p is not None and p.grad is not None]
            if not with_gradient:
                continue
            samples = watched.samples()
            if samples is None:
                raise RuntimeError(
                    f"{type(self).__name__}: layer {watched.name!r} has a gradient, but its input "
                    "was not seen; call the model itself, so that its hooks are called"
                )
            layer = _Layer(mine[0], mine[1], watched)
            layer.x, layer.d = samples
            found.append(layer)
            seen.update(with_gradient)
        others = [p for p in self._groups if p.grad is not None and p not in seen]
        found += [_Layer(None, p, None) for p in others]
        counts = {len(layer.x) for layer in found if layer.x is not None}
        self._alike = len(counts) == 1 and not others
        return found

    def _check_finite(self, layers: list[_Layer]) -> bool:
        both = (p for layer in layers for p in (layer.weight, layer.bias))
        grads = [p.grad for p in both if p is not None and p.grad is not None]
        if all(bool(grad.isfinite().all()) for grad in grads):
            return True
        if self.nonfinite == "raise":
            raise FloatingPointError(f"{type(self).__name__}: a gradient is not finite")
        self.skipped_steps += 1
        return False

    def _advance(self, layers: list[_Layer]) -> None:
        for group in self.param_groups:
            group["steps"] += 1
        if self.method.recycle is not None:
            for layer in layers:
                if layer.before is not None:
                    self._kept(layer, "features")["age"].add_(1)
        self._network = dict(self._network_states(layers))
        for phase in self.method.phases:
            if phase.over == "network":
                self._run_network(phase, layers)
            else:
                for layer in layers:
                    self._run(phase, layer)
            if phase.over == "layers":
                self._sum_layers(phase, layers)
        if self.method.recycle is not None:
            self._recycle([layer for layer in layers if layer.before is not None])

    # -------------------------------------------------------------------------- states
    def _kept(self, layer: _Layer, place: Place) -> dict[str, Tensor]:
        """The states of a place of this layer, which are made when they are first asked for."""
        weight, state = layer.owner, self.state[layer.owner]
        size: tuple[int, ...] = ()
        if place in ("inputs", "features"):
            size = weight.shape[1:2] if layer.weight is not None else (0,)
        elif place == "units":
            size = weight.shape[:1] if layer.weight is not None else (weight.numel(),)
        for name in self.method.states_of(place):
            if f"{place}.{name}" not in state:
                start = self.method.starts.get(name, 0.0)
                state[f"{place}.{name}"] = torch.full(
                    size, start, dtype=_real(weight), device=weight.device
                )
        return {name: state[f"{place}.{name}"] for name in self.method.states_of(place)}

    def _network_states(self, layers: list[_Layer]) -> dict[str, Tensor]:
        first = self.param_groups[0]["params"][0]
        state = self.state[first]
        for name in self.method.states_of("network"):
            if f"network.{name}" not in state:
                start = self.method.starts.get(name, 0.0)
                state[f"network.{name}"] = torch.tensor(
                    start, dtype=_real(first), device=first.device
                )
        return {name: state[f"network.{name}"] for name in self.method.states_of("network")}

    def _numbers(self, p: Tensor) -> dict[str, Any]:
        group = self._groups[p]
        return {**as_numbers({n: group[n] for n in self.method.hyper}), "t": float(group["steps"])}

    # -------------------------------------------------------------------------- phases
    def _run(self, phase: Phase, layer: _Layer) -> None:
        """Run a phase over its elements in one layer."""
        if phase.over in ("weights", "biases"):
            self._run_weights(phase, layer)
            return
        if phase.over == "features" and layer.before is None:
            return
        env = {**self._numbers(layer.owner), **layer.constants, **self._network}
        column = phase.over != "layers"
        for name, state in self._kept(layer, "layers").items():
            value = layer.live.get(name, state)
            env[name] = value.unsqueeze(-1) if column and value.dim() else value
        if column:
            env |= self._kept(layer, phase.over)
        if layer.watched is not None:
            env |= {"x": layer.x, "d": layer.d}
            if phase.over == "features":
                env |= self._sizes(layer)
        else:
            env |= {
                "x": layer.owner.new_zeros(1, 0),
                "d": _gradient(self, layer.owner).reshape(1, -1),
            }
        results = _results(phase, env)
        for name, value in zip(phase.writes, results, strict=False):
            self._write(layer, phase.over, name, value)
        for name, value in zip(phase.sums, results[len(phase.writes) :], strict=True):
            if column:
                value = value.expand(len(env["x"]), *self._shape(layer, phase.over)).sum(-1)
                self._write(layer, "layers", name, value)
            else:
                layer.live[name] = value if self._alike else value.mean()

    def _shape(self, layer: _Layer, place: Place) -> tuple[int]:
        if layer.weight is None:
            return (0,) if place == "inputs" else (layer.owner.numel(),)
        return (layer.weight.shape[0 if place == "units" else 1],)

    def _write(self, layer: _Layer, place: Place, name: str, value: Tensor) -> None:
        """Keep a state: the samples' mean; those of layers for each sample until the step ends."""
        kept = self._kept(layer, place)[name]
        if value.dim() > kept.dim():
            if place == "layers" and self._alike:
                layer.live[name] = value
            value = value.mean(0)
        elif place == "layers":
            layer.live.pop(name, None)
        kept.copy_(value)

    def _sum_layers(self, phase: Phase, layers: list[_Layer]) -> None:
        for name in phase.sums:
            self._keep_network(layers, name, sum(layer.live.pop(name) for layer in layers))

    def _keep_network(self, layers: list[_Layer], name: str, value: Any) -> None:
        """A value of the network: of each sample for the rest of this step, their mean after it."""
        self._network_states(layers)[name].copy_(value.mean())
        self._network[name] = value

    def _run_network(self, phase: Phase, layers: list[_Layer]) -> None:
        env = {**self._numbers(self.param_groups[0]["params"][0]), **self._network}
        for name, value in zip(phase.writes, _results(phase, env), strict=True):
            self._keep_network(layers, name, value)

    def _run_weights(self, phase: Phase, layer: _Layer) -> None:
        states = self._network_states([layer])
        shared = {**layer.constants, **states, **self._kept(layer, "layers")}
        has_own = any(other.over == "biases" for other in self.method.phases)
        sums: list[Tensor] = []
        d = _gradient(self, layer.bias) if layer.bias is not None else None
        if layer.weight is not None and d is None:
            assert layer.d is not None
            d = layer.d.mean(0)
        if phase.over == "weights" and layer.weight is not None:
            assert layer.x is not None
            assert d is not None
            env = {name: value.unsqueeze(1) for name, value in self._kept(layer, "units").items()}
            env |= {**self._kept(layer, "inputs"), "x": layer.x.mean(0), "d": d.unsqueeze(1)}
            sums = self._run_tensor(phase, layer.weight, {**shared, **env})
        if (phase.over == "biases" or not has_own) and layer.bias is not None:
            env = dict(self._kept(layer, "units")) if layer.watched else {}
            one = torch.ones((), dtype=_real(layer.bias), device=layer.bias.device)
            more = self._run_tensor(phase, layer.bias, {**shared, **env, "x": one, "d": d})
            sums = [a + b for a, b in zip(sums, more, strict=True)] if sums else more
        for name, value in zip(phase.sums, sums, strict=False):
            self._write(layer, "layers", name, value)

    def _run_tensor(self, phase: Phase, p: Tensor, env: dict[str, Any]) -> list[Tensor]:
        """Run a phase over a weight or bias tensor; returns its sums."""
        w, g, state = p.detach().to(_real(p)), _gradient(self, p), self.state[p]
        for name in self.method.states:
            if name not in state:
                begins = w if name in self.method.starts_as_weight else torch.zeros_like(w)
                state[name] = begins.clone()
        numbers = self._numbers(p)
        for name, decay in self.method.decays.items():
            env[f"c_{name}"] = 1 - numbers[decay] ** numbers["t"]
        env = {**numbers, **env, "w": w, "g": g}
        env |= {name: state[name] for name in self.method.states}
        if "noise" in phase.reads:
            env["noise"] = self._normal(p)
        results = _results(phase, env)
        for name, value in zip(phase.writes, results, strict=False):
            (p if name == "w" else state[name]).copy_(value)
        return [value.expand(w.shape).sum() for value in results[len(phase.writes) :]]

    def _normal(self, p: Tensor) -> Tensor:
        """The standard normal numbers of this step for a parameter."""
        offset = 0
        for q in self._groups:
            if q is p:
                break
            offset += q.numel()
        group = self._groups[p]
        return self.noise.draw(
            [p.numel()], [offset], seed=group["seed"], step=group["steps"] - 1, device=p.device,
            dtype=_real(p),
        ).view_as(p)  # fmt: skip

    # ----------------------------------------------------------------------- recycling
    def _sizes(self, layer: _Layer) -> dict[str, Tensor]:
        """The mean magnitude of the weights into and out of each hidden unit."""
        assert layer.before is not None
        assert layer.weight is not None
        dtype = _real(layer.weight)
        into, out = layer.before.weight.detach(), layer.weight.detach()
        return {"w_in": into.abs().to(dtype).mean(1), "w_out": out.abs().to(dtype).mean(0)}

    def _recycle(self, layers: list[_Layer]) -> None:
        for layer in layers:
            chosen = self._chosen(layer)
            if len(chosen):
                self._renew(layer, chosen)

    def _chosen(self, layer: _Layer) -> Tensor:
        """The numbers of the hidden units before this layer that are re-initialised now."""
        rule, numbers = self.method.recycle, self._numbers(layer.owner)
        assert rule is not None
        kept = self._kept(layer, "features")
        score, age = kept[rule.score], kept["age"]
        if rule.every is not None and numbers["t"] % max(1, round(numbers[rule.every])):
            return torch.empty(0, dtype=torch.long)
        mature = age > (numbers[rule.mature] if rule.mature is not None else -1)
        if rule.threshold is not None:
            low = score <= numbers[rule.threshold] * score.mean()
            found: Tensor = (low & mature).nonzero().squeeze(1)
            return found
        assert rule.share is not None
        owed = self._kept(layer, "layers")["owed"]
        owed += numbers[rule.share] * int(mature.sum())
        count = int(owed)
        owed -= count
        order = score.masked_fill(~mature, torch.inf).argsort(stable=True)
        chosen: Tensor = order[: min(count, int(mature.sum()))]
        return chosen

    def _renew(self, layer: _Layer, units: Tensor) -> None:
        rule, before = self.method.recycle, layer.before
        assert rule is not None
        assert before is not None
        assert layer.weight is not None
        kept = self._kept(layer, "features")
        if rule.average is not None and layer.bias is not None:
            carried = (
                layer.weight[:, units].to(kept[rule.average].dtype) @ kept[rule.average][units]
            )
            layer.bias += carried
        layer.weight[:, units] = 0
        fresh = self._normal(before.weight)[units] * (before.bound * 3**-0.5)
        before.weight[units] = fresh.to(before.weight.dtype)
        places: list[tuple[Tensor | None, Any]] = [(layer.weight, (slice(None), units))]
        places += [(before.weight, units), (before.bias, units)]
        if before.bias is not None:
            before.bias[units] = 0
        for p, where in places:
            for name in self.method.states if p is not None and p in self.state else ():
                assert p is not None
                begins = p[where].to(_real(p)) if name in self.method.starts_as_weight else 0.0
                if name in self.state[p]:
                    self.state[p][name][where] = begins
        for name, value in kept.items():
            value[units] = self.method.starts.get(name, 0.0)


def _results(phase: Phase, env: Mapping[str, Any]) -> tuple[Any, ...]:
    found = phase.fn(*[env[name] for name in phase.reads])
    return found if isinstance(found, tuple) else (found,)


def _real(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _gradient(opt: LayerOptimizer, p: Tensor) -> Tensor:
    assert p.grad is not None
    grad = p.grad.to(_real(p))
    return -grad if opt._groups[p]["maximize"] else grad
