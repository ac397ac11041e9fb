"""A module and data of one's own, for ``upgd compare``: does UPGD or AdaUPGD help here?

    upgd compare examples/compare.py

It prints a table and a verdict, and draws compare.png. The data are scikit-learn's 8×8 digits.
"""

import torch
from torch import nn

from upgd.streams import load


def model():
    """Any module; each seed calls this for initial weights of its own."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def data():
    """Arrays, tensors, a Dataset or a DataLoader."""
    digits = load("digits")
    return digits.scaled(slice(None))[:, None], digits.labels


def held_out():
    """Data of the same kind; without this, a fifth of the data is held out."""
    digits = load("digits", "test")
    return digits.scaled(slice(None))[:, None], digits.labels


def optimizer(params):
    """What you use today; without this, PyTorch's SGD and Adam."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01)
