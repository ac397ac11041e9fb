"""``upgd report``: its page in a real browser shows what the ledger has, and runs nothing else."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("plotly")
from typer.testing import CliRunner

from tests.waiting import PATIENCE, wait_for
from upgd import pages
from upgd.cli import app
from upgd.ledger import Ledger, Result, RunSpec, Series
from upgd.metrics import mean_interval
from upgd.pages import colours
from upgd.paper.experiments import EXPERIMENTS
from upgd.report import html, sections, sets
from upgd.report.figures import Curve, draw_curves

EVIL = '</script><img src=x onerror="window.hacked = 1"><b>%{y}</b>'
WINDOW, WINDOWS, SEEDS = 100, 12, 3
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")


def curve(spec: RunSpec) -> Any:
    rng = np.random.default_rng([spec.seed, len(spec.method)])
    return np.linspace(0.3, 0.8, WINDOWS) + rng.normal(0, 0.02, WINDOWS)


def fill(folder: Path, specs: list[RunSpec], windows: int = WINDOWS) -> None:
    """Runs with series of their own; the second of `EVIL` failed and the third diverged."""
    with Ledger.open(folder) as ledger:
        ledger.add(specs)
        for claim in ledger.claim("me", 60, limit=len(specs)):
            spec = claim.spec
            if spec.method == EVIL and spec.seed == 1:
                ledger.fail(claim, f"RuntimeError: {EVIL}", retry=False)
                continue
            if spec.method == EVIL and spec.seed == 2:
                ledger.finish(claim, Result("eager", diverged_at=77))
                continue
            values = np.resize(curve(spec), windows)
            gaps = np.where(np.arange(windows) % 5 == 2, np.nan, values)
            series = {
                "accuracy": Series(values, WINDOW),
                "loss": Series(1 / values, WINDOW),
                "weight_l2": Series(gaps, WINDOW),
            }
            summary = {"accuracy": float(values.mean())}
            versions = {"upgd": f"1 {EVIL}"}
            ledger.finish(claim, Result("eager", series=series, summary=summary, versions=versions))


def specs(*methods: str, problem: str = "my-stream", steps: int = 1200) -> list[RunSpec]:
    return [RunSpec(problem, m, {"lr": 0.1}, s, steps) for m in methods for s in range(SEEDS)]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    fill(folder, specs("upgd", "sgd", EVIL) + specs("adam", problem=f"other {EVIL}", steps=2400))
    result = call("report", folder)
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    return folder


# ------------------------------------------------------------------------------- browser
class Opened:
    """A page, with what it asked for and complained about."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.page = browser.new_page(color_scheme="light")
        self.page.set_default_timeout(1000 * PATIENCE)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.until("document.querySelector('.plot').data")

    def until(self, condition: str) -> None:
        """Wait for something; the page's policy keeps the driver's own way of waiting out."""
        wait_for(lambda: self.page.evaluate(f"Boolean({condition})"))

    def traces(self, number: int = 0) -> list[dict[str, Any]]:
        """The traces of a figure as plotly has them."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """number => document.querySelectorAll('.plot')[number].data.map(t => ({
                kind: t.meta.kind, arm: t.meta.arm, told: t.meta.told, visible: t.visible,
                x: Array.from(t.x), y: Array.from(t.y, v => Number.isFinite(v) ? v : null)}))""",
            number,
        )
        return found

    def drawn(self) -> set[tuple[str, int]]:
        """Kinds of lines, and of which arms, that the first section's figures show."""
        each = [{(t["kind"], t["arm"]) for t in self.traces(n) if t["visible"]} for n in (0, 1)]
        assert each[0] == each[1]
        count = "document.querySelector('.plot').querySelectorAll('.scatterlayer .trace').length"
        self.until(f"{count} === {sum(bool(t['visible']) for t in self.traces())}")
        return each[0]

    def open_all(self, is_open: bool) -> None:
        """Open, or close, all parts that can be closed."""
        self.page.evaluate(
            "is => document.querySelectorAll('details').forEach(d => { d.open = is; })", is_open
        )
        if is_open:
            self.until("[...document.querySelectorAll('.plot')].every(plot => plot.data)")


@pytest.fixture(scope="module")
def page(study: Path) -> Iterator[Opened]:
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=1000 * PATIENCE
        )
        yield Opened(browser, study / "report.html")
        browser.close()


@pytest.fixture
def opened(page: Opened) -> Iterator[Opened]:
    """The page as it was at first; whatever is done with it, it does not complain."""
    yield page
    assert page.complaints == []
    assert [url.split(":")[0] for url in page.requests] == ["file"]
    assert page.page.evaluate("window.hacked") is None
    page.page.evaluate(
        """() => { document.activeElement.blur(); window.getSelection().empty();
            document.querySelectorAll('button[data-arm][aria-pressed=false]').forEach(
                button => button.click()); }"""
    )
    page.open_all(False)


def by_seed(study: Path, method: str, metric: str) -> dict[int, Any]:
    with Ledger.open(study, create=False) as ledger:
        done = ledger.runs(method=method, state="done")
        return {run.spec.seed: ledger.series(run.key, metric) for run in done}


@in_browser
def test_figures_hold_the_ledgers_numbers(opened: Opened, study: Path) -> None:
    opened.open_all(True)
    for number, metric in enumerate(("accuracy", "loss", "weight_l2")):
        found = opened.traces(number)
        for arm, method in enumerate(("upgd", "sgd", EVIL)):
            kept = by_seed(study, method, metric)
            means = [t for t in found if (t["kind"], t["arm"]) == ("mean", arm)]
            assert len(means) == 1
            assert means[0]["x"] == [WINDOW * (k + 1) for k in range(WINDOWS)]
            stacked = np.stack(list(kept.values()))
            expected = np.where(np.isnan(stacked[0]), np.nan, stacked.mean(0, dtype=float))
            np.testing.assert_allclose(np.array(means[0]["y"], float), expected, rtol=1e-12)
            seeds = {t["told"]: t["y"] for t in found if (t["kind"], t["arm"]) == ("seed", arm)}
            exact = {
                f"seed {seed}": [None if np.isnan(v) else float(v) for v in values]
                for seed, values in kept.items()
            }
            assert seeds == (exact if len(kept) > 1 else {})
    other = [t for t in opened.traces(3) if t["kind"] == "seed"]
    kept = by_seed(study, "adam", "accuracy")
    assert [t["y"] for t in other] == [kept[s].tolist() for s in range(SEEDS)]


@in_browser
def test_tables_hold_the_ledgers_numbers(opened: Opened, study: Path) -> None:
    rows = opened.page.evaluate(
        """[...document.querySelector('table').rows].slice(1).map(
            row => [...row.cells].map(cell => cell.textContent))"""
    )
    assert [row[0] for row in rows] == ["upgd", "sgd", EVIL]
    assert [row[-1] for row in rows] == ["3 done", "3 done", "1 done, 1 diverged, 1 failed"]
    for method, row in zip(("upgd", "sgd"), rows, strict=False):
        values = np.stack(list(by_seed(study, method, "accuracy").values())).astype(float)
        over = values.mean(1)
        late, early = values[:, 9:].mean(1), values[:, 3:6].mean(1)
        change = mean_interval(late - early)
        shown = [float(x) for x in re.findall(r"\d+\.\d+", row[1])]
        np.testing.assert_allclose(shown, mean_interval(over), atol=5.1e-5)
        assert row[2] == f"{late.mean():.4f}"
        told = [float(x.replace("−", "-")) for x in re.findall(r"[+−]?\d+\.\d+", row[3])]
        np.testing.assert_allclose(told, change, atol=5.1e-5)
    failures = opened.page.inner_text("section:has-text('What went wrong') table")
    assert f"RuntimeError: {EVIL}" in failures
    assert "not finite at step 77" in failures


@in_browser
def test_buttons_show_and_hide_lines(opened: Opened) -> None:
    everything = {("band", 0), ("band", 1), ("mean", 0), ("mean", 1), ("mean", 2)}
    assert opened.drawn() == everything
    first = opened.page.locator("button[data-arm='0']").first
    assert first.text_content() == "upgd"
    first.click()
    assert first.get_attribute("aria-pressed") == "false"
    assert opened.drawn() == {(kind, arm) for kind, arm in everything if arm}
    seeds = opened.page.locator("button.seeds").first
    seeds.click()
    assert opened.drawn() == {*((k, a) for k, a in everything if a), ("seed", 1)}
    first.click()
    assert opened.drawn() == {*everything, ("seed", 0), ("seed", 1)}
    seeds.click()
    assert opened.drawn() == everything
    offered = "[...document.querySelectorAll('.plot')[0].querySelectorAll('.modebar-btn')]"
    titles = opened.page.evaluate(f"{offered}.map(button => button.dataset.title)")
    assert len(titles) == 6  # to zoom, move and save; none that leads out of the page
    assert not any(re.search("cloud|share|link|edit", title, re.I) for title in titles)
    others = opened.traces(3)  # in another section
    assert others[0]["kind"] == "band"
    assert all(t["visible"] == (t["kind"] != "seed") for t in others)


@in_browser
def test_keys_reach_buttons_and_figures(opened: Opened) -> None:
    page = opened.page
    page.evaluate("document.body.tabIndex = -1; document.body.focus()")  # where one begins
    steps = []
    for _ in range(3):
        page.keyboard.press("Tab")
        steps.append(page.evaluate("document.activeElement.textContent"))
    assert steps[:2] == ["Skip to the results", "Dark colours"]
    while page.evaluate("document.activeElement.tagName") == "A":  # links to sections
        page.keyboard.press("Tab")
    ends = [
        (t["y"][-1], t["arm"]) for t in opened.traces() if t["kind"] == "mean"
    ]  # lines are named in the order in which they end
    first = max(ends)[1]
    assert page.evaluate("+document.activeElement.dataset.arm") == first
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Space")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert ("mean", first) not in opened.drawn()
    while not page.evaluate("document.activeElement.classList.contains('plot')"):
        page.keyboard.press("Tab")

    def seen() -> Any:
        return page.evaluate("document.querySelector('.plot')._fullLayout.xaxis.range")

    low, high = before = seen()
    page.keyboard.press("+")
    wait_for(lambda: np.ptp(seen()) == pytest.approx((high - low) / 2))
    page.keyboard.press("0")
    wait_for(lambda: seen() == before)


@in_browser
def test_hovering_tells_method_seed_sample_and_value(opened: Opened, study: Path) -> None:
    opened.page.locator("button[data-arm='0']").first.click()
    opened.page.locator("button[data-arm='1']").first.click()  # the evil one is left
    assert opened.drawn() == {("mean", 2)}
    place = opened.page.evaluate(
        """() => { const plot = document.querySelector('.plot');
            plot.scrollIntoView({ block: 'center' });
            const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
            const trace = plot.data.find(t => t.visible && t.meta.kind === 'mean');
            return [box.x + xaxis._offset + xaxis.d2p(trace.x[4]),
                    box.y + yaxis._offset + yaxis.d2p(trace.y[4])]; }"""
    )

    def is_told() -> bool:
        opened.page.mouse.move(place[0] - 3, place[1])
        opened.page.mouse.move(*place)
        return bool(opened.page.locator(".hoverlayer .hovertext").count())

    wait_for(is_told)
    told = opened.page.text_content(".hoverlayer .hovertext")
    value = by_seed(study, EVIL, "accuracy")[0][4]
    assert EVIL in told
    assert "seed 0" in told
    assert f"sample {5 * WINDOW}" in told
    assert f"accuracy {value:.5g}" in told


@in_browser
def test_light_and_dark(opened: Opened) -> None:
    def seen() -> list[str]:
        return [
            opened.page.evaluate(value)
            for value in (
                "getComputedStyle(document.body).backgroundColor",
                "document.querySelector('.plot .xtick text').style.fill",
                "document.querySelector('.plot').data.find(t => t.meta.kind === 'mean').line.color",
                "document.querySelector('#theme').textContent",
            )
        ]

    light = seen()
    opened.page.emulate_media(color_scheme="dark")
    wait_for(lambda: all(a != b for a, b in zip(light, seen(), strict=True)))
    dark = seen()
    assert (light[2], dark[2]) == (colours.LIGHT[0], colours.DARK[0])
    opened.page.click("#theme")
    wait_for(lambda: seen() == light)
    opened.page.emulate_media(color_scheme="light")
    opened.until("!matchMedia('(prefers-color-scheme: dark)').matches")
    wait_for(lambda: seen() == light)
    opened.page.click("#theme")
    wait_for(lambda: seen() == dark)
    opened.page.click("#theme")
    wait_for(lambda: seen() == light)


@in_browser
def test_a_phone_scrolls_in_one_direction(opened: Opened) -> None:
    before = opened.page.viewport_size
    opened.page.set_viewport_size({"width": 375, "height": 700})
    opened.open_all(True)
    too_wide = """[...document.querySelectorAll('button, p, h1, h2, h3, .plot, .plot svg')].filter(
        e => e.getBoundingClientRect().right > 375.5)"""
    opened.until(f"{too_wide}.length === 0")  # figures follow in a moment
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 375
    opened.page.set_viewport_size(before)


@in_browser
def test_headings_are_in_order_and_tables_have_names(opened: Opened) -> None:
    levels = opened.page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert levels.count(1) == 1
    without = opened.page.evaluate(
        """[...document.querySelectorAll('table')].filter(t => !t.caption ||
            [...t.querySelectorAll('th')].some(h => !h.scope)).length"""
    )
    assert without == 0
    ids = opened.page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


# ------------------------------------------------------------------------ without a browser
def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [pages.WHITE, pages.BLACK], ids=["light", "dark"])
def test_texts_and_lines_stand_out(paper: str) -> None:
    found = dict(re.findall(r"--(\w+): (#\w{6})", paper))
    for name in ("ink", "soft", "link", *(f"c{n}" for n in range(6))):
        assert contrast(found[name], found["paper"]) >= 4.5, name
    assert contrast(found["ink"], found["hover"]) >= 4.5
    assert contrast(found["edge"], found["paper"]) >= 3


def simulated(colour: str, kind: int) -> Any:
    """A colour as a protanope or a deuteranope sees it (Machado 2009), in CIE Lab."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    sees = (
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]],
        [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    )[kind]
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ np.clip(sees @ linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("palette", [colours.LIGHT, colours.DARK], ids=["light", "dark"])
def test_lines_are_told_apart_without_red_or_green(palette: tuple[str, ...], kind: int) -> None:
    seen = [simulated(colour, kind) for colour in palette]
    apart = [np.linalg.norm(a - b) for n, a in enumerate(seen) for b in seen[:n]]
    assert min(apart) > 15  # two colours side by side look different from about 2 on


def test_the_page_is_one_file(study: Path) -> None:
    text = (study / "report.html").read_text()
    own = text.replace(html._script(html.plotly_source()), "")
    own = own.split("<script type")[0]
    assert not re.search(r"<[^>]* (src|href)=(?!\"#)|url\(|@import|https?:", own)
    assert EVIL not in own
    assert "<img" not in own
    assert call("report", study, "-o", study / "again.html").exit_code == 0
    assert (study / "again.html").read_text() == text


def test_long_lines_are_thinned_and_it_says_so(tmp_path: Path) -> None:
    fill(tmp_path, specs("upgd"), windows=html.POINTS * 2 + 1)
    assert call("report", tmp_path).exit_code == 0
    assert "Each point is a mean of 3 windows" in (tmp_path / "report.html").read_text()
    values = np.random.default_rng(0).random((2, 4001)).astype(np.float32)
    samples, found, factor = sections.thin(sections.Line(10, (0, 1), values), 2000)
    assert (factor, found.shape) == (3, (2, 1334))
    plain = [values[:, k : k + 3].mean(1, dtype=float) for k in range(0, 4001, 3)]
    np.testing.assert_allclose(found, np.stack(plain, 1), rtol=1e-6)
    assert (samples[0], samples[-1]) == (30, 40010)


def test_many_seeds_are_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "SEED_POINTS", 2 * SEEDS * WINDOWS - 1)
    fill(tmp_path, specs("upgd", "sgd"))
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert "Seeds are not drawn one by one" in text
    assert "Each seed" not in text


def test_of_many_settings_the_best_are_drawn(tmp_path: Path) -> None:
    many = [RunSpec("p", m, {"lr": lr / 10}, 0, 1200) for m in ("a", "bb") for lr in range(6)]
    fill(tmp_path, many)
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert text.count("(best of 6)</span></button>") == 2
    assert "10 more settings" in text


def test_claims_that_the_study_has_runs_for(tmp_path: Path, study: Path) -> None:
    runs = EXPERIMENTS["input-permuted-mnist"].specs(scale=0.01, seeds=2)
    fill(tmp_path, [*runs["upgd"], *runs["s-ewc"]])
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    judged, _, others = text.partition("Claims for which this study has no runs")
    assert "2. Input-permuted MNIST" in judged
    assert "UPGD-W maintains its level" in judged
    assert "11. Stationary MNIST" in others
    assert "None of the paper's claims" in (study / "report.html").read_text()


def test_choices_and_mistakes(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "new" / "page.html"
    chosen = ("--problem", "my-stream", "--metric", "loss", "-o", page)
    assert call("report", study, *chosen).exit_code == 0
    text = page.read_text()
    assert "<h3>Loss</h3>" in text
    assert "<h3>Accuracy</h3>" not in text
    assert "other" not in text.split("<script type")[0]
    with Ledger.open(tmp_path / "empty"):
        pass
    for arguments, said in (
        ((study, "--metric", "speed"), "there are accuracy, loss, weight_l2"),
        ((study, "--problem", "mnist"), "no run of mnist; there are my-stream"),
        ((study, "-o", "page.png"), "must end in .html"),
        ((tmp_path / "empty",), "has no run to report on"),
        ((tmp_path / "none",), "none"),
    ):
        result = call("report", *arguments)
        assert result.exit_code == 2
        assert said in result.output
        assert result.output.count("\n") == 1
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = call("report", study, "-o", page)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "pip install 'plotly>=" in result.output
    assert page.read_text() == text


def test_nothing_is_done_yet(tmp_path: Path) -> None:
    with Ledger.open(tmp_path) as ledger:
        ledger.add(specs("upgd"))
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert "No run is done" in text
    assert "0 done, 3 not done" in text


def test_svg_figures_hold_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"
    draw_curves({"upgd": Curve(10, np.ones((3, 5), np.float32))}, "accuracy", "A title", path)
    text = path.read_text()
    for word in ("A title", "Samples", "upgd", "3 seeds; bands: Student's 95%"):
        assert re.search(rf"<text[^>]*>{re.escape(word)}</text>", text), word
    assert colours.LIGHT[0] in text


# ---------------------------------------------------------------------------------- sets
def test_a_sweep_shows_how_much_each_hyperparameter_matters(tmp_path: Path) -> None:
    sweep = [
        RunSpec("my-stream", "sgd", {"lr": lr, "sigma": sigma}, seed, 1200)
        for lr in (0.001, 0.01, 0.1, 1.0)
        for sigma in (0.0, 0.1, 0.2)
        for seed in range(2)
    ]
    fill(tmp_path, sweep)
    with Ledger.open(tmp_path) as ledger:
        [section] = sections.read(ledger, ledger.runs())
        [ranking] = section.rankings.values()
    assert section.drawn == 1
    assert section.arms[0].name == "sgd (best of 12)"
    assert ranking.winner is not None
    best = dict(ranking.winner.hyper)
    assert section.arms[0].chosen == f"lr={best['lr']:g} sigma={best['sigma']:g}"
    lr, sigma = sets.figures(section)
    assert (lr["unit"], lr["labels"]) == ("lr", ["0.001", "0.01", "0.1", "1"])
    assert (sigma["unit"], sigma["labels"]) == ("sigma", ["0", "0.1", "0.2"])
    [line] = lr["sets"]
    assert line["x"] == pytest.approx([-3, -2, -1, 0])
    for step, mean in zip((0.001, 0.01, 0.1, 1.0), line["y"], strict=True):
        values: dict[float, list[float]] = {}
        for one in ranking.complete:
            if dict(one.hyper)["lr"] == step:
                values[dict(one.hyper)["sigma"]] = list(one.values.values())
        assert mean == pytest.approx(max(np.mean(some) for some in values.values()))
    assert call("report", tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert "How much each hyperparameter matters" in text
    assert "Numbers: accuracy by sigma" in text
