"""Utility-based perturbed gradient descent: optimizers for networks that keep learning."""

from upgd import processes as _processes  # noqa: F401 - first: see there

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        create,
        layer_groups,
        param_groups,
    )

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


_MODULES = frozenset(
    {"curvature", "kernels", "lab", "metrics", "monitor", "optim", "rules", "stream", "utility"}
)


def __getattr__(name: str) -> Any:
    """Import a name when it is used: ``upgd --help`` does without torch."""
    if name in _MODULES:
        return import_module(f"upgd.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'upgd' has no attribute {name!r}")
    home = import_module("upgd.monitor" if name == "Monitor" else "upgd.optim")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
