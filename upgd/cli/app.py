"""The frame of the command line: commands on demand, consoles, and errors as one line."""

from __future__ import annotations

import codecs
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

import upgd
from upgd.cli.commands import COMMANDS, SECTIONS
from upgd.cli.help import Command, Group, Rows, summary
from upgd.text import printable

F = TypeVar("F", bound=Callable[..., Any])
out, err = Console(), Console(stderr=True)
_TYPERS: dict[str, typer.Typer] = {}


class OnDemand(Mapping[str, Any]):
    """The commands by name; a command's module is imported when the command is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The command; KeyError if there is none."""
        if name not in self._made:
            module, _ = COMMANDS[name]
            import_module(f"upgd.cli.{module}")
            self._made[name] = typer.main.get_command(_TYPERS[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(Group):
    """All commands; usage errors are one line with exit code 2, like all others."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = OnDemand()  # type: ignore[assignment]

    def sections(self, ctx: Any) -> dict[str, Rows]:
        """The table of commands, without importing them."""
        return {
            section: [(name, summary(text)) for name, (_, text) in rows.items()]
            for section, rows in SECTIONS.items()
        }

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line, and exit in standalone mode."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # print every text, whatever the encoding
                stream.reconfigure(errors="upgd.plain")
        standalone, extra["standalone_mode"] = extra.get("standalone_mode", True), False
        if not standalone:
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            _end_output()
        except OSError as error:
            tell(error.strerror or str(error))
            sys.exit(2)
        except Exception as error:
            context = getattr(error, "ctx", None)
            if not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                what = error.format_message().rstrip(".")
                way_out = f"'{context.command_path} --help' explains" if context else ""
                tell((" " if what.endswith("?") else "; ").join(filter(None, (what, way_out))))
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=Commands,
    help="Optimizers for networks that keep learning, and a laboratory for them.\n\n"
    "Start with 'upgd demo'. 'upgd COMMAND --help' has options and examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_PLAIN = {"±": "+-", "×": "x", "−": "-", "–": "-", "…": "...", "ℓ": "l", "“": '"', "”": '"'}


def _plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a terminal's encoding lacks; an error handler of :mod:`codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    found = (_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking)
    return "".join(found), error.end


codecs.register_error("upgd.plain", _plain)


def _end_output() -> NoReturn:
    """Exit quietly after a broken pipe, as with ``head``."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def command(
    name: str | None = None,
    group: typer.Typer | None = None,
    interrupted: str = "'upgd resume' continues from here",
    examples: Sequence[str] = (),
) -> Callable[[F], F]:
    """Make a command; errors of the user's input become one line and exit code 2.

    Args:
        name: By default that of the function. It has a row in :data:`upgd.cli.commands.SECTIONS`.
        group: The group that the command belongs to, instead.
        interrupted: What Ctrl-C reports.
        examples: Command lines at the end of the help page.
    """

    def make(function: F) -> F:
        owner = new_typer(name or function.__name__) if group is None else group
        register = owner.command(name, cls=Command, epilog="\n".join(examples))
        return register(_guarded(function, interrupted))

    return make


def new_typer(name: str, **settings: Any) -> typer.Typer:
    """The Typer of a command or group in :data:`upgd.cli.commands.SECTIONS`."""
    plain: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None}
    _TYPERS[name] = typer.Typer(name=name, cls=Group, **plain, **settings)
    return _TYPERS[name]


def _guarded(function: F, interrupted: str) -> F:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UnicodeEncodeError as error:
            around = error.object[max(0, error.start - 20) : error.end + 20]
            _fail(f"{around!r} cannot be written in {error.encoding}; use other characters")
        except (ValueError, ImportError) as error:
            _fail(str(error))
        except BrokenPipeError:
            _end_output()
        except OSError as error:
            where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
            _fail(where + (error.strerror or str(error)))
        except KeyError as error:
            _fail(str(error.args[0]))
        except MemoryError as error:
            _fail(f"out of memory: {error}; choose something smaller")
        except KeyboardInterrupt:
            warn(f"interrupted; {interrupted}")
            raise typer.Exit(130) from None
        except _study_error() as error:
            _fail(str(error))

    return guarded  # type: ignore[return-value]


def _study_error() -> type[Exception]:
    """Imported only where something went wrong: it needs torch."""
    from upgd.ledger.errors import StudyError

    return StudyError


def say(text: object, console: Console = out, style: str = "") -> None:
    """Print one line as it is: no markup, control characters escaped."""
    console.print(
        printable(text), style=style, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def warn(text: object) -> None:
    """Print one line to standard error, in yellow."""
    say(text, err, "yellow")


def tell(message: str) -> None:
    """Report a mistake in one line."""
    say(f"upgd: {message}", err, "red")


def wrote(path: os.PathLike[str], more: str = "") -> None:
    """Report a written file; on standard error if standard output may be that file."""
    console = out if os.path.isfile(path) and not os.fspath(path).startswith("/dev/") else err
    say(f"wrote {path}{more}", console)


def _fail(message: str) -> NoReturn:
    tell(message)
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
    """Optimizers for networks that keep learning, and a laboratory for them."""
