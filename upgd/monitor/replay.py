"""Forward passes that the monitor runs itself: for compiled models, and to look at a loss again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from upgd.monitor.recorder import Hook, Recorder


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Without gradients; PyTorch's random states and the model's buffers are as before then."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with torch.no_grad(), torch.random.fork_rng([d.index for d in devices], device_type=kind):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers of ``torch.compile`` and of data-parallel training."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, parallel):
            inner = inner.module
        else:
            return inner  # type: ignore[no-any-return]


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it is compiled, so that hooks inside are not called."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


class Inputs:
    """The inputs of a compiled model's newest forward passes, to run them again without compiler.

    Compiled code calls no hooks that came later, and hooks that it knows break its graph. So hooks
    are put on for passes of our own.

    Args:
        model: A compiled model, with its wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._inner = model, unwrapped(model)
        self._seen: deque[tuple[Any, Any]] = deque(maxlen=1)
        self._compiled: Any = None
        self._handle: Any = None

    def open(self) -> None:
        """Keep inputs from now on."""
        if self._handle is not None or self._compiled is not None:
            return
        self._compiled = getattr(self._model, "_compiled_call_impl", None)
        if self._compiled is None:
            hook = Hook(self._note)
            self._handle = self._model.register_forward_pre_hook(hook, with_kwargs=True)
        else:  # compiled in place: even the model's own hooks are in the compiled code
            compiled = self._compiled

            def call(*args: Any, **kwargs: Any) -> Any:
                self._note(self._model, args, kwargs)
                return compiled(*args, **kwargs)

            self._model._compiled_call_impl = call

    def close(self) -> None:
        """Keep no more inputs."""
        if self._handle is not None:
            self._handle.remove()
        if self._compiled is not None:
            self._model._compiled_call_impl = self._compiled
        self._handle = self._compiled = None

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._seen.append((args, kwargs))

    def replay(self, recorder: Recorder) -> None:
        """Run the inputs through the model itself, recorded."""
        recorder.open()
        recorder.always = True
        try:
            with undisturbed(self._inner), torch.compiler.set_stance("force_eager"):
                for args, kwargs in self._seen:
                    self._inner(*args, **kwargs)
        finally:
            recorder.always = False
            recorder.close()
        if recorder.passes:
            self._seen = deque(maxlen=recorder.passes)
