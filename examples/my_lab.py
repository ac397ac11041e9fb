"""A rule, an optimizer, a network and a stream of one's own against UPGD-W and SGD.

``python examples/my_lab.py`` runs the comparison. The command line does the same runs, and finds
them done where the script has been:

    upgd run rotating upgd-w sgd l2-start sign-sgd --seeds 3 --use examples/my_lab.py
"""

import numpy as np
import torch
from torch import nn

from upgd import lab


def l2_start(w, g, start, lr, kappa):
    """A rule is a plain function of scalars; here weights are pulled to where they started."""
    return w - lr * (g + kappa * (w - start))


class SignSGD(torch.optim.Optimizer):
    """Any optimizer of PyTorch's kind."""

    def __init__(self, params, lr=0.005):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Move each weight by the step size, against the sign of its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


def normed(inputs, outputs):
    """Any network."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, outputs))


def rotating(seed):
    """Any stream; here the line between two classes turns."""
    rng = np.random.default_rng(seed)
    for step in range(10**9):
        x = rng.normal(size=8).astype("float32")
        yield x, int(x[0] * np.cos(step / 300) > x[1] * np.sin(step / 300))


lab.method("l2-start", l2_start, states={"start": "weight"}, lr=0.01, kappa=0.01)
lab.optimizer("sign-sgd", SignSGD)
lab.network("normed", normed)
lab.problem("rotating", rotating, network="normed", outputs=2, steps=600, window=60)

if __name__ == "__main__":
    study = lab.Study("studies/rotating")
    print(study.run("rotating", ["upgd-w", "sgd", "l2-start", "sign-sgd"], seeds=3))
    print(study.plot())
