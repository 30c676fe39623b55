"""Where the program ``torchcaps`` starts: prepared for signals before anything else is imported."""

from __future__ import annotations

from torchcaps.process import begin


def main() -> int:
    """Run the command that the command line names."""
    begin()
    from torchcaps.cli.main import main as run

    return run()
