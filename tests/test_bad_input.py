"""Mistakes in definitions: one clear line each, from Python and from the command line."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from upgd import lab
from upgd.cli import app

PROBLEM = "label-permuted-digits"
SMALL = ("--seeds", "1", "--steps", "20", "--window", "10")


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def one_line(output: str) -> str:
    """The line that was printed, which is all there is."""
    lines = output.strip().splitlines()
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


HEAD = "import torch, numpy as np\nfrom torch import nn\nfrom upgd import lab\n"
CASES = {
    "too few values": (
        """
        def rule(w, g, speed, lr):
            return w - lr * g
        lab.method("mine", rule, states=["speed"], lr=0.1)
        """,
        "mine: rule returns too few values",
    ),
    "an unknown argument": (
        """
        def rule(w, g, momentum, lr):
            return w - lr * (g + momentum)
        lab.method("mine", rule, lr=0.1)
        """,
        "mine: rule reads 'momentum'; it may read w, g",
    ),
    "max": (
        """
        def rule(w, g, lr):
            return max(w - lr * g, 0)
        lab.method("mine", rule, lr=0.1)
        """,
        "mine: rule, line 6 cannot be a rule",
    ),
    "if": (
        """
        def rule(w, g, lr):
            if g > 0:
                return w - lr * g
            return w
        lab.method("mine", rule, lr=0.1)
        """,
        "mine: rule, line 6 cannot be a rule",
    ),
    "a name of the package": (
        """
        lab.method("upgd", lambda w, g, lr: w - lr * g, lr=0.1)
        """,
        "'upgd' is this package's",
    ),
    "an optimizer that wants a closure": (
        """
        lab.optimizer("lbfgs", torch.optim.LBFGS)
        """,
        "lbfgs: step() of LBFGS wants a closure",
    ),
    "no optimizer": (
        """
        lab.optimizer("linear", nn.Linear)
        """,
        "linear: Linear is no subclass of torch.optim.Optimizer",
    ),
    "nothing": ("x = 1", "registers no method, problem or network"),
    "an error": ("1 / 0", "my_lab.py:5: ZeroDivisionError: division by zero"),
    "bad syntax": ("def", "my_lab.py:5: SyntaxError: invalid syntax"),
}


@pytest.mark.parametrize("case", CASES)
def test_definitions(case: str, tmp_path: Path) -> None:
    code, expected = CASES[case]
    file = tmp_path / "my_lab.py"
    file.write_text(HEAD + "\n" + textwrap.dedent(code).lstrip("\n"))
    with pytest.raises(ValueError, match=re.escape(expected)) as raised:
        lab.use(file)
    assert "\n" not in str(raised.value)
    result = call("run", PROBLEM, "mine", "--use", file, *SMALL, "--study", tmp_path / "study")
    assert result.exit_code == 2
    assert expected in one_line(result.output)
    assert not (tmp_path / "study").exists()


def test_files_and_names_that_are_not_there(tmp_path: Path) -> None:
    study = ("--study", tmp_path / "study")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((PROBLEM, "sgd", "--use", tmp_path / "none.py"), f"cannot read {tmp_path / 'none.py'}"),
        ((PROBLEM, "sgd", "--use", "nobody"), "'nobody' is neither a Python file nor an entry"),
        ((PROBLEM, "sgd", "--network", "deep"), "deep"),
        ((PROBLEM, "sdg"), "unknown method 'sdg'; did you mean 'sgd'?"),
        (("digits-of-pi", "sgd"), "unknown problem 'digits-of-pi'"),
        ((tmp_path / "none.npz", "sgd"), "none.npz"),
    ]
    for arguments, expected in cases:
        result = call("run", *arguments, *SMALL, *study)
        assert result.exit_code == 2, arguments
        assert expected in one_line(result.output)
    with pytest.raises(ValueError, match="deep"):
        lab.Study(tmp_path / "study", quiet=True).run(PROBLEM, "sgd", network="deep")
    with pytest.raises(KeyError, match="did you mean 'sgd'"):
        lab.Study(tmp_path / "study", quiet=True).run(PROBLEM, "sdg")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": np.zeros((4, 2))}, "y"),
        ({"y": np.zeros(4, int)}, "x"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, "4"),
        ({}, "x"),
    ],
)
def test_archives(arrays: dict[str, Any], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    np.savez(file, **arrays)
    result = call("run", file, "sgd", *SMALL, "--study", tmp_path / "study")
    assert result.exit_code == 2
    line = one_line(result.output)
    assert "mine" in line
    assert expected in line
    with pytest.raises(ValueError, match="mine"):
        lab.Study(tmp_path / "study").run(file, "sgd")


def test_a_network_without_parameters(tmp_path: Path) -> None:
    file = tmp_path / "my_lab.py"
    file.write_text(HEAD + 'lab.network("flat", lambda i, o: nn.Identity())\n')
    study = ("--study", tmp_path / "study")
    result = call("run", PROBLEM, "sgd", "--use", file, "--network", "flat", *SMALL, *study)
    assert result.exit_code == 2
    assert re.search("'?flat'? .*no parameters", one_line(result.output))
    with pytest.raises(ValueError, match="no parameters"):
        lab.Study(tmp_path / "study", quiet=True).run(PROBLEM, "sgd", network="flat")


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_a_generator_that_ends_early_fails_its_run(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "my_lab.py"
    file.write_text(
        HEAD
        + textwrap.dedent("""
            def short(seed):
                for step in range(15):
                    yield [1.0, 2.0], step % 2

            lab.problem("short", short, outputs=2, steps=20, window=10)
            """)
    )
    study = ("--study", tmp_path / "study", "--quiet")
    result = call("run", "short", "sgd", "--use", file, *SMALL, *study, "--engine", engine)
    assert result.exit_code == 1
    line = one_line(result.output)
    assert line.startswith("failed: short sgd")
    assert "15" in line
    mine = lab.Study(tmp_path / "again", quiet=True, engine=engine)
    mine.run("short", "sgd", seeds=1, steps=20, window=10)
    assert mine.tally.failed == 1
    assert len(mine.run("short", "sgd", seeds=1, steps=10, window=10)) == 1
