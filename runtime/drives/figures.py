"""What people write about a drive, read strictly: `7.1GB/s,latency=0.2ms`. M is 10⁶, Mi is 2²⁰."""

from __future__ import annotations

import re

from runtime.errors import UsageError

RATES = (500e3, 1e12)
"""Bytes/s that can be simulated: a drive below them would fail the scheduler's checks."""
LONGEST_LATENCY_S = 1.0

_RANGE = (
    f"the rate must be from {RATES[0] / 1e6} MB/s to {RATES[1] / 1e9:,.0f} GB/s, "
    f"the latency at most {LONGEST_LATENCY_S:.0f}s"
)

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RATE = re.compile(rf"{_NUMBER}\s*([kmg]i?)?b/s", re.IGNORECASE)
_LATENCY = re.compile(rf"{_NUMBER}(s|ms|us|µs|μs)")


def is_name(text: str) -> bool:
    """Whether a drive, or a group of them, can be called so."""
    return _NAME.fullmatch(text) is not None


def is_rate(text: str) -> bool:
    """Whether this is written like a rate, whatever its size."""
    return _RATE.fullmatch(text.strip()) is not None


def parse_rate(text: str) -> float:
    """Bytes/s. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is no rate, such as 400MB/s")
    rate = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(_RANGE)
    return rate


def parse_latency(text: str) -> float:
    """Seconds. Raises UsageError."""
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is no latency, such as 0.2ms")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > LONGEST_LATENCY_S:
        raise UsageError(_RANGE)
    return seconds


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
