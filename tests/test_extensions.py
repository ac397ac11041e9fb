"""Users' files are loaded when they are named, and other processes know the same definitions."""

from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from upgd.networks import NETWORKS
from upgd.networks import register as register_network
from upgd.optim.foreign import torch_row
from upgd.optim.registry import get
from upgd.optim.registry import register as register_method
from upgd.streams import PROBLEMS, make_problem
from upgd.streams import register as register_problem
from upgd.study import extensions
from upgd.study.extensions import Carried, ExtensionError, carried, use

FILE = """
    import numpy as np
    import torch
    from torch import nn
    from upgd.networks import register as network
    from upgd.optim.foreign import torch_row
    from upgd.optim.registry import register as method
    from upgd.streams import make_problem, register as problem

    RATE = 0.5

    class Slow(torch.optim.SGD):
        def __init__(self, params, lr=0.1):
            super().__init__(params, lr=RATE * lr)

    method(torch_row("slow", Slow))
    network("narrow", lambda inputs, outputs: nn.Linear(inputs, outputs))
    problem(make_problem("flat", (np.zeros((9, 2)), np.arange(9) % 3), network="narrow"))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_lab.py"
    path.write_text(textwrap.dedent(FILE))
    return path


# ------------------------------------------------------------------------------ loading
def test_a_file_registers_what_it_defines(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(file)
    row, _ = get("slow")
    assert row.make(torch.nn.Linear(1, 1), lr=1.0).param_groups[0]["lr"] == 0.5
    assert PROBLEMS["flat"].network == "narrow"
    assert pickle.loads(pickle.dumps(row.optimizer)) is row.optimizer
    monkeypatch.chdir(file.parent)
    use("my_lab.py")  # the same file
    assert get("slow")[0] is row


def test_a_changed_file_is_loaded_again(file: Path) -> None:
    use(file)
    before = get("slow")[0].source
    text = file.read_text().replace("RATE = 0.5", "RATE = 0.25")
    file.write_text(
        text.replace('network("narrow"', 'network("thin"').replace('="narrow"', '="thin"')
    )
    use(file)
    assert get("slow")[0].source != before
    assert NETWORKS.keys() == {"thin"}


def test_nothing_is_loaded_unless_it_is_named(file: Path) -> None:
    here = (
        "import sys, upgd, upgd.study, upgd.study.extensions; print('my_lab' in str(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", here], cwd=file.parent, capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\ny = (\n", "my_lab.py:2: SyntaxError: '(' was never closed"),
        ("x = 1\n\nunknown\n", "my_lab.py:3: NameError: name 'unknown' is not defined"),
        ("def f():\n    raise OSError('a\\nb')\n\nf()\n", "my_lab.py:2: OSError: a"),
        ("import no_such_module_anywhere\n", "my_lab.py:1: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)\n", "my_lab.py:2: SystemExit: 3"),
        ("import json\njson.loads('x')\n", "my_lab.py:2: JSONDecodeError"),
        ("x = 1\n", "registers no method, problem or network"),
        ("\0", "my_lab.py"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ExtensionError) as caught:
        use(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file_or_entry_point(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match=r"cannot read .*No such file"):
        use(tmp_path / "missing.py")
    with pytest.raises(ExtensionError, match="neither a Python file nor an entry point"):
        use("missing")
    with pytest.raises(ExtensionError, match="cannot read"):
        use(tmp_path)


def test_siblings_of_a_file_can_be_imported(file: Path) -> None:
    (file.parent / "its_helper.py").write_text("RATE = 0.125\n")
    file.write_text(file.read_text().replace("RATE = 0.5", "from its_helper import RATE"))
    use(file)
    assert get("slow")[0].make(torch.nn.Linear(1, 1), lr=1.0).param_groups[0]["lr"] == 0.125


def test_an_entry_point(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Point:
        name = "my-package"

        def load(self) -> Any:
            return lambda: calls.append(register_method(torch_row("slow", torch.optim.SGD)))

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Point()])
    use("my-package")
    use("my-package")
    assert len(calls) == 1
    assert carried().used == ("my-package",)
    with pytest.raises(ExtensionError, match="installed: my-package"):
        use("other")


# ------------------------------------------------------------------------ other processes
WORKER = """
import pickle, sys
from pathlib import Path
carried = pickle.loads(Path(sys.argv[1]).read_bytes())
try:
    carried.load()
except ValueError as error:
    print(error)
    sys.exit(1)
from upgd.study.extensions import _users
for key, source in sorted(_users().items()):
    print(*key, source)
from upgd.ledger import RunSpec
from upgd.study.prepare import prepare
run = prepare(RunSpec(sys.argv[2], sys.argv[3], {}, 0, 5, {"window": 5}))
run.advance(5)
print(run.meter.series("loss")[0])
"""


def elsewhere(folder: Path, content: Carried, *names: str) -> subprocess.CompletedProcess[str]:
    """What a fresh process says that loads the definitions."""
    (folder / "carried").write_bytes(pickle.dumps(content))
    command = [sys.executable, "-c", WORKER, str(folder / "carried"), *names]
    env = {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_another_process_knows_the_same(file: Path) -> None:
    use(file)
    found = elsewhere(file.parent, carried(), "flat", "slow")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    here = [
        f"{kind} {name} {source}" for (kind, name), source in sorted(extensions._users().items())
    ]
    assert lines[:-1] == here
    assert carried().pickled == b""


@pytest.mark.slow
def test_a_file_that_changed_in_between_is_noticed(file: Path) -> None:
    use(file)
    content = carried()
    file.write_text(file.read_text().replace("RATE = 0.5", "RATE = 0.25"))
    found = elsewhere(file.parent, content, "flat", "slow")
    assert found.returncode == 1
    assert "method slow differs" in found.stdout
    assert "my_lab.py has changed" in found.stdout


def test_definitions_of_a_notebook(tmp_path: Path) -> None:
    """Defined in no file, as in a notebook's cells: they go as they are."""
    cells: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(
        textwrap.dedent("""
            RATE = 0.5

            class Own(torch.optim.SGD):
                def __init__(self, params, lr=0.1):
                    super().__init__(params, lr=RATE * lr)

            def stream(seed):
                while True:
                    yield [RATE, 1.0], 1

            def network(inputs, outputs):
                return torch.nn.Linear(inputs, outputs)
        """),
        cells,
    )
    register_method(torch_row("own", cells["Own"]))
    register_network("mine", cells["network"])
    register_problem(make_problem("cells", cells["stream"], outputs=3, network="mine"))
    found = elsewhere(tmp_path, carried(), "cells", "own")
    assert found.returncode == 0, found.stderr
    assert np.isfinite(float(found.stdout.splitlines()[-1]))


def test_without_cloudpickle_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    register_method(torch_row("own", torch.optim.SGD))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ExtensionError, match=r"method own: defined in no file.*put the"):
        carried()


def test_what_cannot_be_pickled_is_said() -> None:
    held = iter([1])
    lock = __import__("threading").Lock()

    def factory() -> torch.nn.Module:
        return torch.nn.Linear(1, 1) if lock and held else torch.nn.Identity()

    register_network("mine", factory)
    with pytest.raises(ExtensionError, match="network mine: cannot go to other processes"):
        carried()


def test_nothing_to_carry() -> None:
    assert carried() == Carried()
    carried().load()
