"""The arena: every method on streams of one protocol, with an equal budget for its search.

=================================  ==============================================================
:mod:`~upgd.arena.grids`           the sets of hyperparameters of each entrant, as data
:mod:`~upgd.arena.protocol`        streams, scales, seeds; which runs come next, which set is taken
:mod:`~upgd.arena.evidence`        what the runs gave, as small tables that are committed
:mod:`~upgd.arena.scores`          scores, intervals and ranks from these tables
:mod:`~upgd.arena.board`           the leaderboard as pages and figures
=================================  ==============================================================

``upgd arena`` runs it; ``docs/arena.md`` explains the rules.
"""
