"""The command line's frame: consoles, and mistakes told in one line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

import upgd
from upgd.streams import DataError
from upgd.study import StudyError

app = typer.Typer(
    help="Run streaming continual-learning studies; a study is a folder, and nothing is lost.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out, err = Console(), Console(stderr=True)
F = TypeVar("F", bound=Callable[..., Any])


def mistakes_are_one_line(command: F) -> F:
    """End with exit code 2 and one line where the user's input cannot be served."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (StudyError, DataError, ValueError, FileNotFoundError) as error:
            _fail(str(error))
        except KeyError as error:
            _fail(str(error.args[0]))
        except KeyboardInterrupt:
            err.print("interrupted; 'upgd resume' goes on from here", style="yellow")
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


def _fail(message: str) -> NoReturn:
    err.print(f"upgd: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
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
