"""Tables of results that count as runs: what they have is not run again, and what is new is added.

So an author's method gets its row in the committed tables, and an experiment gets further seeds,
without the studies that the tables were made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from upgd.paper import provenance, results
from upgd.paper.experiments import Experiment
from upgd.paper.provenance import Provenance
from upgd.paper.results import TABLE, Results
from upgd.study import RunSpec


class Committed(NamedTuple):
    """A table, and where it comes from."""

    results: Results
    told: Provenance

    def has(self, arm: str, spec: RunSpec) -> bool:
        """Whether a run of an arm is in it, done or diverged, whatever was measured."""
        return spec.steps == self.told.steps and spec.seed in self.told.over.get(arm, ())

    def unlike(self, experiment: Experiment, data_dir: Path | None) -> str:
        """In what it differs from what would be run here; nothing if it counts."""
        known = {arm.name for arm in experiment.arms}
        unknown = [arm for arm in self.told.over if arm not in known or arm not in self.told.sets]
        arms = [*unknown, *self.told.outdated(experiment)]
        if arms:
            return f"other sets ({', '.join(arms)})"
        data = provenance.known_data(experiment.problem, data_dir, self.told) or {}
        checksums = (self.told.data or {}).get("sha256", {})
        return f"other {data['name']} data" if data.get("sha256", {}) != checksums else ""

    def joined(self, more: Committed, experiment: Experiment) -> Committed:
        """With runs that it lacks.

        Raises:
            ValueError: These have other windows.
        """
        return Committed(
            results.joined(self.results, more.results),
            provenance.joined(self.told, more.told, experiment),
        )


def are_tables(folder: Path) -> bool:
    """Whether a folder has tables of results and is no study."""
    return not (folder / "ledger.sqlite").exists() and any(folder.glob(f"*/{TABLE}"))


def read(folder: Path, name: str) -> Committed | None:
    """An experiment's table in a folder of tables; None if none says where it comes from."""
    place = folder / name.replace("-", "_")
    told = provenance.read(place)
    if told is None or not (place / TABLE).exists():
        return None
    return Committed(results.read(place / TABLE, name), told)
