"""What the drives are asked for, what happens to it, and what must be done about it: all of it as data.

The scheduler (`scheduler.py`) takes events and gives actions; both are defined here, and nothing here acts.

    Submit, Promote, Cancel      from whoever needs bytes
    Completed, Failed            from whoever carries out a read: one of them for every Start, once the read has ended
    DriveChecked                 the answer to CheckDrive
    Tick                         time has passed

    Start                        read this slice now
    JobDone, JobFailed, JobCancelled    exactly one of them ends each job
    LeaseReleased                this buffer is nobody's any more
    DriveSuspect, DriveBack, CheckDrive

Words are those of the design: a *span* is where a copy of some bytes lies, a *job* is bytes that are wanted, a
*slice* is a part of a job given to one drive, a *lease* is the buffer a job is read into. Sizes are in bytes, times
in seconds on whatever clock the caller uses; only differences of times matter.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum

Key = Hashable
"""Names a job: (layer, expert), or a block of the trunk. At most one live job has a key."""

MIB = 1 << 20

DEPTH = 4
"""Reads in flight on a drive of which nothing is known."""


class IllegalEvent(ValueError):
    """An event that the rules do not allow where things stand. The scheduler is as it was before the call."""


class Priority(IntEnum):
    """Demand is needed for sure; prefetch is a guess."""

    DEMAND = 0
    PREFETCH = 1


class Fault(Enum):
    """Why a slice did not arrive."""

    IO = "i/o error"
    GONE = "drive or file gone"
    SHORT = "file too short"
    WRONG = "wrong bytes"
    LATE = "no answer in time"


class Kind(Enum):
    """Why a slice is read: for the first time, again after it failed, or again because it is late elsewhere."""

    FIRST = "first"
    RETRY = "retry"
    HEDGE = "hedge"


@dataclass(frozen=True, slots=True)
class Span:
    """Where one copy of a job's bytes lies: `length` bytes of `file` from `offset`, on one drive."""

    drive: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Job:
    """Bytes that are wanted, and every copy of them: one span per holder, all of one length.

    `barrier` orders the work: a lower number is needed sooner. A layer's jobs carry the same number.
    room: what its buffer could hold at least, so that the buffers of jobs of several lengths serve each other.
    """

    key: Key
    spans: tuple[Span, ...]
    priority: Priority = Priority.DEMAND
    barrier: int = 0
    room: int = 0

    @property
    def length(self) -> int:
        return self.spans[0].length


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, start + length) of a job, to be read from `offset` of `file` on `drive` into a lease.

    The lease is a buffer of `job_bytes`; it comes into being with the first slice that names it, and byte 0 of the
    job belongs at an address congruent to `phase` modulo the drives' alignment. A read changes no byte of the lease
    outside [start, start + length): the next slice may be under way there. With `bounce` the drive's copy has
    another phase, and the reader has to go through a buffer of its own.
    `expected_s` is how long the read should take from its start, `deadline` the moment at which it is late.
    """

    id: int
    key: Key
    drive: str
    file: str
    offset: int
    start: int
    length: int
    lease: int
    job_bytes: int
    phase: int
    bounce: bool
    kind: Kind
    priority: Priority
    barrier: int
    expected_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class DriveSpec:
    """A drive as it is known before anything was read.

    depth: most reads in flight. rate: bytes/s from a probe, or None, and then the drive is checked before a barrier
    depends on it. latency_s: from a request to its first byte. alignment: of file offsets and addresses, a power of
    two; 1 when the operating system copies anyway. group: the uplink the drive shares with others, or None.
    """

    name: str
    depth: int = DEPTH
    rate: float | None = None
    latency_s: float = 0.0
    alignment: int = 4096
    group: str | None = None

    def __post_init__(self) -> None:
        if self.depth < 1 or self.latency_s < 0 or (self.rate is not None and self.rate <= 0):
            raise ValueError(f"drive {self.name!r}: depth is at least 1, latency not negative, a rate positive")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"drive {self.name!r}: alignment {self.alignment} is not a power of two")


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's limits. Every queue, retry and wait is bounded by one of them."""

    min_slice_bytes: int = 2 * MIB
    """No cut makes a part smaller than this."""
    cut_bytes: int = MIB
    """Jobs are cut at multiples of this, counted from the job's first byte: the grain of the checksums."""
    max_slice_bytes: int = 64 * MIB
    """The most that is read at once: what is longer is read side by side, and less is read again when it fails."""
    prefetch_slice_bytes: int = 8 * MIB
    """The most a prefetch may have in flight on a drive."""
    deadline_floor_s: float = 0.25
    deadline_factor: float = 4.0
    """A read is late after max(floor, factor × expected completion)."""
    give_up_s: float = 30.0
    """A late read with no other copy to turn to is waited for this long."""
    back_off_s: float = 0.25
    back_off_max_s: float = 60.0
    forgive_reads: int = 32
    """Good reads in a row after which the back-off is the shortest again."""
    lost_after_checks: int = 2
    """Failed checks in a row after which a drive counts as gone and jobs stop waiting for it."""
    check_bytes: int = 2 * MIB
    check_timeout_s: float = 5.0
    """A drive slower than check_bytes / check_timeout_s, 0.4 MB/s, is as good as none."""
    check_after_s: float = 2.0
    """A drive that has read nothing for this long is checked when work comes of which it gets nothing."""
    max_demand_jobs: int = 4096
    max_prefetch_jobs: int = 512
    max_tries: int = 3
    """Failures of one job on one drive after which that copy is given up."""
    max_hedge_leases: int = 16
    """Second buffers for late reads, over all drives."""
    max_hung_reads: int = 8
    """A drive that is back works beside this many reads that never ended."""
    max_bounces: int = 4
    """Reads that go through a buffer of the reader, each of at most prefetch_slice_bytes; hung ones not counted."""
    rate_floor: float = 1e5

    def __post_init__(self) -> None:
        if not 1 <= self.cut_bytes <= self.min_slice_bytes:
            raise ValueError("1 ≤ cut_bytes ≤ min_slice_bytes does not hold")
        if self.min_slice_bytes % self.cut_bytes:
            raise ValueError("min_slice_bytes is not a multiple of cut_bytes")
        if self.prefetch_slice_bytes < 2 * self.min_slice_bytes + self.cut_bytes:
            raise ValueError("prefetch_slice_bytes is smaller than what may be impossible to cut")
        if self.max_slice_bytes < self.prefetch_slice_bytes:
            raise ValueError("max_slice_bytes is smaller than prefetch_slice_bytes")
        if min(self.max_bounces, self.max_tries, self.lost_after_checks) < 1:
            raise ValueError("max_bounces, max_tries and lost_after_checks are at least 1")


# --- events ---


@dataclass(frozen=True, slots=True)
class Submit:
    """New jobs. Their keys are not live. Prefetch beyond the queue's bound comes straight back as cancelled."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Promote:
    """These jobs are needed for sure now, at this barrier. What is already in flight is not read again."""

    keys: tuple[Key, ...]
    barrier: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants these any more. Reads in flight go on to their end; only then are their leases released."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """The read of this slice has ended: all its bytes are in the lease, and are right as far as was asked to check."""

    slice: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The read of this slice has ended without its bytes. `detail` goes into the message a person may see."""

    slice: int
    fault: Fault
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DriveChecked:
    """The answer to CheckDrive. When a read was timed, `nbytes` and `seconds` teach the drive's rate."""

    drive: str
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed and nothing else: to be sent at `next_wakeup`. Sent too early or too often it does no harm."""


Event = Submit | Promote | Cancel | Completed | Failed | DriveChecked | Tick


# --- actions, to be carried out in the order given ---


@dataclass(frozen=True, slots=True)
class Start:
    """Read this slice, now, and report Completed or Failed once the read has really ended."""

    slice: Slice


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + length) of a job, as one drive delivered them."""

    start: int
    length: int
    drive: str


@dataclass(frozen=True, slots=True)
class JobDone:
    """The job's bytes lie whole in this lease, no read into it is outstanding, and it is the receiver's from now on.

    `pieces` are in the order in which they came.
    """

    key: Key
    lease: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class JobFailed:
    """No copy is left. `reasons` has (drive, fault, detail) for each failure, oldest first."""

    key: Key
    reasons: tuple[tuple[str, Fault, str], ...]


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """The job was cancelled, or was a prefetch for which there was no room."""

    key: Key


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """Every read into this lease has ended and its bytes were not published: the buffer can be used again."""

    lease: int


@dataclass(frozen=True, slots=True)
class DriveSuspect:
    """The drive gets no more work until a check succeeds; it is checked after `retry_s`. lost: nobody waits for it."""

    drive: str
    fault: Fault
    detail: str
    retry_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class DriveBack:
    """The drive is given work again."""

    drive: str


@dataclass(frozen=True, slots=True)
class CheckDrive:
    """Read `nbytes` from this drive, past any cache, and answer DriveChecked."""

    drive: str
    nbytes: int


Action = Start | JobDone | JobFailed | JobCancelled | LeaseReleased | DriveSuspect | DriveBack | CheckDrive
