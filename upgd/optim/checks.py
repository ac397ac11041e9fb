"""What optimizers refuse, each in a line that says whose argument or parameter it is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from upgd.optim.batch import DTYPES
from upgd.optim.shards import local
from upgd.rules.vocabulary import HYPERPARAMETERS, Hyperparameter

CLOCK = ("step", "attempts")
"""What counts a parameter's steps: those that were not skipped, and all."""
MASTER = "master"
"""The state that holds the float32 copy of a 16-bit parameter."""
_REAL = "parameters must be real floating-point tensors of 16, 32 or 64 bits"


def arguments_of(cls: type, base: type) -> tuple[str, ...]:
    """The names of all that a constructor takes, besides parameters, up to `base`'s."""
    makers = [vars(each)["__init__"] for each in cls.__mro__ if _makes(each, base)]
    found = [p for maker in makers for p in inspect.signature(maker).parameters.values()]
    named = dict.fromkeys(p.name for p in found if p.kind is not p.VAR_KEYWORD)
    return tuple(n for n in named if n not in ("self", "params", "method", "hyper", "options"))


def _makes(cls: type, base: type) -> bool:
    return issubclass(cls, base) and "__init__" in vars(cls)


def check_arguments(
    owner: str, known: Sequence[str], given: Mapping[str, Any], unknown: Iterable[str]
) -> None:
    """Raise if an argument of a constructor is unknown or invalid."""
    for name in unknown:
        raise TypeError(f"{owner}: unknown argument {name!r}; there are {', '.join(known)}")
    noise, nonfinite, fused = given["noise"], given["nonfinite"], given["fused"]
    if noise is not None and not callable(getattr(noise, "draw", None)):
        needed = "noise must have a method draw (upgd.optim.noise.NoiseSource)"
        raise TypeError(f"{owner}: {needed}, got {noise!r}")
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"{owner}: nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
    if not isinstance(fused, bool):
        raise TypeError(f"{owner}: fused must be True or False, got {fused!r}")
    group = given["process_group"]
    if group is not None and group is not False and not hasattr(group, "rank"):
        raise TypeError(
            f"{owner}: process_group must be a torch.distributed process group, None for the "
            f"default one, or False, got {group!r}"
        )


def check_precision(owner: str, rounding: Any, trace_dtype: Any, master_weights: Any) -> None:
    """Raise if it is not clear how 16-bit weights and traces are to be kept."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"{owner}: rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if trace_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"{owner}: trace_dtype must be None, torch.float32 or torch.bfloat16 (traces are too "
            f"small for float16), got {trace_dtype!r}"
        )
    if not isinstance(master_weights, bool):
        raise TypeError(f"{owner}: master_weights must be True or False, got {master_weights!r}")
    if master_weights and rounding == "stochastic":
        raise ValueError(
            f"{owner}: master_weights=True keeps exact weights, of which the parameters are the "
            "nearest; leave out rounding='stochastic', or the master weights"
        )


def plain(values: Mapping[str, Any], hyper: Mapping[str, Hyperparameter]) -> dict[str, Any]:
    """Those of `values` that are hyperparameters, as groups keep them."""
    return {name: each.plain(values[name]) for name, each in hyper.items() if name in values}


def check_group(
    owner: str,
    group: dict[str, Any],
    place: int,
    hyper: Iterable[Hyperparameter],
    nonfinite: str | None,
) -> None:
    """Raise if a group's options or parameters are invalid."""
    checked_seed(owner, group["seed"])
    draws = group["noise_step"]
    if isinstance(draws, bool) or not isinstance(draws, int) or not 0 <= draws < 2**63:
        raise ValueError(f"{owner}: noise_step must be an int in [0, 2**63), got {draws!r}")
    for each in hyper:
        each.check(owner, group[each.name])
    for name in ("maximize", "foreach", "capturable"):
        if not isinstance(group[name], bool) and not (name == "foreach" and group[name] is None):
            raise TypeError(f"{owner}: {name} must be True or False, got {group[name]!r}")
    if group["capturable"] and nonfinite == "raise":
        raise ValueError(
            f"{owner}: nonfinite='raise' reads a flag from the device, which a CUDA graph "
            "cannot do; use nonfinite='skip' with capturable=True"
        )
    for index, p in enumerate(group["params"]):
        if p.requires_grad and p.dtype not in DTYPES:  # a quantised model's others are frozen
            raise TypeError(f"{owner}: {parameter_name(group, index, place)} is {p.dtype}; {_REAL}")


def warn_ignored(owner: str, group: Mapping[str, Any], known: Iterable[str]) -> bool:
    """Warn of a group's hyperparameters that the optimizer lacks; 0 says nothing.

    Returns:
        Whether there were any.
    """
    foreign = sorted((group.keys() & HYPERPARAMETERS.keys()) - set(known))
    ignored = [f"{name}={group[name]!r}" for name in foreign if not _is_zero(group[name])]
    if ignored:
        warnings.warn(
            f"{owner} has no {', '.join(name.partition('=')[0] for name in ignored)}: "
            f"{', '.join(ignored)} of a parameter group is ignored",
            stacklevel=4,
        )
    return bool(ignored)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def refuse_own(owner: str, group: Any, shared: Mapping[str, Any]) -> None:
    """Raise if a group sets an option that all groups share."""
    for name, value in group.items() if isinstance(group, dict) else ():
        if name in shared and value != shared[name]:
            raise ValueError(
                f"{owner}: {name} is one for all groups, {shared[name]!r} here; "
                f"a group has {value!r}"
            )


def check_gradient(owner: str, group: dict[str, Any], index: int, place: int) -> None:
    """Raise unless a parameter and its gradient are dense, alike and have memory."""
    p = group["params"][index]
    grad = p.grad
    problem = None
    if grad.layout is not torch.strided:
        raise TypeError(
            f"{owner}: the gradient of {parameter_name(group, index, place)} is sparse "
            f"({grad.layout}); only dense gradients are supported"
        )
    if p.is_meta:
        problem = (
            "is on the meta device and has no values; materialise the model "
            "(model.to_empty(device=...)), then make the optimizer"
        )
    elif p.dtype not in DTYPES:
        problem = f"has a gradient and is {p.dtype}; {_REAL}"
    elif grad.shape != p.shape or grad.device != p.device:
        problem = (
            f"has a gradient of shape {tuple(grad.shape)} on {grad.device} and is itself on "
            f"{p.device}; clear it with zero_grad() and run backward() again"
        )
    elif _overlaps(local(p)):
        problem = "is expanded, several weights share memory; give it memory with clone()"
    elif _too_short(p) or _too_short(grad):
        what = "it" if _too_short(p) else "its gradient"
        problem = f"has too little memory: the storage of {what} was resized; restore it first"
    if problem is not None:
        raise ValueError(f"{owner}: {parameter_name(group, index, place)} {problem}")


def check_state(
    owner: str,
    group: dict[str, Any],
    index: int,
    place: int,
    state: Mapping[str, Any],
    shapes: Mapping[str, torch.Size | None],
) -> None:
    """Raise unless a parameter's state holds tensors of these shapes (None: any), with memory."""
    device = group["params"][index].device
    for name, shape in shapes.items():
        t = state.get(name)
        if not isinstance(t, torch.Tensor):
            problem = "missing" if t is None else f"of type {type(t).__name__}, not a tensor"
        elif shape is not None and t.shape != shape:
            problem = f"of shape {tuple(t.shape)} where {tuple(shape)} is kept"
        elif t.device != device:
            problem = (
                f"on {t.device}, the parameter on {device}; "
                "opt.load_state_dict(opt.state_dict()) moves states"
            )
        elif _too_short(t) or _overlaps(local(t)):
            problem = "without memory of its own; its storage was changed"
        elif name in CLOCK and t.dtype != torch.int64:
            problem = f"{t.dtype}, not int64"
        else:
            continue
        raise ValueError(
            f"{owner}: the state {name!r} of {parameter_name(group, index, place)} is {problem}. "
            "To start over, remove the parameter from opt.state"
        )


def _overlaps(t: torch.Tensor) -> bool:
    """Whether several elements share memory."""
    return not t.is_contiguous() and torch._debug_has_internal_overlap(t) == 1


def _too_short(t: torch.Tensor) -> bool:
    """Whether elements lie beyond the end of the storage, as after ``resize_`` on it."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.numel() == 0:
        return False  # a subclass may have no storage of its own
    if t.is_contiguous():
        last = t.numel()
    else:
        last = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (t.storage_offset() + last) * t.element_size() > t.untyped_storage().nbytes()


def checked_seed(owner: str, seed: int | None, drawn: bool = True) -> int:
    """A seed, or where there is none and one may be `drawn`, one of PyTorch's global generator."""
    if seed is None and drawn:
        return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{owner}: seed must be an int, got {seed!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{owner}: seed must be in [0, 2**63), got {seed!r}")
    return seed


def parameter_name(group: dict[str, Any], index: int, place: int) -> str:
    """The name of a parameter for a message."""
    shape = tuple(group["params"][index].shape)
    if "param_names" in group:
        return f"parameter '{group['param_names'][index]}' of shape {shape}"
    return f"parameter {index} of group {place}, of shape {shape},"
