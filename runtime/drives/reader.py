"""The engine that reads: the scheduler under real threads and a real clock.

    reader = Reader([(device, spec), ...], BufferPool(limit_bytes, alignment))
    reader.submit(jobs)
    for outcome in reader.as_landed(keys):        # Landed, Lost or Dropped, in the order in which they come
        use outcome.buffer.view; outcome.buffer.release()
    reader.close()

One lock. The scheduler, the queues of jobs and all counts are touched only with it held, and nothing that can wait
happens meanwhile: no read, no open, no hook but `guess`, which only notes. A thread of a drive takes a slice, reads it
with the lock free, reports how the read ended, and in the same breath carries out what the scheduler answers. So:

* A buffer is handed on only after every read into it has reported: by the scheduler's rule, since a report comes from
  the thread that read, after it has read.
* The scheduler never has more reads live on a drive than its depth; a read beyond that has a thread of its own only
  because others hang. Threads are made when one is needed, at most depth + hung reads + 1 (a check) for a drive.
* A read that hangs holds its thread, its buffer and its descriptor, and nothing else. Threads are daemons: neither
  `close` nor the end of the process waits for it.

Memory. A job is admitted to the scheduler when the pool has room for its buffer. Demand that has to wait is admitted
in the order of its barriers as buffers are released; a prefetch that has to wait is dropped. Only second buffers for
late reads go beyond the pool's limit, by at most `Policy.max_hedge_leases` of them. Demand does not wait for memory
that guesses hold: landed ones that nobody has taken are dropped, those under way are cancelled.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf, nan

from runtime.drives.buffers import Buffer, BufferPool
from runtime.drives.crew import Counts, Crew, Errand, Fate, Report, Trace, Verify
from runtime.drives.device import Device
from runtime.drives.jobs import (
    Action,
    Cancel,
    CheckDrive,
    Completed,
    DriveBack,
    DriveSpec,
    DriveSuspect,
    Event,
    Fault,
    Job,
    JobCancelled,
    JobDone,
    JobFailed,
    Key,
    LeaseReleased,
    Piece,
    Policy,
    Priority,
    Promote,
    Slice,
    Start,
    Submit,
    Tick,
)
from runtime.drives.ledger import Health, Totals
from runtime.drives.scheduler import Scheduler
from runtime.drives.waits import DEMAND, LATE, Waits
from runtime.errors import DoesNotFitError, StorageError

GUESS = 1 << 62
"""Where prefetch stands in the queue of jobs that wait for memory: behind every barrier."""
CLOSE_GRACE_S = 1.0
"""How long `close` waits for reads under way."""
PULSE_S = 0.1
"""Whoever waits is asked so often whether it still wants to."""


# --- what comes back ---


@dataclass(frozen=True, slots=True)
class Landed:
    """The job's bytes, whole, in `buffer`; the receiver releases it. pieces: which drive delivered what, in the order
    in which it came."""

    key: Key
    buffer: Buffer
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """No copy is left. reasons: (drive, fault, detail) of each failure, oldest first."""

    key: Key
    reasons: tuple[tuple[str, Fault, str], ...]

    def error(self, what: str) -> StorageError:
        """`what` names the job for a person: `layer 3, expert 17`."""
        last = {drive: f"drive {drive}: {fault.value}: {detail}" for drive, fault, detail in self.reasons}
        return StorageError(f"{what}: no copy left that can be read; {'; '.join(last.values()) or 'no drive answers'}")


@dataclass(frozen=True, slots=True)
class Dropped:
    """The job was cancelled, or was a prefetch for which there was no room."""

    key: Key


Outcome = Landed | Lost | Dropped


# --- the engine's own notes ---


@dataclass(slots=True)
class _Ticket:
    """A job somebody waits for. admitted: the scheduler has it. leased: its buffer is taken, no longer promised.
    late: it was a guess, and was needed before it was there."""

    job: Job
    kind: str
    queued: float
    cost: int
    admitted: bool = False
    leased: bool = False
    late: bool = False

    @property
    def awaited(self) -> str:
        """What somebody waits for who waits for this."""
        return self.kind or (LATE if self.late else DEMAND)


class Reader:
    """See the top of the file. Safe to call from any thread."""

    def __init__(
        self,
        drives: Sequence[tuple[Device, DriveSpec]],
        pool: BufferPool,
        *,
        policy: Policy | None = None,
        uplinks: Mapping[str, float] | None = None,
        kind_of: Callable[[Job], str] | None = None,
        verify: Verify | None = None,
        trace: Callable[[Trace], None] | None = None,
        guess: Callable[[Key, Fate, float, int], None] | None = None,
        watch: Callable[[DriveSuspect | DriveBack], None] | None = None,
    ) -> None:
        """Takes over the devices, `close` closes them, and the pool. Names and alignments are those of the specs.

        kind_of: under which kind a job's reads are counted; without it, or where it says "": demand or prefetch.
        verify: looks at the bytes of a slice before they count as read; says what is wrong with them, or "".
        trace: gets one record for every slice, before its job ends. guess: hears what becomes of a prefetch: its key,
        its fate, when it was submitted, and the barrier it is needed at. watch: is told of suspect drives and their
        return.
        `verify` and `trace` are called from several threads at once, `watch` from the one that keeps time; they are
        quick and do not raise.
        """
        for device, spec in drives:
            if device.name != spec.name or pool.alignment % spec.alignment or spec.alignment % device.alignment:
                raise ValueError(
                    f"drive {spec.name} with alignment {spec.alignment}: its device is {device.name} with "
                    f"{device.alignment}, buffers have {pool.alignment}"
                )
        self.pool, self.waits = pool, Waits()
        self._kind_of, self._watch, self._guess = kind_of, watch, guess
        self._scheduler = Scheduler([spec for _, spec in drives], policy, uplinks)
        self._crews = {spec.name: Crew(device, spec, self._reported, verify, trace) for device, spec in drives}
        self._kinds: dict[tuple[str, str], Counts] = {}
        self._tickets: dict[Key, _Ticket] = {}
        self._outcomes: dict[Key, Outcome] = {}
        self._guesses: dict[Key, float] = {}
        self._pending: list[tuple[int, int, Key]] = []
        self._barriers: Counter[int] = Counter()
        self._arrivals = 0
        self._promised = 0
        self._demand_live = 0
        self._leases: dict[int, Buffer] = {}
        self._news: list[DriveSuspect | DriveBack] = []
        self._closed = False
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)
        self._alarm = threading.Condition(self._lock)
        self._alarm_at = -inf
        self._timekeeper = threading.Thread(target=self._keep_time, name="drives-clock", daemon=True)
        self._timekeeper.start()
        pool.after_release = self._room

    # --- for whoever needs bytes ---

    def submit(self, jobs: Iterable[Job]) -> None:
        """Ask for jobs; never waits. What is under way or has landed is not read twice; demand promotes a prefetch.

        Raises DoesNotFitError for a job that no buffer can hold, ValueError for one whose spans are not copies of each
        other on different drives of this reader; then nothing is submitted.
        """
        batch = [(job, self._cost(job), self._kind_of(job) if self._kind_of else "") for job in jobs]
        with self._lock:
            self._must_be_open()
            now = time.monotonic()
            for job, cost, kind in batch:
                for span in job.spans:
                    self._crews[span.drive].note(span)
                if job.key not in self._tickets and not isinstance(self._outcomes.get(job.key), Landed):
                    self._outcomes.pop(job.key, None)
                    self._tickets[job.key] = _Ticket(job, kind, now, cost)
                    if job.priority is Priority.DEMAND:
                        self._barriers[job.barrier] += 1
                    self._queue(job)
                elif job.priority is Priority.DEMAND:
                    self._promote([job.key], job.barrier)
            self._admit()

    def promote(self, keys: Iterable[Key], barrier: int) -> list[Key]:
        """These are demand now. Returns those that are neither under way nor landed: they have to be submitted."""
        with self._lock:
            self._must_be_open()
            keys = list(dict.fromkeys(keys))
            self._promote(keys, barrier)
            return [k for k in keys if k not in self._tickets and not isinstance(self._outcomes.get(k), Landed)]

    def cancel(self, keys: Iterable[Key]) -> None:
        """Nobody wants these any more, landed ones included. Unknown keys are no error: they may just have ended."""
        with self._lock:
            if self._closed or self._broken is not None:
                return
            keys = list(dict.fromkeys(keys))
            self._drop(keys)
            for key in keys:
                self._forget(key)
            self._admit()
            self._landed.notify_all()

    def as_landed(
        self, keys: Collection[Key], timeout: float | None = None, pulse: Callable[[], None] | None = None
    ) -> Iterator[Outcome]:
        """Yield the outcome of each key, as they come; a key that nobody reads and that has no outcome is Dropped.

        Each outcome is given once, to one caller. `pulse` is called every PULSE_S while nothing comes; what it raises
        ends the wait. Raises TimeoutError when nothing comes for `timeout` seconds, and StorageError when the reader
        is closed or broken. What is waited for is added up in `waits`, which belongs to one thread.
        """
        left = dict.fromkeys(keys)
        patience = inf if timeout is None else timeout
        while left:
            began, live = time.monotonic(), None
            until = began + patience
            while True:
                with self._lock:
                    if ready := self._collect(left):
                        break
                    if live is None:
                        live = {key: self._tickets[key] for key in left}
                    wait = until - time.monotonic()
                    if wait <= 0:
                        raise TimeoutError(f"{len(left)} jobs have not ended: {list(left)[:4]}")
                    wait = wait if pulse is None else min(wait, PULSE_S)
                    if self._landed.wait(None if wait == inf else wait):
                        until = time.monotonic() + patience
                if pulse is not None:
                    pulse()
            if live is not None:
                came = ready[0].key
                self.waits.add(live[came].awaited, came, began, time.monotonic())
            yield from ready

    def poll(self, keys: Iterable[Key]) -> list[Outcome]:
        """The outcomes that `as_landed` would give at once. Never waits."""
        with self._lock:
            return self._collect(dict.fromkeys(keys))

    def judge(self, key: Key, fate: Fate) -> None:
        """Whoever took a prefetch that had landed tells what became of it."""
        if self._guess is not None:
            self._guess(key, fate, nan, -1)

    def counts(self) -> tuple[dict[str, Counts], dict[str, Counts]]:
        """What was read so far, by drive and by kind (`demand`, `prefetch`, `check`, and what `kind_of` says)."""
        with self._lock:
            drives = {name: replace(crew.counts) for name, crew in self._crews.items()}
            kinds: dict[str, Counts] = {}
            for (_, kind), counts in self._kinds.items():
                kinds.setdefault(kind, Counts()).merge(counts)
            return drives, kinds

    def last_failures(self) -> dict[str, str]:
        """By drive, what failed last and why, on one line; "" where nothing did."""
        with self._lock:
            return {name: crew.last_failure for name, crew in self._crews.items()}

    def bytes_read(self) -> dict[tuple[str, str], int]:
        """The requested bytes of `counts`, by drive and kind."""
        with self._lock:
            return {of: counts.requested_bytes for of, counts in self._kinds.items()}

    def modes(self) -> dict[str, str]:
        """How bytes come from each drive: `direct`, `nocache`, `buffered: reason`."""
        return {name: crew.device.mode for name, crew in self._crews.items()}

    def rates(self) -> dict[str, float]:
        """The rate learned of each drive, bytes/s."""
        with self._lock:
            return {name: self._scheduler.rate(name) for name in self._crews}

    def totals(self) -> dict[str, Totals]:
        """What the scheduler counts by drive, wasted and bounced bytes among it; copies."""
        with self._lock:
            return {name: replace(totals) for name, totals in self._scheduler.totals().items()}

    def health(self, drive: str) -> Health:
        """Is the drive given work?"""
        with self._lock:
            return self._scheduler.health(drive)

    @property
    def idle(self) -> bool:
        """No job is live, nothing is being read, late reads and checks included."""
        with self._lock:
            checking = sum(crew.checking for crew in self._crews.values())
            return self._scheduler.idle and not self._tickets and not self._leases and not checking

    def audit(self) -> None:
        """AssertionError where a count does not fit what it counts."""
        with self._lock:
            self._scheduler.audit()
            tickets = self._tickets.values()
            assert self._promised == sum(t.cost for t in tickets if t.admitted and not t.leased)
            assert {p[2] for p in self._pending} == {k for k, t in self._tickets.items() if not t.admitted}
            assert self._demand_live == sum(t.admitted and t.job.priority is Priority.DEMAND for t in tickets)
            assert self._barriers == Counter(t.job.barrier for t in tickets if t.job.priority is Priority.DEMAND)
            assert self._guesses.keys() <= self._outcomes.keys()
            if not self._tickets:
                assert not self._promised
                assert self._scheduler.idle == (not self._leases)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> int:
        """Cancel everything, wait a little for reads under way, close the devices. Returns how many reads hang."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._broken is None:
                    self._drop(list(self._tickets))
                for key in list(self._outcomes):
                    self._forget(key)
                for crew in self._crews.values():
                    crew.dismiss()
                self._landed.notify_all()
                self._alarm.notify_all()
        until = time.monotonic() + grace_s
        threads = [t for crew in self._crews.values() for t in crew.threads]
        for thread in (self._timekeeper, *threads):
            thread.join(max(0.0, until - time.monotonic()))
        for crew in self._crews.values():
            crew.device.close()
        return sum(t.is_alive() for t in threads)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cost(self, job: Job) -> int:
        """What a job's buffer counts; see `submit` for what is wrong with some jobs."""
        drives = {s.drive for s in job.spans}
        if not drives or len(drives) < len(job.spans) or not drives <= self._crews.keys():
            raise ValueError(f"job {job.key!r}: its drives are {[s.drive for s in job.spans]}, of {list(self._crews)}")
        if any(s.length != job.length or s.length < 1 or s.offset < 0 for s in job.spans):
            raise ValueError(f"job {job.key!r}: its spans are not all of one positive length")
        cost = self.pool.cost(max(job.length, job.room))
        if cost > self.pool.limit_bytes:
            raise DoesNotFitError(
                f"job {job.key!r} needs a buffer of {cost} bytes, all buffers together may have "
                f"{self.pool.limit_bytes}: give them more"
            )
        return cost

    # --- jobs; with the lock held ---

    def _must_be_open(self) -> None:
        if self._broken is not None:
            raise StorageError(f"the reader of the drives stopped in the middle of its work: {self._broken!r}")
        if self._closed:
            raise StorageError("the drives are closed: nothing can be read any more")

    def _queue(self, job: Job) -> None:
        """The job waits for memory."""
        self._arrivals += 1
        rank = job.barrier if job.priority is Priority.DEMAND else GUESS
        insort(self._pending, (rank, self._arrivals, job.key))

    def _collect(self, left: dict[Key, None]) -> list[Outcome]:
        """Take what has come of these keys."""
        self._must_be_open()
        ready: list[Outcome] = []
        for key in list(left):
            outcome = self._outcomes.pop(key, None)
            if outcome is None and key not in self._tickets:
                outcome = Dropped(key)
            if outcome is not None:
                self._settle(key, Fate.TAKEN)
                ready.append(outcome)
                del left[key]
        return ready

    def _room(self) -> None:
        """Somebody has released a buffer."""
        with self._lock:
            if self._broken is None:
                self._admit()

    def _admit(self) -> None:
        """Give the scheduler what there is room for, in order: demand first, and never behind guesses."""
        batch: list[Job] = []
        slots = self._scheduler.policy.max_demand_jobs - self._demand_live
        while self._pending and self._pending[0][0] < GUESS and slots > 0:
            ticket = self._tickets[self._pending[0][2]]
            if not self._fits(ticket.cost, for_demand=True):
                break
            slots -= 1
            self._demand_live += 1
            del self._pending[0]
            batch.append(self._let_in(ticket))
        guesses = [self._tickets[p[2]] for p in self._pending if p[0] >= GUESS]
        if guesses:
            self._pending = [p for p in self._pending if p[0] < GUESS]
        for ticket in guesses:
            if self._fits(ticket.cost, for_demand=False):
                batch.append(self._let_in(ticket))
            else:
                self._end(Dropped(ticket.job.key))
        if batch:
            self._handle(Submit(tuple(batch)))

    def _let_in(self, ticket: _Ticket) -> Job:
        ticket.admitted = True
        self._promised += ticket.cost
        return ticket.job

    def _fits(self, cost: int, for_demand: bool) -> bool:
        """Is there room for a buffer, if need be after guesses have made it?"""
        if cost <= self._free_bytes or not for_demand:
            return cost <= self._free_bytes
        while self._guesses and cost > self._free_bytes:
            self._forget(next(iter(self._guesses)))
        if cost > self._free_bytes:
            guesses = [k for k, t in self._tickets.items() if t.job.priority is Priority.PREFETCH and t.admitted]
            self._drop(guesses)
        return cost <= self._free_bytes

    @property
    def _free_bytes(self) -> int:
        return self.pool.limit_bytes - self.pool.in_use - self._promised

    def _promote(self, keys: Iterable[Key], barrier: int) -> None:
        live = []
        for key in keys:
            self._settle(key, Fate.NEEDED, barrier)
            ticket = self._tickets.get(key)
            if ticket is None or ticket.job.priority is Priority.DEMAND:
                continue
            if self._guess is not None:
                self._guess(key, Fate.NEEDED, ticket.queued, barrier)
            ticket.job = replace(ticket.job, priority=Priority.DEMAND, barrier=barrier)
            ticket.late = True
            self._barriers[barrier] += 1
            if ticket.admitted:
                self._demand_live += 1
                live.append(key)
            else:
                self._pending = [p for p in self._pending if p[2] != key]
                self._queue(ticket.job)
        if live:
            self._handle(Promote(tuple(live), barrier))

    def _drop(self, keys: Iterable[Key]) -> None:
        """Cancel those of these jobs that are live."""
        live = []
        for key in keys:
            ticket = self._tickets.get(key)
            if ticket is not None and ticket.admitted:
                live.append(key)
            elif ticket is not None:
                self._pending = [p for p in self._pending if p[2] != key]
                self._end(Dropped(key))
        if live:
            self._handle(Cancel(tuple(live)))

    def _forget(self, key: Key) -> None:
        """Throw away an outcome that nobody has taken."""
        outcome = self._outcomes.pop(key, None)
        self._settle(key, Fate.UNUSED)
        if isinstance(outcome, Landed):
            self.pool.give(outcome.buffer)

    def _settle(self, key: Key, fate: Fate, barrier: int = -1) -> None:
        """If this is a prefetch that has landed, it is none any more."""
        queued = self._guesses.pop(key, None)
        if queued is not None and self._guess is not None:
            self._guess(key, fate, queued, barrier)

    def _end(self, outcome: Outcome) -> None:
        """A job is over."""
        ticket = self._tickets.pop(outcome.key)
        guess = ticket.job.priority is Priority.PREFETCH
        if ticket.admitted:
            self._demand_live -= not guess
            if not ticket.leased:
                self._promised -= ticket.cost
        if not guess:
            self._leave(ticket.job.barrier, outcome)
        if isinstance(outcome, Landed) or not guess:
            self._outcomes[outcome.key] = outcome
            if guess:
                self._guesses[outcome.key] = ticket.queued
        elif self._guess is not None:
            self._guess(outcome.key, Fate.DROPPED, ticket.queued, ticket.job.barrier)
        self._landed.notify_all()

    def _leave(self, barrier: int, outcome: Outcome) -> None:
        """A demand job is over: if it was the last of its barrier and has landed, the drive of its last slice was."""
        self._barriers[barrier] -= 1
        if not self._barriers[barrier]:
            del self._barriers[barrier]
            if isinstance(outcome, Landed):
                self._crews[outcome.pieces[-1].drive].counts.landed_last += 1

    # --- what the scheduler says; with the lock held ---

    def _handle(self, event: Event) -> None:
        try:
            for action in self._scheduler.handle(event, time.monotonic()):
                self._act(action)
        except BaseException as error:  # a bug, or Ctrl-C: nothing adds up any more, and nobody may wait for it to
            self._broken = error
            self._landed.notify_all()
            raise
        if (self._scheduler.next_wakeup or inf) < self._alarm_at:
            self._alarm.notify()

    def _act(self, action: Action) -> None:
        match action:
            case Start(part):
                self._start(part)
            case JobDone(key, lease, pieces):
                self._end(Landed(key, self._leases.pop(lease), pieces))
            case JobFailed(key, reasons):
                self._end(Lost(key, reasons))
            case JobCancelled(key):
                self._end(Dropped(key))
            case LeaseReleased(lease):
                self.pool.give(self._leases.pop(lease))
            case DriveSuspect() | DriveBack():
                self._news.append(action)
                self._alarm.notify()
            case CheckDrive(drive, nbytes):
                if not self._closed:
                    self._crews[drive].check(nbytes)

    def _start(self, part: Slice) -> None:
        ticket = self._tickets[part.key]
        buffer = self._leases.get(part.lease)
        if buffer is None:
            buffer = self._leases[part.lease] = self.pool.take(part.job_bytes, part.phase, ticket.job.room)
            if not ticket.leased:
                ticket.leased = True
                self._promised -= ticket.cost
        view = buffer.view[part.start : part.start + part.length]
        kind = ticket.kind or part.priority.name.lower()
        self._crews[part.drive].send(Errand(part, view, None, kind, ticket.queued))

    # --- on other threads ---

    def _reported(self, crew: Crew, errand: Errand, report: Report) -> None:
        """A thread of a crew has done an errand."""
        with self._lock:
            crew.counts.add(errand, report)
            if report.fault is not None and not isinstance(report.event, Completed):
                crew.last_failure = errand.failure(report.fault, report.event.detail)
            self._kinds.setdefault((crew.spec.name, errand.kind), Counts()).add(errand, report)
            if errand.slice is not None and report.fault is None:
                crew.credit(errand.slice)
            crew.waiting += 1
            crew.checking -= errand.slice is None
            if self._broken is None:
                with suppress(Exception):  # whoever waits is told
                    self._handle(report.event)
                    self._admit()

    def _keep_time(self) -> None:
        """The thread that tells the scheduler when something falls due, and the watcher what happened."""
        while True:
            with self._lock:
                if self._closed or self._broken is not None:
                    return
                now, due = time.monotonic(), self._scheduler.next_wakeup or inf
                if due <= now:
                    with suppress(Exception):
                        self._handle(Tick())
                        self._admit()
                elif not self._news:
                    self._alarm_at = due
                    self._alarm.wait(None if due == inf else due - now)
                    self._alarm_at = -inf
                news, self._news = self._news, []
            for item in news:
                if self._watch is not None:
                    self._watch(item)
