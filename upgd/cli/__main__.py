"""``python -m upgd.cli`` is the ``upgd`` command."""

from upgd.cli import main

main()
