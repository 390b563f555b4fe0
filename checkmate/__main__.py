"""``python -m checkmate`` is the ``checkmate`` command."""

from checkmate.cli import main

main()
