"""What people write about a drive, read strictly: `7.1GB/s,latency=0.2ms`."""

from __future__ import annotations

import re

from runtime.errors import UsageError
from runtime.units import parse_rate

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def is_name(text: str) -> bool:
    """Whether a drive, or a group of them, can be called so."""
    return _NAME.fullmatch(text) is not None


def parse_figures(text: str, known: tuple[str, ...]) -> tuple[float, dict[str, str]]:
    """(bytes/s, options) from `RATE[,a=1][,b=2]`. Raises UsageError, also for options that are not `known`."""
    rate, *parts = text.split(",")
    options: dict[str, str] = {}
    for part in parts:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not value or name not in known:
            raise UsageError(f"{part[:40]!r} is not understood")
        if name in options:
            raise UsageError(f"{name} is given twice")
        options[name] = value
    return parse_rate(rate), options
