"""Rates learned from what the drives really do: bytes over busy time.

A drive is busy while at least one read is in flight on it. Its busy time is cut into epochs: an epoch ends when the
drive falls idle (then bytes and seconds belong together exactly), or, under load that does not end, after EPOCH_READS
reads, and then a read in flight at either end counts as half done. A rest of an epoch that landed less than
TRUSTED_EPOCH times what was in flight at its start is not looked at: the reads of a drive that serves them side by
side end together, and their bytes say nothing about the short time in which they do. Each epoch has a pace, seconds
per byte, and the paces are averaged with weights that halve every HALF_LIFE_READS reads. Paces and not rates are
averaged, because time is what the plan adds up; a slow spell therefore shows at once.

After a lasting change of a drive's rate the estimate has followed by nine tenths after 2 · EPOCH_READS reads; where
the drive falls idle in between, after HALF_LIFE_READS · log2(10) = 27.

Drives behind one uplink slow each other down. While two or more of them are busy the uplink's own rate is learned,
and a member's busy clock runs slower by the factor the uplink imposes, so that its rate stays that of the drive
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

HALF_LIFE_READS = 8
EPOCH_READS = 32
TRUSTED_EPOCH = 4


class LearnedRate:
    """Bytes per second of one drive or uplink. `value` is never below the floor. Never reads a clock."""

    __slots__ = ("_bytes", "_carried", "_floor", "_pace", "_reads", "_seconds", "_since", "value")

    def __init__(self, prior: float, floor: float) -> None:
        self._floor = floor
        self._pace = 1.0 / max(prior, floor)
        self.value = 1.0 / self._pace
        self._since: float | None = None
        self._forget_epoch()

    def busy(self, now: float) -> None:
        """The first read is in flight: the busy clock runs from now on."""
        self._since = now

    def flow(self, now: float, factor: float = 1.0) -> None:
        """Count the time since the last call as busy, worth `factor` of itself behind a shared uplink."""
        if self._since is not None:
            self._seconds += (now - self._since) * factor
            self._since = now

    def landed(self, nbytes: int, now: float, still_in_flight: int) -> bool:
        """A read of `nbytes` has ended well and `still_in_flight` bytes are left. True when `value` has changed."""
        self.flow(now)
        self._bytes += nbytes
        self._reads += 1
        if still_in_flight == 0:
            self._since = None
        elif self._reads < EPOCH_READS:
            return False
        return self._end_epoch(still_in_flight)

    def interrupted(self, now: float, still_busy: bool) -> None:
        """A read ended badly or hangs: what was measured since the last epoch means nothing."""
        self._forget_epoch()
        self._since = now if still_busy else None

    def measured(self, nbytes: int, seconds: float, weight: float) -> None:
        """A read beside the others, such as a check, took this long; it counts `weight` (0 to 1) of the estimate."""
        if nbytes > 0 and seconds > 0:
            self._learn(seconds / nbytes, weight)

    def _end_epoch(self, still_in_flight: int) -> bool:
        nbytes, seconds, reads, carried = self._bytes, self._seconds, self._reads, self._carried
        self._forget_epoch(still_in_flight)
        if seconds <= 0 or nbytes < TRUSTED_EPOCH * carried:
            return False
        begun = (still_in_flight - carried) / 2  # reads in flight are half done, on the whole
        self._learn(seconds / (nbytes + begun), 1.0 - 0.5 ** (reads / HALF_LIFE_READS))
        return True

    def _learn(self, pace: float, weight: float) -> None:
        self._pace += weight * (pace - self._pace)
        self.value = max(self._floor, 1.0 / self._pace)

    def _forget_epoch(self, carried: int = 0) -> None:
        self._carried = carried
        self._bytes = 0
        self._seconds = 0.0
        self._reads = 0


class Uplink:
    """What drives on one hub or port share. Members say when they are busy; the uplink's rate is learned meanwhile."""

    __slots__ = ("_busy", "_in_flight", "_rates", "limit")

    def __init__(self, members: dict[int, LearnedRate], prior: float | None, floor: float) -> None:
        self._rates = members
        self._busy: set[int] = set()
        self._in_flight = 0
        self.limit = LearnedRate(prior if prior is not None else sum(r.value for r in members.values()), floor)

    def factor(self, drives: Sequence[int] | set[int] | None = None) -> float:
        """The share of its own rate each of `drives` gets when all of them are busy (default: those that are)."""
        busy = self._busy if drives is None else self._rates.keys() & set(drives)
        total = sum(self._rates[d].value for d in busy)
        return min(1.0, self.limit.value / total) if len(busy) > 1 else 1.0

    def flow(self, now: float) -> None:
        """Bring every busy member's clock up to `now`, at the factor that held until now."""
        factor = self.factor()
        for d in self._busy:
            self._rates[d].flow(now, factor)
        self.limit.flow(now)

    def started(self, drive: int, nbytes: int, now: float) -> None:
        self._busy.add(drive)
        self._in_flight += nbytes
        if len(self._busy) == 2:
            self.limit.busy(now)

    def ended(self, drive: int, nbytes: int, now: float, well: bool, idle: bool) -> None:
        """A read of a member has ended, well or not; `idle` when it was the member's last."""
        shared = len(self._busy) > 1
        self._in_flight -= nbytes
        if idle:
            self._busy.discard(drive)
        still_shared = len(self._busy) > 1
        if shared and well:
            self.limit.landed(nbytes, now, self._in_flight if still_shared else 0)
        elif shared:
            self.limit.interrupted(now, still_shared)

    @property
    def members(self) -> set[int]:
        return set(self._rates)

    @property
    def in_flight(self) -> int:
        """Bytes in flight over the uplink."""
        return self._in_flight
