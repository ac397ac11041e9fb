"""Optimizers: every update rule of the paper as a ``torch.optim.Optimizer``."""

from upgd.optim.ada_upgd import AdaUPGD
from upgd.optim.centred import CentredSGD
from upgd.optim.consolidation import StreamingEWC, StreamingMAS, StreamingRWalk, StreamingSI
from upgd.optim.fade import FADE
from upgd.optim.feature_upgd import FeatureUPGD
from upgd.optim.features import Features
from upgd.optim.gated_upgd import GatedUPGD
from upgd.optim.groups import layer_groups, param_groups
from upgd.optim.layers import Layers
from upgd.optim.perturbed import PGD, SGDW, ShrinkAndPerturb
from upgd.optim.recycling import ContinualBackprop, ReDo
from upgd.optim.registry import create
from upgd.optim.restrained import HareTortoise, L2Init, WeightClipping, WeightClippingAdam
from upgd.optim.self_tuned import SelfTunedSGD
from upgd.optim.trac import TRAC
from upgd.optim.upgd import UPGD

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
    "ReDo",
    "SelfTunedSGD",
    "ShrinkAndPerturb",
    "StreamingEWC",
    "StreamingMAS",
    "StreamingRWalk",
    "StreamingSI",
    "WeightClipping",
    "WeightClippingAdam",
    "create",
    "layer_groups",
    "param_groups",
]
