"""The command line of the laboratory: ``upgd --help``."""

try:
    import rich  # noqa: F401
    import typer  # noqa: F401
except ImportError as error:  # the library works without
    raise SystemExit(
        f"upgd: the command line needs {error.name}: pip install 'upgd[lab]'"
    ) from error

from upgd.cli.app import app


def main() -> None:
    """The ``upgd`` command."""
    app(prog_name="upgd")


__all__ = ["app", "main"]
