"""The documentation site: it builds without warnings, its links work, and so does it offline."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
from filelock import FileLock

from tests.test_architecture import LAYERS
from tests.waiting import PATIENCE
from website.links import Links, broken

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
OPENED = ("index", "inside", "api/optimizers", "results/input_permuted_mnist/index")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site: that of ``make docs`` if nothing is newer, or built once for all processes."""
    made = ROOT / "build" / "site"
    if (made / "index.html").exists() and (made / "index.html").stat().st_mtime > newest():
        return made
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d"]
            environment = {**os.environ, "UPGD_DOCS_NOTEBOOKS": "0", "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(
                [*command, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def newest() -> float:
    """When what the site is made of was last changed."""
    sources = [path for name in ("docs", "upgd", "website") for path in (ROOT / name).rglob("*.*")]
    sources += [ROOT / "mkdocs.yml", ROOT / "CONTRIBUTING.md"]
    return max(path.stat().st_mtime for path in sources if "__pycache__" not in path.parts)


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 80
    assert broken(site) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="#here">1</a><a href="b.html">2</a><a href="#there">3</a>'
        '<img src="c.png"><script src="https://example.org/x.js"></script>'
        '<a href="https://example.org">4</a>'
    )
    assert broken(tmp_path) == [
        "a.html has a broken link: b.html",
        "a.html has a broken link: #there",
        "a.html has a broken link: c.png",
        "a.html loads https://example.org/x.js",
    ]


PUBLIC = ("upgd", "upgd.lab", "upgd.stream", "upgd.curvature", "upgd.utility",
          "upgd.rl")  # fmt: skip


@pytest.mark.parametrize("module", PUBLIC)
def test_all_public_names_are_in_the_reference(module: str, site: Path) -> None:
    places = {p for path in (site / "api").glob("*.html") for p in Links(path).places}
    exported = importlib.import_module(module)
    for name in exported.__all__:
        value = getattr(exported, name)
        own = f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else ""
        if not isinstance(value, types.ModuleType) and not name.startswith("__"):
            assert {f"{module}.{name}", own} & places, f"docs/api lacks {module}.{name}"


def test_the_house_has_every_package() -> None:
    text = (DOCS / "inside.md").read_text() + (DOCS / "diagrams" / "house.svg").read_text()
    lacking = [name for name in LAYERS.split() if not re.search(rf"\b{name}\b", text)]
    assert lacking == []


# ------------------------------------------------------------------------------- browser
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@in_browser
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_pages_open_without_errors(scheme: str, site: Path, browser: Any) -> None:
    """In the system's colours, on a phone, from a folder; nothing is loaded from elsewhere."""
    page = browser.new_page(color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: errors.append(r.url) if not r.url.startswith("file:") else None)
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for name in OPENED:
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_selector(".md-search__input", state="attached")
        assert page.evaluate(wider) <= 0, f"{name} is wider than the window"
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate(wider) <= 0, f"{name} is wider than a phone"
        assert errors == [], name
        shown = page.evaluate("document.body.getAttribute('data-md-color-scheme')")
        assert shown == {"light": "default", "dark": "slate"}[scheme]
    page.close()


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@in_browser
@pytest.mark.parametrize("where", [pytest.param("folder", marks=pytest.mark.slow), "server"])
def test_search_finds_a_class(where: str, site: Path, served: str, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.goto(served + "index.html" if where == "server" else (site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.get_by_text("Type to start searching").wait_for()  # the index is loaded
    page.keyboard.type("AdaUPGD")
    found = page.locator(".md-search-result__item a").filter(has_text="AdaUPGD").first
    found.wait_for(state="attached")
    page.goto(found.evaluate("a => a.href"))
    assert "AdaUPGD" in page.locator("article").inner_text()
    page.close()


@in_browser
def test_formulas_and_diagrams_are_drawn(site: Path, browser: Any) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto((site / "api" / "optimizers.html").as_uri())
    boxes = page.evaluate(
        "[...document.querySelectorAll('.formula math')].map(m => m.getBoundingClientRect().height)"
    )
    assert len(boxes) > 15
    assert min(boxes) > 5
    page.goto((site / "inside.html").as_uri())
    box = page.locator("svg.diagram rect").first
    fill = {}
    for scheme in ("default", "slate"):
        page.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        fill[scheme] = box.evaluate("r => getComputedStyle(r).fill")
    assert fill["default"] != fill["slate"]
    page.close()
