"""Command line entry point."""


def main() -> None:
    """Run the ``checkmate`` command."""
    raise SystemExit("not built yet")
