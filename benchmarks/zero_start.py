"""S-SI and S-RWalk as the authors' code starts them, beside the paper's: does it matter?

    python benchmarks/zero_start.py [--device cuda] [--study studies/zero_start]

Both take Δ, the weights before the last step minus those now. At the first step there were none.
Here Δ is then 0; the authors' code starts the earlier weights at zero, so that Δ = -w, and a trace
with β_I = 0.9999 keeps that for ten thousand steps. The paper's sets were tuned on that code.

The variants are rules of one's own, run with the printed sets and five seeds; the others' runs are
read from docs/results, with all their seeds: the same samples and first weights soon make as
different runs as others do, so that nothing is paired. Only what the study lacks is run.
docs/benchmarks/zero_start.md is the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.stats import ttest_ind

from upgd import lab
from upgd.ledger import RunSpec
from upgd.optim.consolidation import RWALK_METHOD, SI_METHOD
from upgd.paper.experiments import title
from upgd.paper.pages import heading
from upgd.paper.results import TABLE, Array, folder_name, read
from upgd.paper.sets import MAIN, best
from upgd.rules.vocabulary import Method

DOCS = Path(__file__).parents[1] / "docs"
SEEDS = 5
STEPS = 1_000_000
PARTS = {"first 20 tasks": slice(0, 20), "last 20 tasks": slice(-20, None), "all": slice(None)}


PAGE = """# Earlier weights that start at zero

`python benchmarks/zero_start.py`, variants on {where}, {steps} samples, printed sets. *Here*:
Δ = 0 at the first step, as in the paper's text. *Their start*: Δ = -w, as in the authors' code.
Online accuracy in percent of runs that did not diverge; differences with Welch's 95% intervals.

| problem | method | part of the run | here | their start | difference | seeds |
|---|---|---|---:|---:|---:|---:|
{rows}
"""


def from_zero(name: str, method: Method) -> str:
    """Register the method with all states starting at zero; returns its name."""
    [phase] = method.phases
    lab.method(
        f"{name}-from-zero",
        phase.fn,
        states=list(method.states),
        decays=dict(method.decays),
        power=method.power,
        lr=0.01,
        kappa=0.1,
        beta_importance=0.99,
        beta_weight=0.999,
    )
    return f"{name}-from-zero"


VARIANTS = {"s-si": from_zero("s-si", SI_METHOD), "s-rwalk": from_zero("s-rwalk", RWALK_METHOD)}


def run(
    problems: list[str], folders: list[Path], device: str, data: str | None
) -> tuple[list[str], set[str]]:
    """Table rows, with both accuracies and their paired difference; and where variants ran."""
    rows, where = [], set()
    studies = [lab.Study(folder, device=device, data_dir=data) for folder in folders]
    for problem in problems:
        specs = {
            name: [RunSpec(problem, other, best(problem, name), s, STEPS) for s in range(SEEDS)]
            for name, other in VARIANTS.items()
        }
        every = [spec for some in specs.values() for spec in some]
        finished = (study for study in studies if study.exists() and not study.missing(every))
        study = next(finished, studies[0])
        study.run_specs(every)
        ours = read(DOCS / "results" / folder_name(problem) / TABLE, problem)
        with study.read() as ledger:
            for name, some in specs.items():
                theirs = {s.seed: ledger.series(s.key, "accuracy") for s in some}
                rows += compared(problem, name, ours.of(name, "accuracy"), theirs)
            keys = {spec.key for spec in every}
            where |= {run.result.device for run in ledger.runs() if run.key in keys and run.result}
    return rows, where


Curves = Mapping[int, Array]
"""Accuracies of tasks by seed."""


def compared(problem: str, name: str, ours: Curves, theirs: Curves) -> list[str]:
    """A row per part of the run."""
    rows = []
    for part, where in PARTS.items():
        a, b = (100 * np.array([x[where].mean() for x in some.values()]) for some in (ours, theirs))
        low, high = ttest_ind(b, a, equal_var=False).confidence_interval()
        rows.append(
            f"| {heading(problem)} | {title(name)} | {part} | {a.mean():.2f} | {b.mean():.2f} | "
            f"{b.mean() - a.mean():+.2f} [{low:+.2f}, {high:+.2f}] | {len(a)}, {len(b)} |"
        )
    return rows


def main() -> None:
    """The page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir")
    parser.add_argument("--study", type=Path, nargs="+", default=[Path("studies/zero_start")])
    parser.add_argument("--problems", nargs="*", default=list(MAIN), choices=MAIN)
    parser.add_argument("--output", type=Path, default=DOCS / "benchmarks" / "zero_start.md")
    args = parser.parse_args()
    rows, where = run(args.problems, args.study, args.device, args.data_dir)
    steps = f"{STEPS:,}".replace(",", " ")
    text = PAGE.format(where=", ".join(sorted(where)), rows="\n".join(rows), steps=steps)
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
