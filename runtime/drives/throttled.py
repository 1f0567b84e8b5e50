"""A drive behind a limit: a real device that is as slow as it is told to be, for machines with one disk.

One server per drive, first come, first served: a read holds it for length / rate seconds from when the reads before
it are through, and ends the latency after that. Time in which nobody reads is not saved up, but for SLACK of the
read's own time, which makes good what sleeping takes too long. So the bytes of any number of parallel readers, over
the time from their first request to their last byte, exceed the rate by less than 1 %, whatever was before. The real
read runs meanwhile; if it takes longer than its time the real device is the limit, and several throttled drives over
one disk share that disk.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from runtime.drives.device import Device, DeviceInFront
from runtime.drives.figures import parse_figures
from runtime.errors import UsageError
from runtime.units import parse_latency

SLACK = 0.009
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
        try:
            if not name.strip():
                raise UsageError("it has no name")
            rate, options = parse_figures(rest, ("latency",))
            return cls(name.strip(), rate, parse_latency(options.get("latency", "0s")))
        except UsageError as error:
            raise UsageError(f"simulated drive {text[:80]!r}: {error}; write {FORM}") from None


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
