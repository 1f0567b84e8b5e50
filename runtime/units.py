"""Sizes, rates and short times as people write them, and as they are shown: M is 10⁶, Mi is 2²⁰."""

from __future__ import annotations

import re
from fractions import Fraction

from runtime.errors import UsageError

RATES = (500e3, 1e12)
"""Bytes/s that can be simulated: a drive below them would fail the scheduler's checks."""
LONGEST_LATENCY_S = 1.0

_RANGE = (
    f"the rate must be from {RATES[0] / 1e6} MB/s to {RATES[1] / 1e9:,.0f} GB/s, "
    f"the latency at most {LONGEST_LATENCY_S:.0f}s"
)

_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_RATE = re.compile(rf"{_NUMBER}\s*(?:([kmg])(i?))?b/s", re.IGNORECASE)
_LATENCY = re.compile(rf"{_NUMBER}(s|ms|us|µs|μs)")


def parse_size(text: str, option: str, otherwise: str = "", least: int = 1) -> int:
    """Bytes: 24G and 24GB are 24·10⁹, 24Gi and 24GiB are 24·2³⁰, 1000000 is itself.

    Raises UsageError, also for less than `least`, which is 0 or 1; `otherwise` is what else the option takes.
    """
    advice = f"write bytes or a number with K, M, G, T, such as 24G or 1.5Gi{otherwise and f', {otherwise}'}"
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"{option} {text!r} is not a size: {advice}")
    nbytes = int(Fraction(match[1]) * _factor(match[2], match[3]))
    if nbytes < least:
        raise UsageError(f"{option} {text!r} is less than a byte: {advice}")
    return nbytes


def size_or_off(text: str | None, option: str) -> int | None:
    """Bytes, 0 for off, None for the default. Raises UsageError."""
    if text is None:
        return None
    return 0 if text.lower() == "off" else parse_size(text, option, "or off")


def is_rate(text: str) -> bool:
    """Whether this is written like a rate, whatever its size."""
    return _RATE.fullmatch(text.strip()) is not None


def parse_rate(text: str) -> float:
    """Bytes/s. Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text[:40]!r} is no rate, such as 400MB/s")
    rate = float(match[1]) * _factor(match[2] or "", match[3])
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


def size(nbytes: float) -> str:
    """Bytes for people: 17.5 MB, 114 GB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def per_second(rate: float | None) -> str:
    """Bytes/s for people: 400 MB/s, 7.1 GB/s; a dash where none is known."""
    return "–" if rate is None else f"{size(rate)}/s"


def _factor(prefix: str, binary: str | None) -> int:
    return int((1024 if binary else 1000) ** _POWER[prefix.lower()])
