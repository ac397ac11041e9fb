"""Versions and facts that a result may depend on besides its specification."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import upgd

OF_AGENTS = ("gymnasium", "mujoco")  # packages that runs of reinforcement learning depend on


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions that must be the same for a continued run to have the same result.

    Of further `packages`, those that are installed.
    """
    found = {
        "upgd": upgd.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def all_versions(device: str, packages: Iterable[str] = ()) -> dict[str, str]:
    """The same with a device's compiler if it was used, and the commit if this is a clone."""
    found = versions(packages)
    compiler = "numba" if device.startswith("cpu") else "triton"
    if compiler in sys.modules:
        found[compiler] = str(getattr(sys.modules[compiler], "__version__", "unknown"))
    if commit():
        found["commit"] = commit()
    return found


@functools.cache
def commit() -> str:
    """The commit that this package is at, marked where files differ from it; empty if unknown."""
    root = Path(upgd.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return _output_of([*command, "--exclude=*"])


@functools.cache
def processor() -> str:
    """What kind of CPU this is."""
    names = [line for line in _output_of(["lscpu"]).splitlines() if line.startswith("Model name:")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _output_of(command: list[str]) -> str:
    """What a program prints; nothing if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
