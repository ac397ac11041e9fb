"""TRAC around AdamW as a method of the laboratory and an entrant of the arena.

    upgd run label-permuted-digits trac upgd-w --use examples/trac.py --seeds 3
    upgd arena trac --use examples/trac.py --scale smoke

TRAC scales the whole network by one number, so it is no rule: it runs one learner at a time.
"""

import torch

import upgd
from upgd import lab
from upgd.arena import grids


def trac(params, lr, weight_decay, betas, eps):
    """Any other optimizer of PyTorch's kind would do in AdamW's place."""
    base = torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    return upgd.TRAC(base)


lab.optimizer("trac", trac, title="TRAC", lr=0.001, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
grids.register("trac", {"lr": [1e-4, 1e-3, 0.01, 0.1], "weight_decay": [0.0, 0.01, 0.1]})
