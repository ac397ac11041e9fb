"""A rule, an optimizer, a network and a stream of one's own against UPGD-W and SGD."""

import numpy as np
import torch
from torch import nn

from upgd import lab


def l2_init(w, g, start, lr, kappa):  # a rule: a plain function of scalars
    return w - lr * (g + kappa * (w - start))


class SignSGD(torch.optim.Optimizer):
    """Any optimizer."""

    def __init__(self, params, lr=0.002):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            torch._foreach_sub_(
                group["params"], [p.grad.sign() for p in group["params"]], alpha=group["lr"]
            )


def normed(inputs, outputs):  # any network
    return nn.Sequential(nn.Linear(inputs, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, outputs))


def rotating(seed):  # any stream: here the line between two classes turns
    rng = np.random.default_rng(seed)
    for step in range(10**9):
        x = rng.normal(size=8).astype("float32")
        yield x, int(x[0] * np.cos(step / 300) > x[1] * np.sin(step / 300))


lab.method("l2-init", l2_init, states={"start": "weight"}, lr=0.01, kappa=0.01)
lab.optimizer("sign-sgd", SignSGD)
lab.network("normed", normed)
lab.problem("rotating", rotating, outputs=2, steps=5_000, window=500)

if __name__ == "__main__":
    study = lab.Study("studies/rotating")
    methods = ["upgd-w", "sgd", "l2-init", "sign-sgd"]
    print(study.run("rotating", methods, seeds=5, lr=0.01, network="normed"))
    print(study.plot())
