"""Help pages: options in sections, summaries in full, examples at the end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

WIDEST = 30  # characters of a name; the text of longer ones starts on the next line

SECTIONS = ("Arguments", "Options", "Stream and network", "Execution", "Output")

Rows = list[tuple[str, str]]


class Command(TyperCommand):
    """A command; each line of its epilog is an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by their panels."""
        write(formatter, _options(self.get_params(ctx), ctx))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Group(TyperGroup):
    """A group of commands."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write options, then commands."""
        write(formatter, _options(self.get_params(ctx), ctx))
        write(formatter, self.sections(ctx))

    def sections(self, ctx: Any) -> dict[str, Rows]:
        """The commands with their summaries, by section."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        return {"Commands": [(name, summary(one.help)) for name, one in found if one is not None]}


def _options(params: Iterable[Any], ctx: Any) -> dict[str, Rows]:
    """Arguments and options by section."""
    found: dict[str, Rows] = {section: [] for section in SECTIONS}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None:
            plain = f"{param.param_type_name.capitalize()}s"
            panel = getattr(param, "rich_help_panel", None) or plain
            found.setdefault(panel, []).append((_plain(record[0]), record[1]))
    return found


def _plain(name: str) -> str:
    """Types in one word.

    >>> _plain("--set <list[str]>"), _plain("--seeds <int range>")
    ('--set <str>', '--seeds <int>')
    """
    return re.sub(r"<(?:list\[)?(\w+?)\]?(?: range)?>", lambda found: f"<{found[1].lower()}>", name)


def write(formatter: Any, sections: Mapping[str, Rows]) -> None:
    """Write sections whose texts are aligned with each other."""
    names = [len(name) for rows in sections.values() for name, _ in rows]
    width = max((n for n in names if n <= WIDEST), default=0)
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], WIDEST)


def summary(text: str | None) -> str:
    """The first line of a help text."""
    return (text or "").partition("\n")[0].rstrip(".")
