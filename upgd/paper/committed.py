"""Tables of results that count as runs: what they have is not run again, and what is new is added.

So an author's method gets its row in the committed tables, and an experiment gets further seeds,
without the studies that the tables were made of.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from upgd.paper import provenance, results
from upgd.paper.experiments import Experiment
from upgd.paper.provenance import Provenance
from upgd.paper.results import TABLE, Results, folder_name
from upgd.study import RunSpec
from upgd.study.spec import MEASURING


class Table(NamedTuple):
    """An experiment's results, and where they come from."""

    results: Results
    told: Provenance

    def has(self, arm: str, spec: RunSpec) -> bool:
        """Whether a run of an arm is in it, done or diverged, whatever was measured."""
        return spec.steps == self.told.steps and spec.seed in self.told.over.get(arm, ())

    def unlike(self, experiment: Experiment, data_dir: str | os.PathLike[str] | None) -> str:
        """In what it differs from what would be run here; nothing if it counts.

        It counts as a whole or not at all, since how much of its work was an arm's is not known.
        Nor are methods: an arm of the same name and set is taken for the same.
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
        options = provenance.common(
            {**experiment.options, **arms[name].options} for name in self.told.over
        )
        ours, theirs = (
            {name: value for name, value in some.items() if name not in MEASURING}
            for some in (options, self.told.options)
        )
        if self.told.problem != experiment.problem or ours != theirs:
            return "another problem or other options"
        data = provenance.known_data(experiment.problem, data_dir, self.told) or {}
        checksums = (self.told.data or {}).get("sha256", {})
        return f"other {data['name']} data" if data.get("sha256", {}) != checksums else ""

    def joined(self, more: Table, experiment: Experiment) -> Table:
        """With runs that it lacks.

        Raises:
            ValueError: These have other windows.
        """
        return Table(
            results.joined(self.results, more.results),
            provenance.joined(self.told, more.told, experiment),
        )


def are_tables(folder: Path) -> bool:
    """Whether a folder has tables of results and is no study."""
    return not (folder / "ledger.sqlite").exists() and any(folder.glob(f"*/{TABLE}"))


def read(folder: Path, name: str) -> Table | None:
    """An experiment's table in a folder of tables; None if none says where it comes from."""
    place = folder / folder_name(name)
    told = provenance.read(place)
    if told is None or not (place / TABLE).exists():
        return None
    return Table(results.read(place / TABLE, name), told)
