"""Today's specifications of the runs of older ledgers.

Before version 5, runs have any of a method's names, with or without its defaults, and options that
change nothing. Before version 6, they follow rules of version 2, where a weight without utility
takes half of the step. The tables here are of that time; they do not follow the registries.
"""

from __future__ import annotations

import json
from typing import Any

_UPGD = {"lr": 0.01, "weight_decay": 0.0, "sigma": 0.01, "beta_utility": 0.999}
_ADAM = {"lr": 0.001, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_ADA_UPGD = _ADAM | {"weight_decay": 0.0, "sigma": 0.001, "beta_utility": 0.999}
_STREAMING = {"lr": 0.01, "kappa": 0.1, "beta_importance": 0.99, "beta_weight": 0.999}
_SGD = {"lr": 0.01, "weight_decay": 0.001}
_SP = _SGD | {"sigma": 0.01}

Named = tuple[str, dict[str, float]]


def _methods() -> dict[str, Named]:
    found: dict[str, Named] = {
        "ada-upgd": ("ada-upgd", _ADA_UPGD),
        "adaupgd": ("ada-upgd", _ADA_UPGD),
        "ada-upgd-2nd": ("ada-upgd-2nd", _ADA_UPGD),
        "adaupgd-2nd": ("ada-upgd-2nd", _ADA_UPGD),
        "sgdw": ("sgdw", _SGD),
        "sgd": ("sgdw", _SGD | {"weight_decay": 0.0}),
        "pgd": ("pgd", {"lr": 0.01, "sigma": 0.01}),
        "adamw": ("adamw", _ADAM),
        "adam": ("adamw", _ADAM | {"weight_decay": 0.0}),
    }
    found |= dict.fromkeys(("shrink-and-perturb", "s&p", "sp"), ("shrink-and-perturb", _SP))
    for kind in ("ewc", "mas", "si", "rwalk"):
        found |= {f"{start}-{kind}": (f"s-{kind}", _STREAMING) for start in ("s", "streaming")}
    for head in ("", "n-", "feature-", "feature-n-"):
        for tail in ("", "-2nd", "-local", "-2nd-local"):
            row = f"{head}upgd{tail}"
            found[row] = (row, _UPGD)
            found[f"{head}upgd-w{tail}"] = (row, _UPGD | {"weight_decay": 0.001})
    return found


METHODS = _methods()  # by name or alias in lower case, the row's name and all defaults

# Task length, window and hidden units.
PROBLEMS: dict[str, tuple[int | None, int, str | None]] = {
    "input-permuted-mnist": (5_000, 5_000, "300-150"),
    "label-permuted-emnist": (2_500, 2_500, "300-150"),
    "label-permuted-cifar10": (2_500, 2_500, None),
    "label-permuted-mini-imagenet": (2_500, 2_500, "300-150"),
    "stationary-mnist": (None, 10_000, "300-150"),
    "toy-changing-inputs": (200, 4_000, "300-150"),
    "toy-changing-sign": (200, 4_000, "300-150"),
    "input-permuted-digits": (2_500, 2_500, "300-150"),
    "label-permuted-digits": (2_500, 2_500, "300-150"),
}

PPO = "ppo/"
PPO_HYPER = {"lr": 3e-4, "eps": 1e-5}
PPO_ITERATIONS = 10  # of a window
PPO_OPTIONS: dict[str, Any] = {
    "steps": 2048,
    "epochs": 10,
    "minibatches": 32,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "clip_values": True,
    "normalise_advantages": True,
    "value_weight": 0.5,
    "entropy_weight": 0.0,
    "largest_norm": 0.5,
    "anneal": True,
    "hidden": "64-64",
    "clip_observations": 10.0,
    "clip_rewards": 10.0,
    "measure_every": 1,
}


def canonical_json(text: str) -> str:
    """The JSON of the same run in the form of version 5; raises ValueError for other JSON.

    Example:
        >>> old = '{"hyper":{"lr":1.0},"method":"SGD","options":{},"problem":"p","rules":2}'
        >>> canonical_json(old)[:57]
        '{"hyper":{"lr":1.0,"weight_decay":0.0},"method":"sgdw","o'
    """
    content: dict[str, Any] = json.loads(text)
    try:
        problem, method = content["problem"], content["method"]
        hyper, options = content["hyper"], content["options"]
        usual = _usual(problem, options)
        content["options"] = {
            n: value for n, value in options.items() if n not in usual or usual[n] != value
        }
        if method.lower() in METHODS:
            row, defaults = METHODS[method.lower()]
            own = PPO_HYPER if problem.startswith(PPO) else {}
            own = {name: value for name, value in own.items() if name in defaults}
            content |= {"method": row, "hyper": {**defaults, **own, **hyper}}
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of a run: {error}") from None
    return _dumps(content)


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _usual(problem: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a run had where they were left out."""
    if problem.startswith(PPO):
        steps = options.get("steps", PPO_OPTIONS["steps"])
        known = isinstance(steps, int)
        return PPO_OPTIONS | ({"window": PPO_ITERATIONS * steps} if known else {})
    if problem not in PROBLEMS:
        return {}
    length, window, hidden = PROBLEMS[problem]
    usual: dict[str, Any] = {"batch": 1, "restart": False, "held_out": 0, "stride": 0}
    usual["window"] = window
    if length is not None:
        usual["task_length"] = length
        if isinstance(given := options.get("task_length", length), int):
            usual["window"] = window // length * given
    return usual if hidden is None else usual | {"hidden": hidden}


# ------------------------------------------------------------------------- from rules 2 to 3
GATED = frozenset(row for row, defaults in METHODS.values() if "beta_utility" in defaults)
"""The methods of the package whose hyperparameters have another meaning in rules 3."""


def whole_step_json(text: str) -> str:
    """The JSON of the same run in rules 3; raises ValueError for a run that has no such form.

    Other rules than 2 stay as they are. So do users' methods: they may call the package's rules,
    and what they make of their hyperparameters is not known.

    Example:
        >>> old = '{"hyper":{"lr":0.5,"weight_decay":0.25},"method":"upgd","rules":2}'
        >>> whole_step_json(old)
        '{"hyper":{"lr":0.25,"weight_decay":0.5},"method":"upgd","rules":3}'
    """
    content: dict[str, Any] = json.loads(text)
    try:
        method, hyper = content["method"], content["hyper"]
        own = "method" not in content.get("sources", {})
        if content["rules"] != 2 or not own or ("beta_utility" in hyper and method not in GATED):
            return text
        if method in GATED:
            hyper = _whole_steps(method, hyper)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not the JSON of a run: {error}") from None
    return _dumps(content | {"hyper": hyper, "rules": 3})


def _whole_steps(method: str, hyper: dict[str, float]) -> dict[str, float]:
    """The hyperparameters with which rules 3 make the same updates: factors of two are exact."""
    protects = not method.removeprefix("feature-").startswith("n-")
    factors = {"lr": 0.5, "weight_decay": 2.0} if protects else {"sigma": 0.5}
    found = {name: value * factors.get(name, 1.0) for name, value in hyper.items()}
    if any(found[name] / factor != hyper[name] for name, factor in factors.items()):
        raise ValueError(f"{hyper} have no exact counterpart in rules 3")
    if method.startswith("feature-"):
        # An output layer has no utility and no gate in rules 2.
        found["output_gate"] = 2.0 if protects else 1.0
    return found
