"""Nested values as arrays and JSON: what a checkpoint keeps of optimizers and networks."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_KEPT = "tensors, generators, arrays, numbers, strings, None, and lists, tuples and dicts of them"


class UnpackableError(ValueError):
    """A checkpoint cannot hold a value: the message names it."""


def pack(
    value: Any, name: str, arrays: MutableMapping[str, NDArray[Any]], own: Sequence[Tensor] = ()
) -> Any:
    """What is left of `value` for JSON when its tensors and arrays are put into `arrays`.

    Args:
        value: Dicts, lists, tuples, numbers, strings, None, tensors, arrays and PyTorch's
            generators, nested.
        name: Of the value; names of arrays begin with it.
        arrays: Receives copies.
        own: Tensors that are referred to by their place in here, not copied.

    Raises:
        UnpackableError: There is another kind of value in it.
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
