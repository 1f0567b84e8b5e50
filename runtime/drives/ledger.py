"""What the scheduler remembers: drives, reads in flight, jobs and their leases. Nothing here decides anything.

All accounting of reads goes through three methods of `DriveLedger`: `begin`, `hang` and `end`. What they count in
they count out, on every path, and `Scheduler.audit` recounts it from the reads themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from runtime.drives.jobs import DriveSpec, Fault, Job, Kind, Piece, Policy, Priority, Slice, Span
from runtime.drives.rates import LearnedRate, Uplink

if TYPE_CHECKING:
    from runtime.drives.board import BytePool

RATE_UNKNOWN = 1e9
"""Bytes/s of a drive nobody has measured. It gets no work before it was, so the number only has to be positive."""


class Health(Enum):
    """READY drives get work. NEW ones have no known rate yet. SUSPECT ones sit out; LOST ones are not waited for."""

    READY = "ready"
    NEW = "new"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class Totals:
    """Counts of one drive since the start. Bytes are those of reads that ended well; wasted ones were not published."""

    reads: int = 0
    bytes: int = 0
    prefetch_bytes: int = 0
    wasted_bytes: int = 0
    bounced_bytes: int = 0
    retries: int = 0
    hedges: int = 0
    faults: int = 0
    hung: int = 0


@dataclass(slots=True, eq=False)
class Work:
    """A live job.

    holders: a bit for every drive whose copy is not given up. attempt: the one that reads what has not started;
    rivals: earlier ones with a late read, which may still come in first. one_phase: any holder fits any lease.
    """

    job: Job
    spans: dict[int, Span]
    holders: int
    priority: Priority
    barrier: int
    one_phase: bool
    attempt: Attempt = field(init=False)
    rivals: list[Attempt] = field(default_factory=list)
    tries: dict[int, int] = field(default_factory=dict)
    reasons: list[tuple[str, Fault, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Attempt:
    """One lease and the reads that fill it.

    todo: the (start, length) pieces not yet started; they lie in `pool` unless no drive can serve them now.
    origin: file offset that byte 0 of the lease is congruent to. dead: it only waits for its reads to end.
    """

    work: Work
    kind: Kind
    todo: list[tuple[int, int]]
    lease: int | None = None
    origin: int = 0
    reads: int = 0
    landed: int = 0
    dead: bool = False
    pool: BytePool | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def unstarted(self) -> int:
        """Bytes that no read has been started for."""
        return sum(length for _, length in self.todo)

    def fits(self, drive: DriveLedger) -> bool:
        """Can the drive read straight into the lease?"""
        if self.work.one_phase or self.lease is None:
            return True
        return (self.work.spans[drive.index].offset - self.origin) % drive.alignment == 0


@dataclass(slots=True, eq=False)
class InFlight:
    """A slice in flight."""

    slice: Slice
    attempt: Attempt
    drive: DriveLedger
    started: float
    deadline: float
    prefetch: bool
    hung: bool = False
    give_up: float = 0.0


class DriveLedger:
    """One drive: what is in flight on it, when it will be free, how it has behaved.

    `live` reads are those that are expected to end; `hung` ones are late, and count for nothing else.
    """

    def __init__(self, index: int, spec: DriveSpec, policy: Policy) -> None:
        self.index, self.bit, self.spec = index, 1 << index, spec
        self.name, self.depth, self.alignment, self.latency_s = spec.name, spec.depth, spec.alignment, spec.latency_s
        self.rate = LearnedRate(spec.rate or RATE_UNKNOWN, policy.rate_floor)
        self.uplink: Uplink | None = None
        self.totals = Totals()
        # reads
        self.live = 0
        self.hung = 0
        self.bounces = 0
        self.bytes_in_flight = 0
        self.free_at = 0.0
        self.last_used: float | None = None
        self._rate_now = self.rate.value
        # health
        self.health = Health.READY if spec.rate is not None else Health.NEW
        self.back_off_s = policy.back_off_s
        self.retry_at = 0.0
        self.check_due: float | None = None
        self.failed_checks = 0
        self.trouble = ""
        self.strikes = 0
        self.good_reads = 0

    def free_in(self, now: float) -> float:
        """Seconds until everything in flight should have landed, or until a first byte can come when nothing is.

        A drive that is overdue by x is expected to take x more: with no other knowledge the middle of its time.
        """
        return abs(self.free_at - now) if self.live else self.latency_s

    def begin(self, read: InFlight, now: float, rate: float) -> None:
        """The read starts, on a drive that is expected to move `rate` bytes/s."""
        nbytes = read.slice.length
        self.free_at = now + self.free_in(now) + nbytes / rate
        self._rate_now = rate
        if not self.live:
            self.rate.busy(now)
        if self.uplink is not None:
            self.uplink.flow(now)
            self.uplink.started(self.index, nbytes, now)
        self.live += 1
        self.bounces += read.slice.bounce
        self.bytes_in_flight += nbytes
        self.last_used = now

    def hang(self, read: InFlight, now: float) -> None:
        """The read is late: it no longer counts as work the drive will do."""
        self._leave(read, now, well=False)
        read.hung = True
        self.hung += 1
        self.totals.hung += 1

    def end(self, read: InFlight, now: float, well: bool) -> bool:
        """The read has ended. True when the learned rate has changed."""
        self.last_used = now
        if read.hung:
            self.hung -= 1
            return False
        return self._leave(read, now, well)

    def _leave(self, read: InFlight, now: float, well: bool) -> bool:
        nbytes, changed = read.slice.length, False
        self.live -= 1
        self.bounces -= read.slice.bounce
        self.bytes_in_flight -= nbytes
        if self.uplink is not None:
            self.uplink.flow(now)
        if well:
            changed = self.rate.landed(nbytes, now, self.bytes_in_flight)
        else:
            self.rate.interrupted(now, self.live > 0)
        if self.uplink is not None:
            self.uplink.ended(self.index, nbytes, now, well, self.live == 0)
        self.free_at = min(self.free_at, now + self.bytes_in_flight / self._rate_now) if self.live else now
        return changed
