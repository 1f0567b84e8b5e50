"""A virtual world: drives and a clock that exist only as numbers, under the production scheduler.

    world = World([VirtualDrive("a", rate=7e9)], seed=1)
    world.submit(jobs)
    world.run()

The drives share their rate equally among the reads in flight, after a latency for each; a curve says how much of
the rate n reads together reach; troubles say when a drive fails, hangs, lies, slows down, and comes back. Nothing is
random outside the seed: the same world gives the same story, and every error that leaves it carries the seed.

The executor here keeps to what the scheduler's actions say and checks both sides: reads only from holders, never
more than the depth, never two reads over the same bytes of a lease, no lease handed on while a read into it is
under way, every job ended once, and, with contents, every byte right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from math import inf

from runtime.drives.device import DeviceError
from runtime.drives.jobs import (
    Cancel,
    CheckDrive,
    Completed,
    DriveBack,
    DriveChecked,
    DriveSpec,
    DriveSuspect,
    Event,
    Failed,
    Fault,
    Job,
    JobCancelled,
    JobDone,
    JobFailed,
    Key,
    LeaseReleased,
    Policy,
    Promote,
    Slice,
    Start,
    Submit,
    Tick,
)
from runtime.drives.scheduler import Scheduler


class Ill(Enum):
    """What can be wrong with a virtual drive."""

    EIO = "reads fail"
    GONE = "the drive is unplugged: what is in flight fails, and so does what comes"
    SHORT = "files end too early"
    WRONG = "bytes are not what they should be"
    HANG = "reads do not end until the trouble does"
    SLOW = "the rate is multiplied by `factor`"


BYTE_DUST = 1e-3
"""Part of a byte by which rounding may leave a read unfinished."""
MAX_STEPS = 10_000_000
INVERTED = bytes(range(255, -1, -1))
FAULT_OF = {Ill.EIO: Fault.IO, Ill.GONE: Fault.GONE, Ill.SHORT: Fault.SHORT, Ill.WRONG: Fault.WRONG}


@dataclass(frozen=True, slots=True)
class Trouble:
    """From `start` until `stop`, `share` of the reads that begin on the drive are ill."""

    drive: str
    ill: Ill
    start: float = 0.0
    stop: float = inf
    share: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class VirtualDrive:
    """What a drive really does. `believed` is what the scheduler is told of its rate (default: the truth).

    curve: part of the rate that 1, 2, 3, … reads in flight reach together; the last value holds for more.
    jitter: σ of the lognormal factor each read's work is multiplied by.
    """

    name: str
    rate: float
    latency_s: float = 0.0
    depth: int = 4
    alignment: int = 1
    group: str | None = None
    curve: tuple[float, ...] = (1.0,)
    jitter: float = 0.0
    believed: float | None = -1.0

    def spec(self) -> DriveSpec:
        rate = self.rate if self.believed == -1.0 else self.believed
        return DriveSpec(self.name, self.depth, rate, self.latency_s, self.alignment, self.group)


@dataclass(frozen=True, slots=True)
class Landing:
    """One read as it went: for traces and for questions about who was last. fault: None when it ended well."""

    slice: Slice
    started: float
    ended: float
    fault: Fault | None


@dataclass(slots=True)
class _Flight:
    """A read in a virtual device. `work` is its length times its jitter."""

    slice: Slice | None
    nbytes: int
    started: float
    work: float
    ill: Ill | None


class VirtualDevice:
    """One virtual drive, also as a `Device`: files are given as bytes with `put`.

    Service is processor sharing, kept as in a fluid queue: `_level` is the work each transferring read has had
    since the beginning, so that a read that joins at level x with work w ends at level x + w.
    """

    mode = "virtual"

    def __init__(self, facts: VirtualDrive, troubles: Sequence[Trouble], rng: random.Random) -> None:
        self.facts, self.troubles = facts, [t for t in troubles if t.drive == facts.name]
        self.now = 0.0
        self.uplink_factor = 1.0
        self._rng = rng
        self._files: dict[str, bytes] = {}
        self._level = 0.0
        self._slope = 0.0
        self._transferring: list[tuple[float, int, _Flight]] = []
        self._waiting: list[tuple[float, int, _Flight]] = []
        self._ended: list[tuple[int, _Flight]] = []
        self._count = 0

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def alignment(self) -> int:
        return self.facts.alignment

    # --- as a device ---

    def put(self, file: str, data: bytes) -> None:
        self._files[file] = data

    def read(self, file: str, offset: int, into: memoryview) -> int:
        self.deliver(self._fate()[0], file, offset, into)
        return len(into)

    def close(self) -> None:
        self._files.clear()

    def deliver(self, ill: Ill | None, file: str, offset: int, into: memoryview) -> None:
        """Give the bytes of a read that ends, as its illness has it."""
        if ill in (Ill.EIO, Ill.GONE, Ill.SHORT):
            raise DeviceError(FAULT_OF[ill], f"{self.name}: {file} at {offset}: {ill.value}")
        data = self._files[file][offset : offset + len(into)]
        if len(data) < len(into):
            raise DeviceError(Fault.SHORT, f"{file} at {offset}: wanted {len(into)} bytes, got {len(data)}")
        into[:] = data.translate(INVERTED) if ill is Ill.WRONG else data

    def _fate(self) -> tuple[Ill | None, float]:
        """What is wrong with a read that begins now, and how long it stands still for that."""
        for t in self.troubles:
            if t.start <= self.now < t.stop and t.ill is not Ill.SLOW and self._rng.random() < t.share:
                return t.ill, t.stop if t.ill is Ill.HANG else 0.0
        return None, 0.0

    # --- as a thing in time ---

    def begin(self, part: Slice | None, nbytes: int) -> None:
        """A read is asked for now. None is a check."""
        jitter = self._rng.lognormvariate(0.0, self.facts.jitter) if self.facts.jitter else 1.0
        ill, until = self._fate()
        flight = _Flight(part, nbytes, self.now, nbytes * jitter, ill)
        self._count += 1
        heappush(self._waiting, (max(self.now + self.facts.latency_s, until), self._count, flight))
        self._turn()

    def advance(self, now: float) -> None:
        """Go on to `now`, at which nothing can happen later than `next_change` said."""
        self._level += self._slope * (now - self.now)
        self.now = now
        for t in self.troubles:
            if t.start == now and t.ill in (Ill.GONE, Ill.HANG):
                self._strike(t)
        while self._waiting and self._waiting[0][0] <= now:
            _, n, flight = heappop(self._waiting)
            if flight.ill in (Ill.EIO, Ill.GONE, Ill.SHORT):
                self._ended.append((n, flight))
            else:
                heappush(self._transferring, (self._level + flight.work, n, flight))
        while self._transferring and self._transferring[0][0] <= self._level + BYTE_DUST:
            _, n, flight = heappop(self._transferring)
            self._ended.append((n, flight))
        if not self._transferring:
            self._level = 0.0
        self._turn()

    def landed(self) -> list[_Flight]:
        """The reads that have ended since the last call, in the order they were asked for."""
        ended = [flight for _, flight in sorted(self._ended, key=lambda e: e[0])]
        self._ended.clear()
        return ended

    def demand(self) -> float:
        """Bytes a second the drive would move now if no uplink held it back."""
        n = len(self._transferring)
        if not n:
            return 0.0
        slow = 1.0
        for t in self.troubles:
            if t.ill is Ill.SLOW and t.start <= self.now < t.stop:
                slow *= t.factor
        return self.facts.rate * slow * self.facts.curve[min(n, len(self.facts.curve)) - 1]

    def _turn(self) -> None:
        n = len(self._transferring)
        self._slope = self.demand() * self.uplink_factor / n if n else 0.0

    def throttle(self, factor: float) -> None:
        self.uplink_factor = factor
        self._turn()

    def next_change(self) -> float:
        times = [t for trouble in self.troubles for t in (trouble.start, trouble.stop) if t > self.now]
        if self._waiting:
            times.append(self._waiting[0][0])
        if self._transferring and self._slope:
            times.append(self.now + max(0.0, self._transferring[0][0] - self._level) / self._slope)
        return min(times, default=inf)

    def _strike(self, trouble: Trouble) -> None:
        """A trouble begins that hits what is in flight, too."""
        struck = [(self.now, n, flight) for _, n, flight in self._transferring] + self._waiting
        self._transferring.clear()
        self._waiting.clear()
        for joins, n, flight in struck:
            flight.ill = trouble.ill
            heappush(self._waiting, (max(joins, trouble.stop) if trouble.ill is Ill.HANG else joins, n, flight))


@dataclass(slots=True)
class _Lease:
    data: bytearray | None
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)


class World:
    """The production scheduler, virtual drives, and an executor that believes nothing."""

    def __init__(
        self,
        drives: Sequence[VirtualDrive],
        *,
        seed: int = 0,
        policy: Policy | None = None,
        troubles: Iterable[Trouble] = (),
        uplinks: Mapping[str, float] | None = None,
        audit: bool = False,
        on_done: Callable[[Key], None] | None = None,
    ) -> None:
        """`uplinks`: what each group of drives can move together, bytes/s. `audit` recounts after every event."""
        self.seed, self.now, self.audit, self.on_done = seed, 0.0, audit, on_done
        self._rng = random.Random(seed)
        troubles = tuple(troubles)
        self.devices = {d.name: VirtualDevice(d, troubles, random.Random(self._rng.random())) for d in drives}
        self._uplinks = dict(uplinks or {})
        self.scheduler = Scheduler([d.spec() for d in drives], policy, self._uplinks)
        self.truth: dict[Key, bytes] = {}
        self.done: dict[Key, float] = {}
        self.failed: dict[Key, JobFailed] = {}
        self.cancelled: list[Key] = []
        self.log: list[Landing] = []
        self.suspects: list[tuple[float, DriveSuspect | DriveBack]] = []
        self.events = 0
        self._jobs: dict[Key, Job] = {}
        self._leases: dict[int, _Lease] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._calls_made = 0

    # --- what a story is made of ---

    def submit(self, jobs: Iterable[Job]) -> None:
        batch = tuple(jobs)
        for job in batch:
            assert job.key not in self._jobs, job.key
            self._jobs[job.key] = job
            self.done.pop(job.key, None)
        self.handle(Submit(batch))

    def store(self, job: Job, data: bytes) -> None:
        """Put the bytes of a job where its spans say they are; every byte read is compared with them from then on."""
        self.truth[job.key] = data
        for span in job.spans:
            self.devices[span.drive].put(span.file, bytes(span.offset) + data)

    def promote(self, keys: Iterable[Key], barrier: int) -> None:
        self.handle(Promote(tuple(keys), barrier))

    def cancel(self, keys: Iterable[Key]) -> None:
        self.handle(Cancel(tuple(keys)))

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Do this when the clock says so."""
        self._calls_made += 1
        heappush(self._calls, (time, self._calls_made, call))

    def run(self, until: float = inf, waiting_for: Iterable[Key] = ()) -> float:
        """Let time pass until nothing is left to happen, or until `until`, or until the jobs `waiting_for` have ended.

        Returns the time.
        """
        keys = list(waiting_for)
        try:
            for _ in range(MAX_STEPS):
                if keys and not any(map(self.scheduler.is_live, keys)):
                    return self.now
                if not self._step(until):
                    return self.now
            raise AssertionError("the story does not end")
        except Exception as error:
            error.add_note(f"virtual world, seed {self.seed}, t = {self.now:.9f} s")
            raise

    def finish(self) -> None:
        """Run to the end, and check that nothing is left of anything."""
        self.run()
        assert self.scheduler.idle, f"seed {self.seed}: not idle"
        assert not self._leases, f"seed {self.seed}: leases left"
        assert not self._jobs, f"seed {self.seed}: jobs that never ended: {list(self._jobs)}"
        self.scheduler.audit()

    def handle(self, event: Event) -> None:
        self.events += 1
        actions = self.scheduler.handle(event, self.now)
        if self.audit:
            self.scheduler.audit()
        for action in actions:
            match action:
                case Start(part):
                    self._start(part)
                case JobDone():
                    self._publish(action)
                case JobFailed(key):
                    del self._jobs[key]
                    self.failed[key] = action
                case JobCancelled(key):
                    del self._jobs[key]
                    self.cancelled.append(key)
                case LeaseReleased(lease):
                    assert not self._leases[lease].reads, f"lease {lease} released with a read under way"
                    del self._leases[lease]
                case DriveSuspect() | DriveBack():
                    self.suspects.append((self.now, action))
                case CheckDrive(drive, nbytes):
                    self.devices[drive].begin(None, nbytes)
                    self._share_uplinks()

    # --- the machinery ---

    def _step(self, until: float) -> bool:
        """Go to the next thing that happens and handle it. False when there is none, or none before `until`."""
        if until == inf and self.scheduler.idle and not self._calls:
            return False  # drives that are lost would be checked for ever
        wakeup = self.scheduler.next_wakeup
        when = min(d.next_change() for d in self.devices.values())
        if self._calls:
            when = min(when, self._calls[0][0])
        if wakeup is not None:
            when = min(when, max(wakeup, self.now))
        if when > until or when == inf:
            self._advance(self.now if until == inf else until)
            return False
        self._advance(when)
        for device in self.devices.values():
            for flight in device.landed():
                self._land(device, flight)
        while self._calls and self._calls[0][0] <= self.now:
            heappop(self._calls)[2]()
        wakeup = self.scheduler.next_wakeup
        if wakeup is not None and wakeup <= self.now:
            self.handle(Tick())
        return True

    def _advance(self, now: float) -> None:
        self.now = now
        for device in self.devices.values():
            device.advance(now)
        self._share_uplinks()

    def _share_uplinks(self) -> None:
        for group, limit in self._uplinks.items():
            members = [d for d in self.devices.values() if d.facts.group == group]
            wanted = sum(d.demand() for d in members)
            for d in members:
                d.throttle(min(1.0, limit / wanted) if wanted else 1.0)

    def _start(self, part: Slice) -> None:
        job = self._jobs[part.key]
        span = next((s for s in job.spans if s.drive == part.drive), None)
        assert span is not None, f"{part.drive} holds no copy of {part.key}"
        assert (part.file, part.offset) == (span.file, span.offset + part.start)
        assert 0 <= part.start < part.start + part.length <= job.length == part.job_bytes
        facts = self.devices[part.drive].facts
        assert part.bounce or (span.offset - part.phase) % facts.alignment == 0, "phase"
        if part.lease not in self._leases:
            self._leases[part.lease] = _Lease(bytearray(job.length) if self.truth else None)
        reads = self._leases[part.lease].reads
        for start, length in reads.values():
            assert part.start + part.length <= start or start + length <= part.start, "two reads over the same bytes"
        reads[part.id] = (part.start, part.length)
        self.devices[part.drive].begin(part, part.length)
        self._share_uplinks()

    def _land(self, device: VirtualDevice, flight: _Flight) -> None:
        part = flight.slice
        if part is None:
            seconds = self.now - flight.started
            ok = flight.ill is None or flight.ill is Ill.HANG
            self.handle(DriveChecked(device.name, ok, flight.nbytes, seconds, "" if ok else str(flight.ill)))
            return
        lease = self._leases[part.lease]
        del lease.reads[part.id]
        fault, detail = None, ""
        try:
            if lease.data is None:
                if flight.ill in FAULT_OF:
                    raise DeviceError(FAULT_OF[flight.ill], flight.ill.value)
            else:
                into = memoryview(lease.data)[part.start : part.start + part.length]
                device.deliver(flight.ill, part.file, part.offset, into)
                if into != self.truth[part.key][part.start : part.start + part.length]:
                    raise DeviceError(Fault.WRONG, f"{part.file} at {part.offset}: checksum does not match")
        except DeviceError as error:
            fault, detail = error.fault, str(error)
        self.log.append(Landing(part, flight.started, self.now, fault))
        self.handle(Failed(part.id, fault, detail) if fault else Completed(part.id))

    def _publish(self, action: JobDone) -> None:
        job = self._jobs.pop(action.key)
        lease = self._leases.pop(action.lease)
        assert not lease.reads, "published with a read under way"
        end = 0
        for piece in sorted(action.pieces, key=lambda p: p.start):
            assert piece.start == end, "a byte delivered twice or not at all"
            end += piece.length
        assert end == job.length
        if lease.data is not None:
            assert lease.data == self.truth[action.key], f"wrong bytes in {action.key}"
        self.done[action.key] = self.now
        if self.on_done is not None:
            self.on_done(action.key)
