"""State dicts of version 0.1.0, for ``tests/test_old_state_dicts.py``.

``python -m tests.state_dicts > tests/data/state_dicts_0.1.0.json`` wrote the file with the code of
that version (commit 37115c8). It holds, for every method of the registry without and with noise,
the weights and the state dict of a small network after three steps. It is never written again: a
later version must read what an earlier one saved.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import upgd
from tests.cases import provide
from upgd.optim.base import RuleOptimizer
from upgd.optim.registry import METHODS, Row

SAVED_AFTER = 3


def model() -> nn.Module:
    """A network whose weights are the same wherever it is made."""
    made = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    count = 0
    for p in made.parameters():
        values = [math.sin(1.0 + 2.0 * k) for k in range(count, count + p.numel())]
        p.data = torch.tensor(values).reshape(p.shape)
        count += p.numel()
    return made


def variants() -> Iterator[tuple[str, Row, dict[str, Any]]]:
    """Name, method and arguments of every saved run."""
    for name, row in METHODS.items():
        for sigma in (0.0, 0.1) if "noise" in row.needs else (None,):
            hyper = {} if sigma is None else {"sigma": sigma}
            yield f"{name}{'' if not sigma else ', noise'}", row, {"seed": 7, **hyper}


def steps(row: Row, opt: RuleOptimizer, net: nn.Module, first: int, last: int) -> None:
    """Update with batches number `first` to `last`, excluding `last`."""
    for step in range(first, last):
        x = torch.tensor([[math.cos(3.0 * step + 2.0 * i + j) for j in range(2)] for i in range(4)])
        opt.zero_grad()
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        provide(row, opt, net)
        opt.step()


def encode(value: Any) -> Any:
    """A value of a state dict as JSON; tensors with their type and shape."""
    if isinstance(value, Tensor):
        numbers = [json.loads(str(x)) for x in np.asarray(value.flatten())]  # the shortest digits
        return {"tensor": numbers, "dtype": str(value.dtype)[6:], "shape": list(value.shape)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    return [encode(v) for v in value] if isinstance(value, list | tuple) else value


def decode(value: Any) -> Any:
    """What :func:`encode` was given, but for tuples, which have become lists."""
    if isinstance(value, dict) and "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype).reshape(value["shape"])
    if isinstance(value, dict):
        return {int(k) if k.isdigit() else k: decode(v) for k, v in value.items()}
    return [decode(v) for v in value] if isinstance(value, list) else value


def main() -> None:
    """Write the file."""
    found = {}
    for name, row, arguments in variants():
        net = model()
        opt = row.make(net, **arguments)
        steps(row, opt, net, 0, SAVED_AFTER)
        found[name] = {"weights": encode(dict(net.state_dict())), "dict": encode(opt.state_dict())}
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    print("{\n", f' "version": {json.dumps(upgd.__version__)},\n', ",\n".join(lines), "\n}", sep="")


if __name__ == "__main__":
    main()
