"""Optimizers compared on a user's module and data: fair runs, true sentences, clear mistakes."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from upgd import UPGD, lab
from upgd.cli import app
from upgd.lab import comparing, training
from upgd.lab.comparison import Comparison, Pair, Run
from upgd.lab.training import POINTS, Outcome, make_task
from upgd.streams.custom import as_arrays

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > X[:, 1]).astype("int64")
QUICK: dict[str, Any] = {"seeds": 2, "steps": 7, "factors": [1, 3], "quiet": True}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))


def own_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, weight_decay=0.01)


# -------------------------------------------------------------------------------- fairness
def plain_run(make: Any, seed: int, stream: bool, steps: int, batch: int) -> dict[str, float]:
    """Training as one would write it: the first 40 samples to learn from, the others held out."""
    torch.manual_seed(seed)
    model = network()
    opt = make(model.parameters())
    torch.manual_seed(seed)
    if stream:
        order = [i % 40 for i in range(steps * batch)]
    else:
        draw = torch.Generator().manual_seed(seed)
        order = [int(i) for _ in range(steps) for i in torch.randperm(40, generator=draw)]
    losses, right = [], 0
    for step in range(steps):
        chosen = order[step * batch : (step + 1) * batch]
        x, y = torch.tensor(X[chosen]), torch.tensor(Y[chosen])
        output = model(x)
        loss = functional.cross_entropy(output, y)
        losses.append(loss.item())
        right += int((output.argmax(1) == y).sum())
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    output, y = model(torch.tensor(X[40:])), torch.tensor(Y[40:])
    return {
        "online loss": float(np.mean(losses)),
        "online accuracy": right / (steps * batch),
        "held-out loss": functional.cross_entropy(output, y).item(),
        "held-out accuracy": float((output.argmax(1) == y).float().mean()),
    }


@pytest.mark.parametrize("stream", [False, True])
def test_every_optimizer_has_the_same_weights_and_batches(stream: bool) -> None:
    before = torch.get_rng_state()
    found = lab.compare(
        network, (X[:40], Y[:40]), held_out=(X[40:], Y[40:]), optimizer=own_sgd, batch=9,
        stream=stream, settings={"sigma": 0.02}, **{**QUICK, "steps": 11},
    )  # fmt: skip
    assert torch.equal(before, torch.get_rng_state())
    checked = 0
    for run in found.runs:
        if run.optimizer == "SGD":
            make = lambda p, lr=run.lr: torch.optim.SGD(p, lr=lr, weight_decay=0.01)  # noqa: E731
        elif run.optimizer == "UPGD":
            make = lambda p, lr=run.lr: UPGD(p, lr=lr, weight_decay=0.01, sigma=0.02)  # noqa: E731
        else:
            continue
        scores = plain_run(make, run.seed, stream, steps=11, batch=9)
        for metric in found.metrics:
            assert run.outcome.scores[metric] == pytest.approx(scores[metric], abs=1e-6), metric
        assert np.nanmean(run.outcome.curve) == pytest.approx(scores["online loss"], abs=1e-6)
        checked += 1
    assert checked == 8
    assert found.metrics[0] == ("online accuracy" if stream else "held-out accuracy")


@pytest.mark.parametrize(
    ("factory", "partner"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.1), "UPGD, momentum"),
        (lambda p: UPGD(p, lr=0.2), "UPGD"),
        (lambda p: torch.optim.AdamW(p, lr=0.2, weight_decay=0.1, betas=(0.8, 0.9)), "AdaUPGD"),
        (lambda p: torch.optim.RMSprop(p, lr=0.2), "AdaUPGD"),
        (lambda p: torch.optim.Adagrad(p, lr=0.2), "AdaUPGD"),
    ],
    ids=["sgd", "upgd", "adamw", "rmsprop", "adagrad"],
)
def test_ours_take_over_what_both_have(factory: Any, partner: str) -> None:
    """Step size, groups and shared hyperparameters come from the optimizer of the same kind."""

    def grouped(params: list[Any]) -> torch.optim.Optimizer:
        return factory([{"params": params[:1], "lr": 0.4}, {"params": params[1:]}])  # type: ignore[no-any-return]

    task = make_task(network, (X, Y))
    [[theirs, ours], [alone]] = comparing._families(task, grouped, {})
    model = network()
    mine, other = ours.make(0.5, model).param_groups, theirs.make(0.5, model).param_groups
    assert (ours.name, ours.lr) == (partner, 0.4)
    assert theirs.name.removeprefix("your ") == type(theirs.make(1, model)).__name__
    assert [group["lr"] for group in mine] == [group["lr"] for group in other] == [0.2, 0.1]
    for one, two in zip(mine, other, strict=True):
        assert [id(p) for p in one["params"]] == [id(p) for p in two["params"]]
        both = {"weight_decay", "betas", "eps", "momentum"} & one.keys() & two.keys()
        assert all(one[name] == two[name] for name in both)
    [group] = alone.make(1.0, model).param_groups
    fresh = type(alone.make(1.0, model))(network().parameters()).param_groups[0]
    assert {k: v for k, v in group.items() if k not in ("params", "seed")} == {
        k: v for k, v in fresh.items() if k not in ("params", "seed")
    }


@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (48, 2)])
def test_small_models_have_one_thread(
    batch: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """44 weights, 48 samples to learn from; the number of threads is restored."""
    seen: set[int] = set()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.add(torch.get_num_threads())
        return functional.cross_entropy(output, y)

    monkeypatch.setattr(training, "SMALL", 1000)
    task = make_task(network, (X, Y), loss=loss, batch=batch, steps=2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen.clear()
        training.train(task, lambda model: own_sgd(model.parameters()), seed=0)
        assert seen == {threads}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_all_kinds_of_data_are_the_same() -> None:
    tensors = (torch.tensor(X), torch.tensor(Y))
    data = TensorDataset(*tensors)
    kinds = [(X, Y), tensors, data, DataLoader(data, 7, shuffle=True), DataLoader(data, None)]
    for kind in kinds:
        x, y = as_arrays(kind)
        assert np.array_equal(x, X)
        assert np.array_equal(y, Y)


def test_sequences_of_tokens() -> None:
    """Whole numbers stay so, and classes may be the last dimension or the second."""
    tokens = RNG.integers(5, size=(40, 6))
    last = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x).movedim(-1, 1)  # type: ignore[no-any-return]

    one, two = (lab.compare(m, (tokens, tokens), **QUICK) for m in (last, Second()))
    assert [run.outcome.scores for run in one.runs] == [run.outcome.scores for run in two.runs]
    assert one.metrics == ("held-out accuracy", "held-out loss", "online loss")


# -------------------------------------------------------------------------------- sentences
def outcome(**scores: float) -> Outcome:
    named = {
        name.replace("_", " ").replace("held out", "held-out"): v for name, v in scores.items()
    }
    return Outcome(named, np.linspace(2, 1, POINTS), 1e-3, None)


DIVERGED = Outcome({}, np.full(POINTS, np.nan), 1e-3, 4)


def made(metric: str, values: dict[tuple[str, float], list[float]]) -> Comparison:
    runs = [
        Run(name, lr, seed, outcome(**{metric: v}) if math.isfinite(v) else DIVERGED)
        for (name, lr), several in values.items()
        for seed, v in enumerate(several)
    ]
    shown = metric.replace("_", " ").replace("held out", "held-out")
    return Comparison(runs, [Pair("UPGD", "SGD", 0.1)], [shown], 100)


def test_the_verdict_in_points() -> None:
    """Leads 2, 2 and 3 points: mean 7/3, standard error 1/3; Student's factor is 4.303."""
    best = {("SGD", 0.1): [0.88, 0.90, 0.91], ("UPGD", 0.3): [0.90, 0.92, 0.94]}
    others = {("SGD", 0.3): [0.5] * 3, ("UPGD", 0.1): [0.89, 0.89, 0.92]}
    more = {(name, lr): [0.1] * 3 for name in ("SGD", "UPGD") for lr in (0.01, 1.0)}
    found = made("held_out_accuracy", {**best, **others, **more})
    assert found.best == {"SGD": 0.1, "UPGD": 0.3}
    # At 0.1 the leads are 1, -1 and 1 points: mean 1/3, standard error 2/3.
    assert found.verdict == [
        "UPGD at lr 0.3 is ahead of SGD at lr 0.1 by 2.3 ± 1.4 points of held-out accuracy; "
        "with both at lr 0.1, ahead of it by 0.3 ± 2.9 (not clear from 3 seeds)."
    ]
    row = next(row for row in found.rows if row["optimizer"] == "UPGD" and row["lr"] == 0.3)
    assert row["held-out accuracy"] == pytest.approx(
        (0.92, 4.302652729911275 * 0.02 / math.sqrt(3))
    )


def test_the_verdict_of_losses_and_of_one_seed() -> None:
    """Of losses the smaller is better; two seeds have no interval."""
    pair = {("SGD", 0.1): [0.50, 0.58], ("UPGD", 0.1): [0.52, 0.62]}
    [text] = made("online_loss", pair).verdict
    both = "behind SGD at lr 0.1 by 0.03 in online loss (not clear from 2 seeds)"
    assert both in text
    [text] = made("online_loss", {key: values[:1] for key, values in pair.items()}).verdict
    assert "by 0.02 in online loss (one seed: an example, not evidence)" in text
    [text] = made("online_loss", {key: [1.0, 2.0] for key in pair}).verdict
    assert text == "UPGD at lr 0.1 is level with SGD at lr 0.1."


def test_a_step_size_that_diverges_is_never_best() -> None:
    values = {("SGD", 0.1): [0.5, 0.5], ("UPGD", 0.1): [0.6, 0.6], ("UPGD", 0.3): [0.9, math.nan]}
    found = made("held_out_accuracy", values)
    assert found.best["UPGD"] == 0.1
    assert "diverged (1 of 2 seeds)" in str(found)
    nowhere = made("held_out_accuracy", {**values, ("SGD", 0.1): [math.nan] * 2})
    assert nowhere.verdict[0].startswith("SGD diverged at every step size")


def test_a_diverging_optimizer_is_reported(tmp_path: Path) -> None:
    wild = {"wild": lambda p: torch.optim.SGD(p, lr=1e30)}
    found = lab.compare(network, (X, Y), optimizer=wild, **{**QUICK, "factors": [1]})
    assert "wild" not in found.best
    assert "diverged (2 of 2 seeds)" in str(found)
    assert "wild diverged at every step size" in str(found)
    assert "AdaUPGD" in found.best
    assert found.plot(tmp_path / "figure.svg").path.stat().st_size > 0


def test_the_grid_grows_where_the_best_is_at_its_end() -> None:
    """A linear problem: the larger the step the better, up to the largest that is tried."""
    x, y = X, (X @ np.array([1.0, 2.0, 3.0, 4.0], "float32"))
    slow = lambda p: torch.optim.SGD(p, lr=1e-5)  # noqa: E731
    found = lab.compare((), (x, y), optimizer=slow, seeds=1, steps=20, quiet=True)
    for name in ("SGD", "UPGD"):
        tried = [run.lr for run in found.runs if run.optimizer == name]
        assert tried == pytest.approx([1e-5 * 3.0**k for k in range(-1, 5)])
        assert found.best[name] == max(tried)
        assert f"The best lr of {name} is the largest that was tried." in found.verdict


# ------------------------------------------------------------------------- the command line
FILE = """
    import numpy as np, torch
    from torch import nn

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype("float32")

    def model():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def data():
        return x, (x[:, 0] > x[:, 1]).astype("int64")

    def optimizer(params):
        return torch.optim.AdamW(params, lr=0.01)
"""


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *(str(each) for each in arguments)])


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


def without_times(text: str) -> list[list[str]]:
    """The words of a table and its verdict; the last column of the table is a time."""
    lines = text.strip().splitlines()
    end = lines.index("")
    return [line.split()[:-1] for line in lines[:end]] + [line.split() for line in lines[end:]]


def test_the_command_and_python_give_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, FILE)
    flags = ("--steps", 7, "--seeds", 2, "--factors", "1,3", "--set", "sigma=0.01")
    done = call(path, *flags)
    assert done.exit_code == 0, done.output
    *table, last = done.stdout.splitlines()
    assert last == "wrote compare.png"
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    found = lab.compare(**comparing.from_file(path), settings={"sigma": 0.01}, **QUICK)
    assert without_times("\n".join(table)) == without_times(str(found))
    facts = json.loads(call(path, *flags, "--json").stdout)  # its own figure may be replaced
    assert facts["verdict"] == found.verdict
    assert [row["lr"] for row in facts["results"]] == [row["lr"] for row in found.rows]


def test_a_file_of_arrays_needs_no_python(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x=X[:40], y=Y[:40], x_test=X[40:], y_test=Y[40:])
    flags = ("--steps", 7, "--seeds", 2, "--factors", "1,3", "--output", tmp_path / "a.png")
    done = call(path, "--hidden", "6", *flags)
    assert done.exit_code == 0, done.output
    found = lab.compare([6], (X[:40], Y[:40]), held_out=(X[40:], Y[40:]), **QUICK)
    same = without_times(done.stdout.rpartition("\nwrote")[0])
    assert same == without_times(str(found))


CASES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "no model": ("data = ([[1.0]], [0])", "has no model", ()),
    "no data": ("def model(): pass", "defines no data; it may define model, data", ()),
    "not a module": ("def model(): return 1", "network 'model' is a int, not a nn.Module", ()),
    "no function": ("model = 'mlp'", "the model is a str", ()),
    "an error in data": ("def data(): return 1 / 0", "ZeroDivisionError: division by zero", ()),
    "an error": ("import nothing_here", "ModuleNotFoundError", ()),
    "text": ("def data(): return x, ['a'] * 60", "data: y holds strings, numbers expected", ()),
    "lengths": ("def data(): return x, x[:9]", "a row of each per sample expected", ()),
    "not finite": ("def data(): return x * np.inf, x", "data: x is not finite in row 0", ()),
    "labels": (
        "loss = 'cross_entropy'\ndef data(): return x, np.full(60, 0.5)",
        "data: y is 0.5 in row 0; classes from 0 on expected",
        (),
    ),
    "inputs": ("def data(): return x[:, :3], x[:, 0]", "mat1 and mat2 shapes cannot be", ()),
    "too few outputs": (
        "def data(): return x, np.arange(60)",
        "it has 2 outputs, and classes go up to 59",
        (),
    ),
    "targets": ("def data(): return x, x[:, 0]", "its outputs have shape (32, 2)", ()),
    "held-out data": ("held_out = (x[:, :2], np.zeros(60, int))", "a held-out sample has", ()),
    "a loss": ("loss = 'hinge'", "loss is cross_entropy or squared_error or a function", ()),
    "no loss": ("def loss(a, b): return 1.0", "the loss is not one number that depends", ()),
    "an optimizer": ("def optimizer(params): return 1", "made a int, not a torch.optim", ()),
    "a closure": ("optimizer = torch.optim.LBFGS", "wants a closure", ()),
    "an optimizer of another model": (
        "other = model()\ndef optimizer(params): return torch.optim.SGD(other.parameters())",
        "it updates other parameters than it was given",
        (),
    ),
    "no step": ("def optimizer(p): return torch.optim.SGD(p, lr=0.0)", "step size lr=0", ()),
    "a model and hidden": ("", "defines a model; leave --hidden out", ("--hidden", "4")),
    "a share": ("", "held_out=1.5 of 60 samples", ("--held-out", "1.5")),
    "a stream's share": ("", "a stream is judged online", ("--stream", "--held-out", "0.1")),
    "a batch": ("", "a batch of 49 is more than the 48 samples", ("--batch", "49")),
    "factors": ("", "factors are positive numbers", ("--factors", "-1")),
    "no factors": ("", "factors are numbers, such as", ("--factors", "many")),
    "a setting": ("", "no hyperparameter 'lr' to set", ("--set", "lr=0.1")),
    "a value": ("", "sigma", ("--set", "sigma=-1")),
    "a device": ("", "cannot run on device 'abacus'", ("--device", "abacus")),
    "a format": ("", "no figure ends in .mp3", ("--output", "figure.mp3")),
}


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_one_line_and_leave_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message, flags = CASES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    usual = "" if name in ("no model", "no data") else textwrap.dedent(FILE)
    path = written(tmp_path, f"{usual}\n{text}\n")
    done = call(path, "--steps", "3", *flags)
    assert done.exit_code == 2, done.output
    [line] = done.stderr.splitlines()
    assert line.startswith("upgd: ")
    assert message in line
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["nothing.py", "nothing.npz", "nothing.csv", "empty.npz"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "empty.npz", z=X)
    done = call(tmp_path / name, "--hidden", "4", "--output", tmp_path / "a.png")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "a.png").exists()


def test_a_figure_that_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("compare.png").write_bytes(b"mine")
    assert "was not made by upgd" in call(written(tmp_path, FILE)).stderr
    assert Path("compare.png").read_bytes() == b"mine"
