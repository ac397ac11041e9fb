"""What a run depends on beside its optimizer's state: generators, and what modules keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn


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
