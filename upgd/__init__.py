"""Utility-based perturbed gradient descent: optimizers for networks that keep learning."""

from upgd import processes as _processes  # noqa: F401 - first: see there

# isort: split
from importlib import import_module
from types import ModuleType

from upgd import curvature, utility
from upgd.monitor import Monitor
from upgd.optim import (
    FADE,
    PGD,
    SGDW,
    TRAC,
    UPGD,
    AdaUPGD,
    CentredSGD,
    ContinualBackprop,
    Features,
    FeatureUPGD,
    GatedUPGD,
    HareTortoise,
    L2Init,
    Layers,
    ReDo,
    SelfTunedSGD,
    ShrinkAndPerturb,
    StreamingEWC,
    StreamingMAS,
    StreamingRWalk,
    StreamingSI,
    WeightClipping,
    WeightClippingAdam,
    layer_groups,
    param_groups,
)
from upgd.optim.registry import create

__version__ = "0.1.0"

__all__ = [
    "FADE",
    "PGD",
    "SGDW",
    "TRAC",
    "UPGD",
    "AdaUPGD",
    "CentredSGD",
    "ContinualBackprop",
    "FeatureUPGD",
    "Features",
    "GatedUPGD",
    "HareTortoise",
    "L2Init",
    "Layers",
    "Monitor",
    "ReDo",
    "SelfTunedSGD",
    "ShrinkAndPerturb",
    "StreamingEWC",
    "StreamingMAS",
    "StreamingRWalk",
    "StreamingSI",
    "WeightClipping",
    "WeightClippingAdam",
    "__version__",
    "create",
    "curvature",
    "layer_groups",
    "param_groups",
    "utility",
]


def __getattr__(name: str) -> ModuleType:
    """``upgd.lab`` and ``upgd.stream``, imported when used: the library needs torch and numpy."""
    if name in ("lab", "stream"):
        return import_module(f"upgd.{name}")
    raise AttributeError(f"module 'upgd' has no attribute {name!r}")
