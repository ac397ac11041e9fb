"""The command line of the laboratory: ``upgd --help``."""

from upgd.extras import install

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ImportError as error:  # the library works without
    raise SystemExit(f"upgd: the command line needs {error.name}: {install('lab')}") from error

from upgd.cli.app import app


def main() -> None:
    """The ``upgd`` command."""
    app(prog_name="upgd")


__all__ = ["app", "main"]
