"""The command line of the laboratory: ``upgd --help``."""

from __future__ import annotations

import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import numpy as np

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:  # the library works without
    raise SystemExit(
        f"upgd: the command line needs {error.name}: pip install 'upgd[lab]'"
    ) from error

import upgd
from upgd import metrics
from upgd.optim.registry import METHODS
from upgd.optim.registry import get as get_method
from upgd.streams import PROBLEMS, DataError, check
from upgd.streams import get as get_problem
from upgd.study import Ledger, Run, RunSpec, StudyError
from upgd.study.work import Progress as RunProgress
from upgd.study.work import Tally, prepare, work

app = typer.Typer(
    help="Run streaming continual-learning studies; a study is a folder, and nothing is lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(), Console(stderr=True)
F = TypeVar("F", bound=Callable[..., Any])


def _mistakes_are_one_line(command: F) -> F:
    """End with exit code 2 and one line where the user's input cannot be served."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (StudyError, DataError, ValueError, FileNotFoundError) as error:
            _fail(str(error))
        except KeyError as error:
            _fail(str(error.args[0]))
        except KeyboardInterrupt:
            err.print("interrupted; 'upgd resume' goes on from here", style="yellow")
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


def _fail(message: str) -> NoReturn:
    err.print(f"upgd: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"upgd {upgd.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Run streaming continual-learning studies."""


# -------------------------------------------------------------------------- commands
@app.command("list")
@_mistakes_are_one_line
def list_(
    what: Annotated[str, typer.Argument(help="problems, methods or all")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show the problems and methods there are."""
    if what not in ("problems", "methods", "all"):
        raise ValueError(f"cannot list {what!r}; there are problems and methods")
    problems = {name: _describe(name) for name in PROBLEMS}
    methods: dict[str, dict[str, Any]] = {
        name: {"title": row.title, "hyper": row.defaults} for name, row in METHODS.items()
    }
    if as_json:
        both = {"problems": problems, "methods": methods}
        print(json.dumps(both if what == "all" else both[what]))
        return
    if what != "methods":
        table = Table(title="Problems")
        table.add_column("problem", no_wrap=True)
        for column in ("data", "network", "task", "steps", "seeds"):
            table.add_column(column)
        for name, facts in problems.items():
            table.add_row(
                name, *(str(facts[k]) for k in ("data", "network", "task", "steps", "seeds"))
            )
        out.print(table)
    if what != "problems":
        table = Table(title="Methods")
        table.add_column("method", no_wrap=True)
        for column in ("in the paper", "hyperparameters"):
            table.add_column(column)
        for name, facts in methods.items():
            hyper = " ".join(f"{k}={v}" for k, v in facts["hyper"].items())
            table.add_row(name, facts["title"], hyper)
        out.print(table)


def _describe(name: str) -> dict[str, Any]:
    problem = PROBLEMS[name]
    network = problem.network if problem.network == "cnn" else "-".join(map(str, problem.network))
    return {
        "data": problem.dataset or "-",
        "network": network,
        "task": problem.task_length,
        "steps": problem.steps,
        "seeds": problem.runs,
    }


@app.command()
@_mistakes_are_one_line
def run(
    problem: Annotated[str, typer.Argument(help="A problem; 'upgd list' shows them.")],
    methods: Annotated[list[str], typer.Argument(help="One or several methods.")],
    seeds: Annotated[str, typer.Option(help="How many, or which: 20, or 3,5, or 0-4.")] = "5",
    steps: Annotated[str, typer.Option(help="Samples per run; default the problem's.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyperparameter: lr=0.01. Repeatable.")
    ] = None,
    study: Annotated[Path | None, typer.Option(help="A folder; default studies/PROBLEM.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where data are looked for first.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    batch: Annotated[int, typer.Option(min=1, help="Samples per update.")] = 1,
    restart: Annotated[bool, typer.Option(help="A fresh learner for every task.")] = False,
    held_out: Annotated[int, typer.Option(min=0, help="Held-out samples after each task.")] = 0,
    stride: Annotated[int, typer.Option(min=0, help="Diagnostics every so many steps.")] = 0,
    window: Annotated[int, typer.Option(min=0, help="Samples per point; default one task.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Say what would be run, and stop.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress, no table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The table for scripts.")] = False,
) -> None:
    """Run methods on a problem; what the study has already is not run again."""
    row = get_problem(problem)
    length = _whole("steps", steps) if steps else row.steps
    options: dict[str, Any] = {"batch": batch} if batch > 1 else {}
    options |= {"restart": True} if restart else {}
    options |= {"held_out": held_out} if held_out else {}
    options |= {"stride": stride} if stride else {}
    options |= {"window": window} if window else {}
    specs = [
        RunSpec(row.name, name, hyper, seed, length, options)
        for name, hyper in _hyper(methods, settings or []).items()
        for seed in _seeds(seeds)
    ]
    if row.dataset is not None:
        check(row.dataset, data_dir)  # a wrong file is found before anything starts
    for spec in {s.method: s for s in specs}.values():
        prepare(spec, data_dir, device)
    folder = study if study is not None else Path("studies") / row.name
    if dry_run:
        known = _known(folder)
        missing = [s for s in specs if s.key not in known]
        out.print(f"{len(missing)} of {len(specs)} runs to do in {folder}: {length} steps each")
        return
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        keys = [spec.key for spec in specs]
        _work(ledger, {"key": keys}, len(specs), data_dir, device, quiet)
        if not quiet:
            _show(ledger, folder, as_json, set(keys))


@app.command()
@_mistakes_are_one_line
def resume(
    study: Annotated[Path, typer.Argument(help="A study's folder.")],
    data_dir: Annotated[Path | None, typer.Option(help="Where data are looked for first.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    quiet: Annotated[bool, typer.Option(help="No progress, no table.")] = False,
) -> None:
    """Finish what a study has begun."""
    with Ledger.open(study, create=False) as ledger:
        counts = ledger.counts()
        _work(ledger, None, counts["pending"] + counts["running"], data_dir, device, quiet)
        if not quiet:
            _show(ledger, study, False)


@app.command()
@_mistakes_are_one_line
def show(
    study: Annotated[Path, typer.Argument(help="A study's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Show a study's results: means over seeds with standard errors and intervals."""
    with Ledger.open(study, create=False, read_only=True) as ledger:
        _show(ledger, study, as_json)


@app.command()
@_mistakes_are_one_line
def plot(
    study: Annotated[Path, typer.Argument(help="A study's folder.")],
    metric: Annotated[str, typer.Option(help="accuracy, loss, plasticity, ...")] = "",
    output: Annotated[Path | None, typer.Option(help="Default STUDY/METRIC.png.")] = None,
) -> None:
    """Draw a metric over time: mean and standard error over seeds, a line per method."""
    with Ledger.open(study, create=False, read_only=True) as ledger:
        groups = _groups(ledger)
        if not groups:
            raise StudyError(f"{study} has no finished run to draw")
        available = sorted(
            {m for runs in groups.values() for r in runs for m in ledger.metrics(r.key)}
        )
        chosen = metric or ("accuracy" if "accuracy" in available else "loss")
        if chosen not in available:
            raise ValueError(f"no metric {chosen!r} in {study}; there are {', '.join(available)}")
        path = output or study / f"{chosen}.png"
        _draw(ledger, groups, chosen, path)
    out.print(f"wrote {path}", highlight=False)


# -------------------------------------------------------------------------- arguments
def _whole(name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= 1 or value != int(value):
        raise ValueError(f"{name} must be a whole number from 1 on, such as 1e6; got {text!r}")
    return int(value)


def _seeds(text: str) -> list[int]:
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part]
        if "-" in text.strip("-"):
            first, last = (int(part) for part in text.split("-"))
            return list(range(first, last + 1))
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"seeds are a number (20), a list (3,5) or a range (0-4); got {text!r}")
    return list(range(count))


def _hyper(methods: list[str], settings: list[str]) -> dict[str, dict[str, float]]:
    """The hyperparameters of each method: those of ``--set`` that it has."""
    given: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            given[name] = float(text)
        except ValueError:
            raise ValueError(f"--set takes name=number, such as lr=0.01; got {setting!r}") from None
        if not equals:
            raise ValueError(f"--set takes name=number, such as lr=0.01; got {setting!r}")
    found: dict[str, dict[str, float]] = {}
    used: set[str] = set()
    for method in methods:
        _, defaults = get_method(method)
        scalars = {k: float(v) for k, v in defaults.items() if k != "betas"}
        if "betas" in defaults:
            scalars["beta1"], scalars["beta2"] = defaults["betas"]
        mine = {k: v for k, v in given.items() if k in scalars}
        used |= mine.keys()
        found[method.lower()] = {**scalars, **mine}
    unused = given.keys() - used
    if unused:
        raise ValueError(
            f"none of {', '.join(methods)} has a hyperparameter {', '.join(sorted(unused))}; "
            "'upgd list methods' shows what they have"
        )
    return found


def _known(folder: Path) -> set[str]:
    if not (folder / "ledger.sqlite").exists():
        return set()
    with Ledger.open(folder, create=False, read_only=True) as ledger:
        return {run.key for run in ledger.runs() if run.state in ("done", "diverged")}


# --------------------------------------------------------------------------- working
def _work(
    ledger: Ledger,
    where: dict[str, Any] | None,
    total: int,
    data_dir: Path | None,
    device: str,
    quiet: bool,
) -> None:
    with _progress(total, quiet) as on_progress:
        tally = work(ledger, data_dir=data_dir, device=device, where=where, on_progress=on_progress)
    _report(tally)


def _report(tally: Tally) -> None:
    if tally.diverged:
        err.print(f"{tally.diverged} runs diverged", style="yellow")
    for line in tally.errors:
        err.print(f"failed: {line}", style="red", markup=False)
    if tally.failed:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[RunProgress], None] | None]:
    """A live line where there is a terminal, else nothing."""
    if quiet or not err.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.0f} steps/s  {task.fields[latest]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting", total=float(total), rate=0.0, latest="")
        finished: dict[str, float] = {}

        def on_progress(progress: RunProgress) -> None:
            spec = progress.spec
            finished[spec.key] = progress.step / spec.steps
            shown = {k: v for k, v in progress.latest.items() if k in ("accuracy", "loss")}
            bar.update(
                task,
                completed=sum(finished.values()),
                description=f"{spec.method} seed {spec.seed}",
                rate=progress.rate,
                latest=" ".join(f"{k} {v:.3f}" for k, v in shown.items()),
            )

        yield on_progress


# --------------------------------------------------------------------------- showing
Group = tuple[str, str, tuple[tuple[str, float], ...], int]


def _groups(ledger: Ledger, keys: set[str] | None = None) -> dict[Group, list[Run]]:
    """Finished runs that differ in their seed alone."""
    groups: dict[Group, list[Run]] = defaultdict(list)
    for found in ledger.runs():
        if found.result is not None and (keys is None or found.key in keys):
            spec = found.spec
            hyper = tuple(spec.hyper.items())
            groups[spec.problem, spec.method, hyper, spec.steps].append(found)
    return groups


def _show(ledger: Ledger, study: Path, as_json: bool, keys: set[str] | None = None) -> None:
    rows = []
    for (problem, method, hyper, steps), runs in _groups(ledger, keys).items():
        done = [r for r in runs if r.state == "done" and r.result is not None]
        metric = (
            "accuracy" if any("accuracy" in r.result.summary for r in done if r.result) else "loss"
        )
        values = [r.result.summary[metric] for r in done if r.result and metric in r.result.summary]
        row: dict[str, Any] = {"problem": problem, "method": method, "steps": steps}
        row |= {"hyper": dict(hyper), "seeds": len(done), "diverged": len(runs) - len(done)}
        if values:
            interval = metrics.bootstrap(values)
            error = float(metrics.standard_error(values)) if len(values) > 1 else float("nan")
            row |= {"metric": metric, "mean": float(np.mean(values)), "standard_error": error}
            row |= {"iqm": interval.estimate, "low": interval.low, "high": interval.high}
        rows.append(row)
    counts = ledger.counts()
    if as_json:
        print(json.dumps({"study": str(study), "counts": counts, "results": rows}))
        return
    table = Table("method", "steps", "seeds", "metric", "mean ± s.e.", "IQM [95%]")
    table.title = ", ".join(dict.fromkeys(row["problem"] for row in rows)) or str(study)
    for row in rows:
        seeds = str(row["seeds"]) + (f" (+{row['diverged']} diverged)" if row["diverged"] else "")
        cells = ["-", "-", "-"]
        if "metric" in row:
            cells = [
                row["metric"],
                f"{row['mean']:.4f} ± {row['standard_error']:.4f}",
                f"{row['iqm']:.4f} [{row['low']:.4f}, {row['high']:.4f}]",
            ]
        table.add_row(row["method"], str(row["steps"]), seeds, *cells)
    out.print(table)
    left = {state: count for state, count in counts.items() if count and state != "done"}
    if left:
        out.print(", ".join(f"{count} {state}" for state, count in left.items()))


def _draw(ledger: Ledger, groups: dict[Group, list[Run]], metric: str, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise StudyError("figures need matplotlib: pip install 'upgd[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for (_, method, _, _), runs in groups.items():
        with_metric = [r for r in runs if r.state == "done" and metric in ledger.metrics(r.key)]
        if not with_metric:
            continue
        values = np.stack([ledger.series(r.key, metric) for r in with_metric])
        window = ledger.metrics(with_metric[0].key)[metric]
        x = window * (np.arange(values.shape[1]) + 1)
        mean = np.nanmean(values, 0)
        (line,) = axes.plot(x, mean, label=f"{method} ({len(with_metric)} seeds)")
        if len(with_metric) > 1:
            error = metrics.standard_error(values)
            axes.fill_between(x, mean - error, mean + error, alpha=0.25, color=line.get_color())
    axes.set(xlabel="Samples", ylabel=metric.replace("_", " ").capitalize())
    axes.set_title(next(iter(groups))[0])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """The ``upgd`` command."""
    app()


if __name__ == "__main__":
    sys.exit(app())
