"""What the scheduler remembers: drives, reads in flight, jobs, and the bytes not yet started.

All accounting of reads goes through three methods of `DriveLedger`, `begin`, `hang` and `end`, so that nothing can be
counted in and not out. `audit` recounts everything from the reads themselves. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runtime.drives.jobs import DriveSpec, Fault, Job, Kind, Piece, Policy, Priority, Slice, Span
from runtime.drives.rates import LearnedRate, Uplink


class Health(Enum):
    """READY drives get work. NEW ones have no known rate yet. SUSPECT ones sit out; LOST ones are not waited for."""

    READY = "ready"
    NEW = "new"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class Totals:
    """Counts of one drive since the start. Bytes are those of reads that ended well, useful or not."""

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
class Read:
    """A slice in flight."""

    slice: Slice
    attempt: Attempt
    drive: DriveLedger
    started: float
    deadline: float
    give_up: float
    prefetch: bool
    hung: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """One lease and the reads that fill it. A job has one attempt, or more when reads of the first are late.

    `todo` has the (start, length) pieces not yet started. A dead attempt waits for its reads to end, no more.
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


@dataclass(slots=True, eq=False)
class Work:
    """A live job. `holders` has a bit for every drive whose copy is not given up; `rivals` are late attempts that
    may still come in first."""

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


class BytePool:
    """Bytes not yet started that the same drives can serve, at one barrier; the plan's quotas in bytes per drive."""

    __slots__ = ("fresh", "mask", "members", "nbytes", "partial", "quota")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.members = tuple(d for d in range(mask.bit_length()) if mask >> d & 1)
        self.nbytes = 0
        self.quota: dict[int, float] = {}
        self.partial: dict[Attempt, None] = {}
        self.fresh: dict[Attempt, None] = {}


class BarrierQueue:
    """The bytes not yet started of one barrier and priority, scarcest first; what each drive should take of all."""

    __slots__ = ("nbytes", "planned", "pools", "quota", "tag")

    def __init__(self, tag: tuple[int, int]) -> None:
        self.tag = tag
        self.nbytes = 0
        self.planned = False
        self.pools: list[BytePool] = []
        self.quota: list[float] = []

    def add(self, attempt: Attempt, mask: int) -> None:
        pool = next((p for p in self.pools if p.mask == mask), None)
        if pool is None:
            pool = BytePool(mask)
            self.pools.append(pool)
            self.pools.sort(key=lambda p: len(p.members))
        (pool.partial if attempt.lease is not None else pool.fresh)[attempt] = None
        nbytes = sum(length for _, length in attempt.todo)
        pool.nbytes += nbytes
        self.nbytes += nbytes
        self.planned = False
        attempt.pool = pool

    def remove(self, attempt: Attempt) -> None:
        pool = attempt.pool
        assert pool is not None
        pool.partial.pop(attempt, None)
        pool.fresh.pop(attempt, None)
        nbytes = sum(length for _, length in attempt.todo)
        pool.nbytes -= nbytes
        self.nbytes -= nbytes
        self.planned = False
        attempt.pool = None


class DriveLedger:
    """One drive: what is in flight on it, when it will be free, how it has behaved."""

    def __init__(self, index: int, spec: DriveSpec, policy: Policy) -> None:
        self.index, self.bit, self.spec = index, 1 << index, spec
        self.name, self.depth, self.alignment, self.latency_s = spec.name, spec.depth, spec.alignment, spec.latency_s
        self.rate = LearnedRate(spec.rate if spec.rate is not None else 1e9, policy.rate_floor)
        self.uplink: Uplink | None = None
        self.totals = Totals()
        self.live = 0
        self.hung = 0
        self.bytes_in_flight = 0
        self.free_at = 0.0
        self.last_used = 0.0
        self.health = Health.READY if spec.rate is not None else Health.NEW
        self.back_off_s = policy.back_off_s
        self.retry_at = 0.0
        self.check_due: float | None = None
        self.failed_checks = 0
        self.strikes = 0
        self.good_reads = 0
        self._begun_at = self.rate.value

    @property
    def slots(self) -> int:
        """Reads that may be started now. Hung ones do not count: with too many of them the drive is not READY."""
        return self.depth - self.live

    def free_in(self, now: float) -> float:
        """Seconds until everything in flight should have landed, or until a first byte can come when nothing is.

        A drive that is overdue by x is expected to take x more: with no other knowledge the middle of its time.
        """
        return abs(self.free_at - now) if self.live else self.latency_s

    def begin(self, read: Read, now: float, rate: float) -> None:
        nbytes = read.slice.length
        self.free_at = now + self.free_in(now) + nbytes / rate
        self._begun_at = rate
        if not self.live:
            self.rate.busy(now)
        if self.uplink is not None:
            self.uplink.flow(now)
            self.uplink.started(self.index, nbytes, now)
        self.live += 1
        self.bytes_in_flight += nbytes
        self.last_used = now

    def hang(self, read: Read, now: float) -> None:
        """The read is late: it no longer counts as work the drive will do."""
        self._out(read, now, well=False)
        read.hung = True
        self.hung += 1
        self.totals.hung += 1

    def end(self, read: Read, now: float, well: bool) -> bool:
        """The read has ended. True when the learned rate has changed."""
        self.last_used = now
        if read.hung:
            self.hung -= 1
            return False
        return self._out(read, now, well)

    def _out(self, read: Read, now: float, well: bool) -> bool:
        nbytes = read.slice.length
        self.live -= 1
        self.bytes_in_flight -= nbytes
        changed = False
        if self.uplink is not None:
            self.uplink.flow(now)
        if well:
            changed = self.rate.landed(nbytes, now, self.bytes_in_flight)
        else:
            self.rate.interrupted(now, self.live > 0)
        if self.uplink is not None:
            self.uplink.ended(self.index, nbytes, now, well, self.live == 0)
        self.free_at = min(self.free_at, now + self.bytes_in_flight / self._begun_at) if self.live else now
        return changed
