"""Tables of results that count as runs: their runs are not repeated, and new runs are added.

So a new method gets its row in the committed tables, and an experiment gets further seeds, without
the studies behind the tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from upgd.ledger import Ledger, RunSpec
from upgd.ledger.ledger import NAME
from upgd.ledger.spec import MEASURING
from upgd.metrics import DIAGNOSTICS, STRIDED
from upgd.paper import provenance, results
from upgd.paper.experiments import EXPERIMENTS, Experiment
from upgd.paper.provenance import Provenance
from upgd.paper.results import TABLE, Results, folder_name


class Table(NamedTuple):
    """An experiment's results and their provenance."""

    results: Results
    told: Provenance

    def has(self, arm: str, spec: RunSpec, diagnosed: bool = False) -> bool:
        """Whether it has a run of an arm, done or diverged, with any metrics.

        Args:
            arm: Its name.
            spec: The run.
            diagnosed: A finished one must have the diagnostics, by their current definition.
        """
        if spec.steps != self.told.steps or spec.seed not in self.told.over.get(arm, ()):
            return False
        if not diagnosed or spec.seed in self.told.diverged.get(arm, ()):
            return True
        current = self.told.diagnostics == DIAGNOSTICS
        return current and spec.seed in self.results.of(arm, "gradient_l0")

    def unlike(self, experiment: Experiment, data_dir: str | os.PathLike[str] | None) -> str:
        """In what it differs from what would be run here; nothing if it counts.

        It counts as a whole or not at all, because the work of a single arm is not recorded. Nor
        are methods: arms with the same name and set are taken to be the same.
        """
        arms = {arm.name: arm for arm in experiment.arms}
        silent = [name for name in self.told.over if name not in self.told.sets]
        unknown = [name for name in self.told.over if name not in arms]
        outdated = self.told.outdated(experiment)
        for what, names in (
            ("arms whose sets it does not tell", silent),
            ("arms that are not known here", unknown),
            ("other sets", outdated),
        ):
            if names:
                return f"{what} ({', '.join(names)})"
        every = ({**experiment.options, **arms[name].options} for name in self.told.over)
        ours, theirs = (
            {name: value for name, value in some.items() if name not in MEASURING}
            for some in (provenance.common(every), self.told.options)
        )
        if self.told.problem != experiment.problem or ours != theirs:
            return "another problem or other options"
        data = provenance.known_data(experiment.problem, data_dir, self.told) or {}
        checksums = (self.told.data or {}).get("sha256", {})
        return f"other {data['name']} data" if data.get("sha256", {}) != checksums else ""

    def joined(self, more: Table, experiment: Experiment) -> Table:
        """The table with additional runs, which replace its own of the same arms and seeds.

        Diagnostics of two definitions are not put together: the older ones are dropped.

        Raises:
            ValueError: The runs have other windows.
        """
        told, mine = provenance.joined(self.told, more.told, experiment), self.results
        if not any(name in more.results.series for name in STRIDED):
            told = replace(told, diagnostics=self.told.diagnostics)
        elif self.told.diagnostics != more.told.diagnostics:
            mine = results.without(mine, STRIDED)
        return Table(results.joined(mine, more.results), told)


def are_tables(folder: Path) -> bool:
    """Whether a folder has tables of results and is not a study."""
    return not (folder / NAME).exists() and any(folder.glob(f"*/{TABLE}"))


def read(folder: Path, name: str) -> Table | None:
    """An experiment's table in a folder of tables; None without provenance."""
    place = folder / folder_name(name)
    told = provenance.read(place)
    if told is None or not (place / TABLE).exists():
        return None
    return Table(results.read(place / TABLE, name), told)


def load(
    places: Iterable[str | os.PathLike[str]],
    say: Callable[[str], object] = lambda text: None,
    older: bool = True,
) -> dict[str, Results]:
    """Results of all experiments found in studies' folders, or in folders of tables.

    Args:
        places: The folders; later ones come before earlier ones.
        say: Is called with what is being read.
        older: Whether tables keep diagnostics of an older definition; studies never do.
    """
    found: dict[str, Results] = {}
    for place in map(Path, places):
        for path in sorted(place.rglob(TABLE)):
            name = path.parent.name.replace("_", "-")
            if name in EXPERIMENTS:
                say(f"reading {path.parent}")
                found[name] = results.read(path, name)
                told = None if older else provenance.read(path.parent)
                if told is not None and told.diagnostics < DIAGNOSTICS:
                    found[name] = results.without(found[name], STRIDED)
        for path in sorted(place.rglob(NAME)):
            say(f"reading {path.parent}")
            with Ledger.open(path.parent, create=False, read_only=True) as ledger:
                for name, experiment in EXPERIMENTS.items():
                    there = results.collect(ledger, experiment)
                    if there is not None:
                        found[name] = there
    return found
