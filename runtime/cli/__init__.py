"""The command line: options in, calls out. Every error meant for a person ends in `main`, as one line."""

from runtime.cli.commands import app
from runtime.cli.ending import main

__all__ = ["app", "main"]
