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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

from runtime.drives.admission import Admission, Ticket
from runtime.drives.buffers import Buffer, BufferPool
from runtime.drives.crew import Crew, Errand, ReadCounts, ReadRecord, Report, Verify
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
    Job,
    JobCancelled,
    JobDone,
    JobFailed,
    Key,
    LeaseReleased,
    Policy,
    Priority,
    Promote,
    Slice,
    Start,
    Submit,
    Tick,
)
from runtime.drives.ledger import Health, Totals
from runtime.drives.outcomes import Dropped, Fate, GuessHeard, Landed, Lost, Outcome, Outcomes
from runtime.drives.scheduler import Scheduler
from runtime.drives.waits import Waits
from runtime.errors import DoesNotFitError, ExpertstreamError, StorageError, refusal

CLOSE_GRACE_S = 1.0
"""How long `close` waits for reads under way."""
PULSE_S = 0.1
"""Whoever waits is asked so often whether it still wants to."""


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
        trace: Callable[[ReadRecord], None] | None = None,
        guess: GuessHeard | None = None,
        watch: Callable[[DriveSuspect | DriveBack], None] | None = None,
    ) -> None:
        """Takes over the devices, `close` closes them, and the pool. Names and alignments are those of the specs.

        kind_of: under which kind a job's reads are counted; without it, or where it says "": demand or prefetch.
        verify: looks at the bytes of a slice before they count as read; says what is wrong with them, or "".
        trace: gets one record for every slice, before its job ends. guess: hears what becomes of each prefetch.
        watch: is told of suspect drives and their return.
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
        self._kind_of, self._watch = kind_of, watch
        self._scheduler = Scheduler([spec for _, spec in drives], policy, uplinks)
        self._crews = {spec.name: Crew(device, spec, self._reported, verify, trace) for device, spec in drives}
        self._kinds: dict[tuple[str, str], ReadCounts] = {}
        self._admission = Admission(pool, self._scheduler.policy.max_demand_jobs)
        self._tickets = self._admission.tickets
        self._outcomes = Outcomes(pool, guess)
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
                if job.key not in self._tickets and not self._outcomes.landed(job.key):
                    self._outcomes.forget(job.key)
                    self._admission.enter(Ticket(job, kind, now, cost))
                elif job.priority is Priority.DEMAND:
                    self._promote([job.key], job.barrier)
            self._admit()

    def promote(self, keys: Iterable[Key], barrier: int) -> list[Key]:
        """These are demand now. Returns those that are neither under way nor landed: they have to be submitted."""
        with self._lock:
            self._must_be_open()
            keys = list(dict.fromkeys(keys))
            self._promote(keys, barrier)
            return [k for k in keys if k not in self._tickets and not self._outcomes.landed(k)]

    def cancel(self, keys: Iterable[Key]) -> None:
        """Nobody wants these any more, landed ones included. Unknown keys are no error: they may just have ended."""
        with self._lock:
            if self._closed or self._broken is not None:
                return
            keys = list(dict.fromkeys(keys))
            self._drop(keys)
            for key in keys:
                self._outcomes.forget(key)
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
        self._outcomes.tell(key, fate)

    def counts(self) -> tuple[dict[str, ReadCounts], dict[str, ReadCounts]]:
        """What was read so far, by drive and by kind (`demand`, `prefetch`, `check`, and what `kind_of` says)."""
        with self._lock:
            drives = {name: replace(crew.counts) for name, crew in self._crews.items()}
            kinds: dict[str, ReadCounts] = {}
            for (_, kind), counts in self._kinds.items():
                kinds.setdefault(kind, ReadCounts()).merge(counts)
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
    def broken(self) -> str:
        """Why it can read nothing any more, on one line; "" while it can."""
        return "" if self._broken is None else str(_told(self._broken))

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
            self._admission.audit()
            self._outcomes.audit()
            assert self._tickets or self._scheduler.idle == (not self._leases)

    def close(self, grace_s: float = CLOSE_GRACE_S) -> int:
        """Cancel everything, wait a little for reads under way, close the devices. Returns how many reads hang."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._broken is None:
                    self._drop(list(self._tickets))
                self._outcomes.forget_all()
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
            raise _told(self._broken)
        if self._closed:
            raise StorageError("the drives are closed: nothing can be read any more")

    def _collect(self, left: dict[Key, None]) -> list[Outcome]:
        """Take what has come of these keys."""
        self._must_be_open()
        ready: list[Outcome] = []
        for key in list(left):
            outcome = self._outcomes.take(key)
            if outcome is None and key not in self._tickets:
                outcome = Dropped(key)
            if outcome is not None:
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
        while (demand := self._admission.next_demand()) is not None and self._make_room(demand):
            batch.append(self._admission.let_in(demand))
        for guess in self._admission.waiting_guesses():
            if self._admission.fits(guess):
                batch.append(self._admission.let_in(guess))
            else:
                self._end(Dropped(guess.job.key))
        if batch:
            self._handle(Submit(tuple(batch)))

    def _make_room(self, demand: Ticket) -> bool:
        """Is there room for its buffer, if need be after guesses have made it?"""
        guesses = self._outcomes.guesses
        while guesses and not self._admission.fits(demand):
            self._outcomes.forget(next(iter(guesses)))
        if not self._admission.fits(demand):
            self._drop([key for key, ticket in self._tickets.items() if ticket.guess and ticket.admitted])
        return self._admission.fits(demand)

    def _promote(self, keys: Iterable[Key], barrier: int) -> None:
        live = []
        for key in keys:
            self._outcomes.need(key, barrier)
            ticket = self._tickets.get(key)
            if ticket is None or not ticket.guess:
                continue
            self._outcomes.tell(key, Fate.NEEDED, ticket.queued, barrier)
            self._admission.promote(ticket, barrier)
            if ticket.admitted:
                live.append(key)
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
                self._end(Dropped(key))
        if live:
            self._handle(Cancel(tuple(live)))

    def _end(self, outcome: Outcome) -> None:
        """A job is over. Where it was the last demand of its barrier, and has landed, so was the drive of its last
        slice."""
        ticket = self._admission.leave(outcome.key)
        landed = isinstance(outcome, Landed)
        if ticket.guess and not landed:
            self._outcomes.tell(outcome.key, Fate.DROPPED, ticket.queued, ticket.job.barrier)
        else:
            self._outcomes.add(outcome, ticket.queued if ticket.guess else None)
        if isinstance(outcome, Landed) and not ticket.guess and not self._admission.awaits(ticket.job.barrier):
            self._crews[outcome.pieces[-1].drive].counts.landed_last += 1
        self._landed.notify_all()

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
            self._admission.lease(ticket)
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
            self._kinds.setdefault((crew.spec.name, errand.kind), ReadCounts()).add(errand, report)
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


def _told(broken: BaseException) -> ExpertstreamError:
    """What whoever waits is told of it, each a new one: it is raised on several threads."""
    if isinstance(broken, DoesNotFitError):
        return DoesNotFitError(str(broken))
    return refusal(broken) or StorageError(f"the reader of the drives stopped in the middle of its work: {broken!r}")
