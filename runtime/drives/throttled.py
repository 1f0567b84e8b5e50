"""A drive behind a limit: a real device that is as slow as it is told to be, for machines with one disk.

One server per drive, first come, first served: a read holds it for length / rate seconds from when the reads before
it are through, and ends the latency after that. Time in which nobody reads is not saved up, but for SLACK of the
read's own time, which makes good what sleeping takes too long. So the bytes of any number of parallel readers, over
the time from their first request to their last byte, exceed the rate by less than 1 %, whatever was before. The real
read runs meanwhile; if it takes longer than its time the real device is the limit, and several throttled drives over
one disk share that disk.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass

from runtime.drives.device import Device, DeviceInFront
from runtime.errors import UsageError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_RATE = re.compile(rf"{_NUMBER}\s*([kmg]i?)?b/s", re.IGNORECASE)
_LATENCY = re.compile(rf"latency={_NUMBER}\s*(s|ms|us|µs|μs)")
SLACK = 0.009
RATES = (500e3, 1e12)
"""Bytes/s that can be simulated: a drive below them would fail the scheduler's checks."""
LONGEST_LATENCY_S = 1.0
FORM = "NAME=400MB/s or NAME=400MB/s,latency=0.2ms"


@dataclass(frozen=True, slots=True)
class Limit:
    """What `--simulate-drive` says: bytes/s, and seconds added to every read."""

    name: str
    rate: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.latency_s < 0:
            raise UsageError(f"simulated drive {self.name!r}: the rate must be positive; write {FORM}")

    @classmethod
    def parse(cls, text: str) -> Limit:
        """From `NAME=400MB/s[,latency=0.2ms]`. M is 10^6, Mi is 2^20. Raises UsageError."""
        name, _, rest = text.partition("=")
        rate_text, comma, latency_text = rest.partition(",")
        rate, latency = _RATE.fullmatch(rate_text.strip()), _LATENCY.fullmatch(latency_text.strip())
        if not name.strip() or not rate or (comma and not latency):
            raise UsageError(f"simulated drive {text!r}: not understood; write {FORM}")
        bytes_per_s = float(rate[1]) * _UNITS[(rate[2] or "").lower()]
        seconds = float(latency[1]) * _SECONDS[latency[2]] if latency else 0.0
        if not RATES[0] <= bytes_per_s <= RATES[1] or seconds > LONGEST_LATENCY_S:
            raise UsageError(
                f"simulated drive {text[:80]!r}: the rate must be from {RATES[0] / 1e6} MB/s to {RATES[1] / 1e9:,.0f} "
                f"GB/s, the latency at most {LONGEST_LATENCY_S:.0f}s"
            )
        return cls(name.strip(), bytes_per_s, seconds)


class ThrottledDevice(DeviceInFront):
    """`inner` behind a limit; everything else about it stays as it is."""

    def __init__(self, inner: Device, limit: Limit) -> None:
        super().__init__(inner)
        self.limit = limit
        self._free_at = 0.0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.limit.name

    def read(self, file: str, offset: int, into: memoryview) -> int:
        seconds = len(into) / self.limit.rate
        with self._lock:
            through = self._free_at = max(self._free_at, time.monotonic() - SLACK * seconds) + seconds
        moved = self.inner.read(file, offset, into)
        _sleep_until(through + self.limit.latency_s)
        return moved


def _sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)
