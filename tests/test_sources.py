"""A digest changes with whatever a definition's behaviour depends on, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from upgd.sources import digest

FILE = """
    import math
    import torch

    RATE = 0.5
    NAMES = {"a", "b", "c"}

    def helper(w):
        return w * RATE

    def rule(w, g, lr=0.1):
        return helper(w) - lr * g if "a" in NAMES else math.sqrt(2.0)

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = helper(p.data)

    def factory(width=3):
        depth = 2
        def make():
            return torch.nn.Linear(width, depth)
        return make

    made = factory()

    def unrelated():
        return 1
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Executes text as a module of its own file, as importing it would."""
    count = 0

    def loaded(text: str) -> ModuleType:
        nonlocal count
        count += 1
        file = tmp_path / f"mine{count}.py"
        file.write_text(textwrap.dedent(text))
        module = ModuleType("mine")
        module.__file__ = str(file)
        sys.modules["mine"] = module
        exec(compile(file.read_text(), str(file), "exec"), vars(module))
        return module

    return loaded


Loader = Callable[[str], ModuleType]


@pytest.mark.parametrize("name", ["rule", "Slow", "helper", "made"])
@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("RATE = 0.5", "RATE = 0.6", {"rule", "Slow", "helper"}),
        ("return w * RATE", "return 2 * w * RATE", {"rule", "Slow", "helper"}),
        ("lr=0.1", "lr=0.2", {"rule"}),
        ("depth = 2", "depth = 4", {"made"}),
        ("width=3", "width=4", {"made"}),
        ("super().step(closure)", "super().step(None)", {"Slow"}),
        ("return 1", "return 1  # other", set()),
        ("def unrelated", "def other", set()),
        ("import math", "import math\n", set()),
    ],
)
def test_what_changes_a_digest(
    load: Loader, name: str, old: str, new: str, changes: set[str]
) -> None:
    before = digest(getattr(load(FILE), name))
    after = digest(getattr(load(FILE.replace(old, new)), name))
    assert (before != after) == (name in changes)


def test_a_session_without_source_text() -> None:
    def defined(text: str) -> Any:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(textwrap.dedent(text), names)
        return names

    before, again = defined(FILE), defined(FILE)
    other = defined(FILE.replace("RATE = 0.5", "RATE = 0.25"))
    body = defined(FILE.replace("return w * RATE", "return w + RATE"))
    for name in ("rule", "Slow"):
        assert digest(before[name]) == digest(again[name])
        assert len({digest(each[name]) for each in (before, other, body)}) == 3


def test_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE))
    ask = (
        "import mine, torch; from upgd.sources import digest; "
        "print(digest(mine.rule, mine.Slow, mine.made, torch.optim.Adam, mine.NAMES))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", ask],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 16


def test_data() -> None:
    x = np.arange(6, dtype=np.float32)
    different = [
        *(x, x.reshape(2, 3), x.astype(np.float64), x + 1, torch.from_numpy(x), [1], (1,), [True]),
        *({"a": 1}, {"a": 2}, {"b": 1}, None, "None", 0, 0.0, {1, 2}, torch.zeros(2).bfloat16()),
    ]
    assert len({digest(each) for each in different}) == len(different)
    assert digest(x) == digest(x[:].copy())
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_installed_classes_count_by_name() -> None:
    assert digest(torch.optim.SGD) != digest(torch.optim.Adam)
    assert digest(torch.nn.Linear) == digest(torch.nn.Linear)


def test_circles_end() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert digest(ring) == digest(ring)


def test_a_decorated_step_counts(load: Loader) -> None:
    text = FILE.replace("        def step", "        @torch.no_grad()\n        def step")
    before, after = load(text), load(text.replace("RATE = 0.5", "RATE = 0.6"))
    assert digest(before.Slow) != digest(after.Slow)
