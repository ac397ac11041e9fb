"""Other gates than UPGD's, as rules of one's own: sharper ones, and each half of the gate alone.

    upgd sweep label-permuted-emnist sharp-upgd --use benchmarks/gates.py \
        --grid benchmarks/gates.toml --seeds 1 --steps 150000 --device cuda

UPGD multiplies a step by 2·φ(-Û/η): 1 for a weight without utility, less for a useful one, up to 2
for a harmful one. Here the exponent has a factor k, ``sharpness``; ``protecting-upgd`` slows useful
weights down and leaves harmful ones alone, ``undoing-upgd`` speeds harmful ones up and protects
nothing. docs/choosing.md has what came out.
"""

from upgd import lab
from upgd.lab import maximum, minimum, sigmoid


def trace(w, g, utility, beta_utility):
    """U ← β·U + (1-β)·(-g·w)"""
    return beta_utility * utility + (1 - beta_utility) * (-g * w)


def sharp(w, g, utility, noise, eta, lr, weight_decay, sigma, sharpness):
    """The whole gate."""
    gate = sigmoid(utility / (-eta / sharpness))
    return (1 - lr * weight_decay) * w - 2 * lr * ((g + sigma * noise) * gate)


def protecting(w, g, utility, noise, eta, lr, weight_decay, sigma, sharpness):
    """Its half for useful weights."""
    gate = sigmoid(maximum(utility, 0.0) / (-eta / sharpness))
    return (1 - lr * weight_decay) * w - 2 * lr * ((g + sigma * noise) * gate)


def undoing(w, g, utility, noise, eta, lr, weight_decay, sigma, sharpness):
    """Its half for harmful weights."""
    gate = sigmoid(minimum(utility, 0.0) / (-eta / sharpness))
    return (1 - lr * weight_decay) * w - 2 * lr * ((g + sigma * noise) * gate)


for name, update in {"sharp": sharp, "protecting": protecting, "undoing": undoing}.items():
    lab.method(
        f"{name}-upgd",
        (trace, update),
        states=["utility"],
        decays={"utility": "beta_utility"},
        reduce="max",
        lr=0.01,
        weight_decay=0.0,
        sigma=0.01,
        beta_utility=0.99,
        sharpness=1.0,
    )
