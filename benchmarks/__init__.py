"""Measurements: what this project's code reaches of what the machine could do. They record, and never pass or fail."""

import sys
from types import TracebackType


def _interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """^C while a benchmark imports, before `cli.ending.end` could see it, ends it without a word."""
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(130)
    sys.__excepthook__(kind, error, trace)


if sys.argv[0] == "-m":  # so long as `python -m` looks for what it is to run
    sys.excepthook = _interrupted
