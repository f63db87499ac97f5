"""The command ``tilewave``; its commands are in ``commands``."""

from __future__ import annotations

from collections.abc import Sequence

from tilewave.commands import lab, library
from tilewave.commands.app import app

__all__ = ["app", "lab", "library", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; exits with its code."""
    app(args=None if arguments is None else list(arguments), prog_name="tilewave")
