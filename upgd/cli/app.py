"""The frame of the command line: consoles, and errors as one line."""

from __future__ import annotations

import codecs
import functools
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

import upgd
from upgd.ledger import StudyError
from upgd.streams import DataError, DataNotFoundError
from upgd.text import printable

F = TypeVar("F", bound=Callable[..., Any])
out, err = Console(), Console(stderr=True)


class Commands(TyperGroup):
    """Commands whose usage errors are one line with exit code 2, like all others."""

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
                way_out = f"; '{context.command_path} --help' explains" if context else ""
                tell(what + way_out)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=Commands,
    help="Run streaming continual-learning studies; a study is a folder, and nothing is lost.",
    no_args_is_help=True,
    add_completion=False,
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
    group: typer.Typer = app,
    interrupted: str = "'upgd resume' continues from here",
) -> Callable[[F], F]:
    """Register a command; errors of the user's input become one line and exit code 2."""
    return lambda function: group.command(name)(_guarded(function, interrupted))


def _guarded(function: F, interrupted: str) -> F:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UnicodeEncodeError as error:
            around = error.object[max(0, error.start - 20) : error.end + 20]
            _fail(f"{around!r} cannot be written in {error.encoding}; use other characters")
        except (StudyError, DataError, DataNotFoundError, ValueError, ImportError) as error:
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

    return guarded  # type: ignore[return-value]


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
    """Run streaming continual-learning studies."""
