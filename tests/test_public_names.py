"""The names of the package: imported when they are used, and the same as those of its modules."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import upgd
from tests.waiting import PATIENCE


def test_the_package_imports_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, upgd; assert upgd.__version__\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "assert upgd.optim.registry.METHODS['upgd'].optimizer is upgd.UPGD\n"
        "assert 'torch' in sys.modules and 'upgd.monitor' not in sys.modules\n"
        "from upgd import *; assert UPGD and Monitor and create and curvature.backward\n"
        "assert 'upgd.lab' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_every_public_name_is_there() -> None:
    assert set(upgd.__all__) <= set(dir(upgd))
    homes = ("upgd.optim", "upgd.monitor", "upgd.curvature", "upgd.utility")
    for name in upgd.__all__:
        value = getattr(upgd, name)
        assert name == "__version__" or inspect.getmodule(value).__name__.startswith(homes)
        assert getattr(upgd, name) is value


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(upgd.__file__).read_text("utf-8"))
    [typing] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = [alias.name for node in typing.body for alias in node.names]  # type: ignore[attr-defined]
    assert sorted(seen) == sorted(set(upgd.__all__) - {"__version__"})


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'upgd' has no attribute 'Updg'"):
        _ = upgd.Updg
    with pytest.raises(ImportError, match="cannot import name 'Updg'"):
        from upgd import Updg  # noqa: F401


def test_classes_are_pickled_and_copied() -> None:
    assert pickle.loads(pickle.dumps(upgd.UPGD)) is upgd.UPGD
    optimizer = upgd.UPGD([torch.nn.Parameter(torch.ones(2))])
    assert type(copy.deepcopy(optimizer)) is upgd.UPGD
