"""The command line: `parallax`, or `python -m parallax`."""

from parallax.cli.app import app, main

__all__ = ["app", "main"]
