"""The paper's experiments, as data: problems, arms, seeds, steps.

Figures and claims name experiments; a run that several need is run once. An arm is a learner with
its name in a figure's legend. Its hyperparameters are printed in the paper, follow from printed
ones, or were searched (:mod:`upgd.paper.found`). On the main problems
arms have the printed sets, and where a search found others these are experiments of their own. On
the toys, where most printed sets diverge, arms have the sets found, and a second arm,
``METHOD-printed``, the printed set where that is another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from upgd.ledger import RunSpec
from upgd.optim.registry import METHODS as REGISTRY
from upgd.paper.found import Found, Sets, read
from upgd.paper.searches import REFERENCE, SEARCHES, learner, printed_set
from upgd.paper.sets import MAIN, METHODS, STATIONARY, TOYS, Set, best, from_paper, printed
from upgd.rl.ppo import DEFAULTS, Settings
from upgd.rl.runs import ITERATIONS, PREFIX
from upgd.streams import get as get_problem

STRIDE = 100
"""One of so many samples is measured; the paper's every sample would cost a tenth of the time."""
HELD_OUT = 250
SHORTEST = 4
"""The fewest windows of a run at any scale; a change over the run needs them."""
ENVIRONMENTS = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "HumanoidStandup")
"""Figure 8 has four that the source does not name; its text names the last two."""
VERSION = "v5"
"""Of the environments; the paper has v4, whose simulators are older than today's MuJoCo."""
AGENT_STEPS = 3_000_000
"""The paper prints no length and speaks of an extended period: three times what CleanRL has."""


@dataclass(frozen=True)
class Arm:
    """One learner of an experiment; `name` is for tables, `title` for legends."""

    name: str
    title: str
    method: str
    hyper: Set
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> Any:
        """Arms with the same one are the same learner."""
        return self.method, tuple(sorted(self.hyper.items())), tuple(sorted(self.options.items()))


@dataclass(frozen=True)
class Experiment:
    """Arms on a problem."""

    name: str  # its name in commands and folders
    problem: str
    arms: tuple[Arm, ...]
    seeds: int
    steps: int = 1_000_000  # samples of each run
    options: Mapping[str, Any] = field(default_factory=dict)  # options of all runs
    awaited: tuple[str, ...] = ()  # names of arms whose sets have not been searched yet

    def specs(self, scale: float = 1.0, seeds: int | None = None) -> dict[str, list[RunSpec]]:
        """The runs by arm; `scale` shortens them to whole windows, `seeds` is the number of seeds.

        Example:
            >>> runs = EXPERIMENTS["input-permuted-mnist"].specs(scale=0.1, seeds=2)
            >>> len(runs), runs["upgd"][0].steps
            (10, 100000)
        """
        count = self.seeds if seeds is None else seeds
        found = {}
        for arm in self.arms:
            steps, options = self.length(scale), {**self.options, **arm.options}
            args = (self.problem, arm.method, arm.hyper)
            found[arm.name] = [RunSpec(*args, seed, steps, options) for seed in range(count)]
        return found

    @property
    def agents(self) -> bool:
        """Whether this is reinforcement learning."""
        return self.problem.startswith(PREFIX)

    def length(self, scale: float) -> int:
        """The samples of a run at this scale: whole windows, at least :data:`SHORTEST`."""
        unit = 1 if self.agents else self.window  # agents round to whole iterations themselves
        return max(self.shortest, round(self.steps * scale / unit) * unit)

    @property
    def shortest(self) -> int:
        """The fewest samples of a run."""
        return SHORTEST * self.window

    @property
    def window(self) -> int:
        """Samples per value of a series."""
        if self.agents:
            return ITERATIONS * Settings().steps
        own = int(self.options.get("window", 0)) or int(self.options.get("task_length", 0))
        return own or get_problem(self.problem).window

    def twins(self) -> dict[str, str]:
        """Arms that are the same learner as an earlier arm, with the name of that."""
        known: dict[Any, str] = {}
        found = {}
        for arm in self.arms:
            first = known.setdefault(arm.identity, arm.name)
            if first != arm.name:
                found[arm.name] = first
        return found


PRINTED = "-printed"
"""Suffix of the arm with the printed set, where another set was found."""
VARIANTS = "variants-"
"""Prefix of experiments on feature-wise and local utilities."""
BEST_SETS = "best-sets-"
"""Prefix of experiments with sets that were found here and differ from the printed ones."""
ABLATION = "ablation-"
"""Prefix of experiments with UPGD-W's components."""
VARIANT_SEEDS = 10


def title(method: str, decay: bool = True) -> str:
    """The paper's name of a method, with weight decay or without."""
    if method == REFERENCE:
        return "Reference"
    if method == "sgdw" and not decay:
        return "SGD"
    known = REGISTRY[method].title
    return known.replace("UPGD", "UPGD-W") if decay and "upgd" in method else known


def _arms(problem: str, name: str, found: Mapping[str, Found], decay: bool = True) -> list[Arm]:
    """Arms with the found and the printed set; one if they are equal, none without a set."""
    method, options = learner(name)
    called, printed, searched = title(name, decay), printed_set(problem, name), found.get(name)
    if searched is None:
        return [] if printed is None else [Arm(name, called, method, printed, options)]
    first = Arm(name, called, method, searched.hyper, options)
    if printed is None or printed == searched.hyper:
        return [first]
    second = f"{called} (printed set)"
    return [first, Arm(f"{name}{PRINTED}", second, method, printed, options)]


def _main(problem: str) -> Experiment:
    arms = tuple(Arm(name, title(name), name, best(problem, name)) for name in METHODS)
    runs = get_problem(problem).runs
    return Experiment(problem, problem, arms, runs, options=_measured(problem))


def _measured(problem: str) -> dict[str, Any]:
    held_out = {"held_out": HELD_OUT} if problem == "label-permuted-emnist" else {}  # Figure 1a
    return {"stride": STRIDE, **held_out}


def _best_sets(problem: str, found: Mapping[str, Found]) -> Experiment:
    """Methods of the main figures whose printed set a search did not find to be best."""
    arms = tuple(
        Arm(name, title(name), name, found[name].hyper)
        for name in METHODS
        if name in found and found[name].hyper != best(problem, name)
    )
    awaited = tuple(name for name in METHODS if name not in found)
    name, runs = f"{BEST_SETS}{problem}", get_problem(problem).runs
    return Experiment(name, problem, arms, runs, options=_measured(problem), awaited=awaited)


def _searched(problem: str, found: Mapping[str, Found]) -> Experiment:
    """Toys and stationary MNIST, where only S&P has weight decay."""
    each = {name: _arms(problem, name, found, decay=False) for name in SEARCHES[problem].arms}
    if REFERENCE in each and REFERENCE not in found:  # SGD's step size until it has been searched
        method, options = learner(REFERENCE)
        hyper = best(problem, method)
        each[REFERENCE] = [Arm(REFERENCE, title(REFERENCE), method, hyper, options)]
    return _experiment(problem, problem, each, 20)


def _variants(problem: str, found: Mapping[str, Found]) -> Experiment:
    """Feature-wise and local utilities, drawn with the main experiments' arms."""
    names = (name for name in SEARCHES[problem].arms if name not in METHODS)
    each = {name: _arms(problem, name, found) for name in names}
    return _experiment(f"{VARIANTS}{problem}", problem, each, VARIANT_SEEDS)


def _experiment(
    name: str, problem: str, each: Mapping[str, Sequence[Arm]], seeds: int
) -> Experiment:
    """All arms whose sets are known."""
    arms = tuple(arm for some in each.values() for arm in some)
    awaited = tuple(name for name, some in each.items() if not some)
    return Experiment(name, problem, arms, seeds, awaited=awaited)


def ablation_arms(problem: str) -> tuple[Arm, ...]:
    """Both ablations' arms on a problem.

    Methods that have a name take their printed set, the others UPGD-W's with a component zeroed:
    SGD has the α that is printed for UPGD-W.
    """
    full = printed(problem, "upgd")

    def without(*names: str) -> Set:
        return from_paper("upgd", {**full, **dict.fromkeys(names, 0.0)})

    plain = {"lr": full["lr"], "weight_decay": 0.0}
    bare = {name: full[name] for name in ("lr", "sigma", "weight_decay")}
    return (
        Arm("sgd", "SGD", "sgdw", plain),
        Arm("sgd+wd", "SGD+WD", "sgdw", best(problem, "sgdw")),
        Arm("sgd+wp", "SGD+WP", "pgd", best(problem, "pgd")),
        Arm("sgd+wd+wp", "SGD+WD+WP", "shrink-and-perturb", best(problem, "shrink-and-perturb")),
        Arm("upgd", "UPGD-W", "upgd", without()),
        Arm("upgd-wd", "UPGD-W−WD", "upgd", without("weight_decay")),
        Arm("upgd-wp", "UPGD-W−WP", "upgd", without("sigma")),
        Arm("upgd-ug", "UPGD-W−UG", "shrink-and-perturb", bare),
        Arm("sgd+ug", "SGD+UG", "upgd", without("weight_decay", "sigma")),
    )


def _figure_1() -> Experiment:
    adam = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.9999, "eps": 1e-8, "weight_decay": 0.0}
    upgd = {"lr": 0.01, "beta_utility": 0.999, "weight_decay": 0.001, "sigma": 0.01}
    arms = (
        Arm("adam", "Adam", "adamw", adam),
        Arm("adam-restarts", "Adam-Restarts", "adamw", adam, {"restart": True}),
        Arm("upgd", "UPGD-W", "upgd", from_paper("upgd", upgd)),
    )
    options = {"task_length": 60_000, "window": 600}
    return Experiment("figure-1", "input-permuted-mnist", arms, 20, 15_000_000, options)


AGENT_RIVALS: Mapping[str, tuple[str, str, Set]] = {
    "adam-99": ("Adam, β = 0.99", "adam", {"beta1": 0.99, "beta2": 0.99}),
    "adam-half": ("Adam, α/2", "adam", {"lr": DEFAULTS["lr"] / 2}),
    "adam+wd": ("AdamW", "adamw", {"weight_decay": 0.01}),
}
"""Further arms of Figure 8, with their titles and sets; the paper has none of them.

Equal β₁ and β₂ are the remedy that others found for Adam's collapse in long training; half of the
step is what AdaUPGD as printed takes where utility is low; decay is half of what AdaUPGD does in
the authors' script, with PyTorch's default."""


def agent_arms(environment: str, rivals: bool = True) -> tuple[Arm, ...]:
    """Adam as CleanRL has it, AdaUPGD twice, and :data:`AGENT_RIVALS`.

    AdaUPGD is as the paper prints it: Adam's α, β₁, β₂ and ε, σ = 0.001, no decay. In the authors'
    script Adam's step size is that of a weight without utility, as it is here, and weights decay.
    """
    trace = 0.9 if environment.startswith("Humanoid") else 0.999

    def arm(key: str, title: str, method: str, hyper: Set) -> Arm:
        spec = RunSpec(f"{PREFIX}{environment}-{VERSION}", method, hyper)
        return Arm(key, title, spec.method, dict(spec.hyper))

    upgd = {"lr": DEFAULTS["lr"], "sigma": 0.001, "beta_utility": trace, "weight_decay": 0.0}
    authors = {**upgd, "weight_decay": 1e-3}
    return (
        arm("adam", "Adam", "adam", {}),
        arm("ada-upgd", "AdaUPGD", "ada-upgd", from_paper("ada-upgd", upgd)),
        arm("ada-upgd-authors", "AdaUPGD, authors' α and λ", "ada-upgd", authors),
        *(arm(key, *row) for key, row in AGENT_RIVALS.items() if rivals),
    )


def agents_name(environment: str, annealed: bool = False) -> str:
    """The name of the experiment on an environment."""
    return f"ppo-{environment.lower()}" + ("-annealed" if annealed else "")


def _figure_8() -> list[Experiment]:
    """Step sizes stay constant, and fall to zero as a variant.

    CleanRL's defaults, which the paper says it took, and the authors' script anneal them over the
    run. Collapse is about agents that keep training without an end, and one whose step size is
    nearly zero can neither fall nor improve. The paper does not say what it did.
    """
    found = []
    for annealed, environment in product((False, True), ENVIRONMENTS):
        name, problem = agents_name(environment, annealed), f"{PREFIX}{environment}-{VERSION}"
        options = {} if annealed else {"anneal": False}
        arms = agent_arms(environment, rivals=not annealed)
        found.append(Experiment(name, problem, arms, 40, AGENT_STEPS, options))
    return found


def declare(found: Sets) -> dict[str, Experiment]:
    """All experiments by name, given the sets that were found."""
    declared = (
        *map(_main, MAIN),
        *(_searched(problem, found.get(problem, {})) for problem in (*TOYS, STATIONARY)),
        *(_variants(problem, found.get(problem, {})) for problem in MAIN),
        *(_best_sets(problem, found.get(problem, {})) for problem in MAIN),
        *(Experiment(f"{ABLATION}{name}", name, ablation_arms(name), 10) for name in MAIN),
        _figure_1(),
        *_figure_8(),
    )
    return {experiment.name: experiment for experiment in declared}


EXPERIMENTS: Mapping[str, Experiment] = declare(read())
"""By name."""
