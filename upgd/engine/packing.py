"""What a checkpoint of an eager run keeps: nested values, generators, modules' attributes."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_KEPT = "tensors, generators, arrays, numbers, strings, None, and lists, tuples and dicts of them"


class UnpackableError(ValueError):
    """A checkpoint cannot hold a value: the message names it."""


def pack(
    value: Any, name: str, arrays: MutableMapping[str, NDArray[Any]], own: Sequence[Tensor] = ()
) -> Any:
    """What is left of `value` for JSON when its tensors and arrays are copied into `arrays`.

    Names of arrays begin with `name`. Tensors in `own` are not copied: their place is noted.

    Raises:
        UnpackableError: A checkpoint does not keep such a value.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Tensor):
        place = next((i for i, mine in enumerate(own) if mine is value), None)
        return {"own": place} if place is not None else _tensor(value, name, arrays)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise UnpackableError(f"{name} is an array of objects; a checkpoint keeps {_KEPT}")
        arrays[name] = np.array(value)
        return {"array": name, "scalar": isinstance(value, np.generic)}
    if isinstance(value, torch.Generator):
        arrays[name] = value.get_state().numpy().copy()
        return {"generator": name, "host": value.device.type == "cpu"}
    if type(value) in (dict, OrderedDict, defaultdict):
        items = [
            [pack(k, f"{name} key", arrays), pack(v, f"{name}/{k}", arrays, own)]
            for k, v in value.items()
        ]
        return {"dict": items}
    kind = next((word for word, cls in _SEQUENCES.items() if type(value) is cls), None)
    if kind is None:
        raise UnpackableError(
            f"{name} is a {type(value).__name__}; a checkpoint keeps {_KEPT}. Keep what it needs "
            "in self.state, or define state_dict() and load_state_dict()"
        )
    return {kind: [pack(v, f"{name}/{i}", arrays, own) for i, v in enumerate(value)]}


def _tensor(value: Tensor, name: str, arrays: MutableMapping[str, NDArray[Any]]) -> Any:
    if value.layout != torch.strided or value.is_quantized:
        raise UnpackableError(f"{name} is a sparse or quantized tensor; a checkpoint keeps {_KEPT}")
    flat = value.detach().cpu().contiguous()
    kind = str(value.dtype).removeprefix("torch.")
    try:
        arrays[name] = flat.numpy().copy()
    except TypeError:  # NumPy has no such numbers: their bits
        arrays[name] = flat.view(_BITS[flat.element_size()]).numpy().copy()
    return {"tensor": name, "dtype": kind, "host": value.device.type == "cpu"}


def unpack(
    packed: Any,
    arrays: Mapping[str, NDArray[Any]],
    device: torch.device | str = "cpu",
    own: Sequence[Tensor] = (),
) -> Any:
    """The value that :func:`pack` took apart; tensors that were not on CPU go to `device`."""
    if not isinstance(packed, dict):
        return packed
    (kind, content), *more = packed.items()
    rest = dict(more)
    if kind == "float":
        return float(content)
    if kind == "own":
        return own[content]
    if kind == "tensor":
        dtype = getattr(torch, rest["dtype"])
        found = torch.from_numpy(np.array(arrays[content]))
        found = found if found.dtype == dtype else found.view(dtype)
        return found.to("cpu" if rest["host"] else device)
    if kind == "generator":
        generator = torch.Generator("cpu" if rest["host"] else device)
        generator.set_state(torch.from_numpy(np.array(arrays[content])))
        return generator
    if kind == "array":
        array = np.array(arrays[content])
        return array[()] if rest["scalar"] else array
    if kind == "dict":
        return {k: unpack(v, arrays, device, own) for k, v in content}
    return _SEQUENCES[kind](unpack(v, arrays, device, own) for v in content)


class Random:
    """PyTorch's global generators as they are for one run."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._cuda):
            torch.default_generator.manual_seed(seed)  # this device's alone
            for each in self._cuda:
                with torch.cuda.device(each):
                    torch.cuda.manual_seed(seed)
            self.states = self._now()

    def _now(self) -> dict[str, Tensor]:
        found = {"cpu": torch.random.get_rng_state()}
        for each in self._cuda:
            found["cuda"] = torch.cuda.get_rng_state(each)
        return found

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the run's states be the global ones; afterwards the caller's are back."""
        with torch.random.fork_rng(self._cuda):
            torch.random.set_rng_state(self.states["cpu"])
            for each in self._cuda:
                torch.cuda.set_rng_state(self.states["cuda"], each)
            try:
                yield
            finally:
                self.states = self._now()


def beside(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside their state dict: buffers that are not saved, numbers, tensors."""
    saved = model.state_dict().keys()
    found: dict[str, Any] = {
        name: buffer for name, buffer in model.named_buffers() if name not in saved
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | Tensor):
                found[f"{path}.{name}".lstrip(".")] = value
    return found


def put_beside(model: nn.Module, found: Mapping[str, Any]) -> None:
    """Give modules back what :func:`beside` found."""
    for name, value in found.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, value)


def from_before(arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> dict[str, Any]:
    """A state as versions wrote it that knew our own optimizers and networks alone."""
    model: dict[str, Any] = {}
    state: dict[int, dict[str, Any]] = {}
    for key, array in arrays.items():
        tensor = {"tensor": key, "dtype": str(array.dtype), "host": False}
        if key.startswith("model/"):
            model[key[6:]] = tensor
        elif key.startswith("optimizer/"):
            _, index, name = key.split("/", 2)
            state.setdefault(int(index), {})[name] = tensor
    groups = [
        {k: {"list": v} if isinstance(v, list) and k != "betas" else v for k, v in group.items()}
        for group in meta["groups"]
    ]
    for group in groups:
        if "betas" in group:
            group["betas"] = {"tuple": group["betas"]}
    nothing: dict[str, Any] = {"dict": []}
    return {
        **meta,
        "model": {"dict": list(model.items())},
        "optimizer": {"dict": [[i, {"dict": list(each.items())}] for i, each in state.items()]},
        "groups": {"list": [{"dict": list(group.items())} for group in groups]},
        **dict.fromkeys(("beside", "rest", "attributes"), nothing),
    }
