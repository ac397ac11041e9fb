"""The commands: in which section and module each is, and what it does in one line.

``upgd --help`` is written from this table; a command's module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Start": {
        "demo": ("demo", "See UPGD-W beside Adam and SGD on shuffled digits, in a minute."),
        "learn": ("learn", "Learn from CSV or JSON lines as they come, predicting each first."),
        "compare": ("compare", "Compare UPGD and AdaUPGD with your optimizer, on your own data."),
        "list": ("listing", "List problems and methods, or explain one."),
    },
    "Run studies": {
        "run": ("run", "Run methods on a problem."),
        "resume": ("run", "Finish what a study has begun."),
        "sweep": ("sweep", "Try many sets of hyperparameters, and show each method's best."),
        "search": ("search", "Search the best sets, also where the paper prints none."),
        "arena": ("arena", "Rank methods on many streams, each with the same search budget."),
        "rl": ("rl", "Train agents by PPO: all seeds of all optimizers at once."),
        "watch": ("watch", "Watch a study: progress, pace, time left, and what failed."),
    },
    "Look at results": {
        "show": ("show", "Show a study's results: means over seeds, with intervals."),
        "best": ("best", "Show each method's best set of hyperparameters."),
        "plot": ("show", "Draw a metric over time, a line per setting."),
        "report": ("report", "Write a study as one page with interactive figures."),
        "export": ("show", "Export a study as CSV, or as TensorBoard event files."),
        "check": ("check", "Check a study for damage: the ledger, results, checkpoints."),
    },
    "The paper": {
        "reproduce": ("reproduce", "Run what the paper's figures need, and draw them."),
        "claims": ("claims", "Judge the paper's claims by finished runs."),
        "results": ("results", "Generate pages and figures from tables of results."),
    },
    "Data": {
        "data": ("data", "Find, fetch, check and convert the data behind the problems."),
    },
}
"""By section and name, a module of this package and a summary: its help's first line."""
COMMANDS = {name: row for some in SECTIONS.values() for name, row in some.items()}
