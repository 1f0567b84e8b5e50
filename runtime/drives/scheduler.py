"""Which drive reads which bytes, and when: a state machine that never reads, never sleeps and never looks at a clock.

    scheduler = Scheduler(drives)
    for action in scheduler.handle(event, now): carry it out
    sleep until something happens or until scheduler.next_wakeup, whatever comes first; then handle that

The theory. A layer can go on when its slowest read has landed, so what counts is when the last byte of a barrier
arrives, not how many bytes a second flow. Bytes that several drives hold are poured over them so that all finish
together (`plan.py`); a drive's expected completion is its latency, plus what is in flight and planned ahead on it,
plus the slice, over the rate learned from what it really did (`rates.py`).

The rules.

 1. Nothing is bound to a drive before it starts. What has not started is planned anew when anything it was planned
    from has changed. A drive takes at most half of what it should still take at a time (but whole small rests), so
    that the cuts get finer towards the end, where a wrong rate would hurt.
 2. Barriers in their order; within one, what has the fewest holders first. A lone holder gets a job whole.
 3. Demand before any prefetch that has not started. A prefetch starts only on a drive with nothing in flight that
    holds no unstarted demand, one bounded slice at a time: demand waits for no more than that.
 4. A job is published whole or not at all, exactly once, in a lease no read is writing to.
 5. A failed slice is read again from another holder. A copy that is bad is given up for the job; a drive that
    misbehaves (BLAME) is suspect: it sits out, with growing back-off, until a check succeeds.
 6. A read cannot be taken back. One past its deadline is hedged: the job is read again, from other drives, into
    another lease; the first whole lease wins. A lease is released when every read into it has ended.
 7. A job fails when no copy is left: all given up, or their drives lost.
 8. Everything is bounded by `Policy`. When nothing is live, all counters are zero (`audit` checks it).
 9. An event against the rules raises IllegalEvent and changes nothing.

What this file does not know: files, threads, buffers, experts, and what time it is.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

from runtime.drives.jobs import (
    Action,
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
    IllegalEvent,
    JobCancelled,
    JobDone,
    JobFailed,
    Key,
    Kind,
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
from runtime.drives.ledger import Attempt, BarrierQueue, BytePool, DriveLedger, Health, Read, Totals, Work
from runtime.drives.plan import cut, share_out
from runtime.drives.rates import Uplink

TAKE = 3
"""A drive takes at most the TAKEth part of what it should still take at a time, or a rest of two smallest slices."""
STRIKES_OUT = 3


class Blame(NamedTuple):
    """What a fault says about the copy (is it given up for this job at once?) and about the drive."""

    give_up_copy: bool
    strikes: int


BLAME = {
    Fault.IO: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.GONE: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.LATE: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.SHORT: Blame(give_up_copy=True, strikes=1),
    Fault.WRONG: Blame(give_up_copy=True, strikes=1),
}
"""A bad copy is not yet a bad drive: three in a row, with fewer than STRIKES_FORGIVEN good reads between, are."""
STRIKES_FORGIVEN = 8
RATE_MOVED = 0.03
"""A plan is made anew when a rate it was made with has moved by more than this part."""
CHECK_WEIGHT = 0.75
"""What one timed check counts in the learned rate of a drive that has read nothing for a while."""
LOOK_AHEAD = 8
"""Jobs of one pool looked at for one whose buffer fits the drive's phase."""


class Scheduler:
    """See the top of the file. One caller at a time; `handle` costs microseconds and never blocks."""

    def __init__(
        self, drives: Sequence[DriveSpec], policy: Policy | None = None, uplinks: dict[str, float] | None = None
    ) -> None:
        """`uplinks` gives the rate in bytes/s of the groups for which a probe knows it."""
        self.policy = policy or Policy()
        self._drives = [DriveLedger(i, spec, self.policy) for i, spec in enumerate(drives)]
        self._index = {d.name: d.index for d in self._drives}
        if len(self._index) != len(drives):
            raise ValueError("two drives have the same name")
        self._uplinks: list[Uplink] = []
        for group in sorted({d.spec.group for d in self._drives if d.spec.group is not None}):
            members = [d for d in self._drives if d.spec.group == group]
            prior = (uplinks or {}).get(group)
            uplink = Uplink({d.index: d.rate for d in members}, prior, self.policy.rate_floor)
            self._uplinks.append(uplink)
            for d in members:
                d.uplink = uplink
        self._now = -inf
        self._works: dict[Key, Work] = {}
        self._prefetch_jobs = 0
        self._queues: list[BarrierQueue] = []
        self._parked: dict[Attempt, None] = {}
        self._reads: dict[int, Read] = {}
        self._zombies: dict[Attempt, None] = {}
        self._rivals = 0
        self._bounces = 0
        self._ids = 0
        self._due = inf
        self._learned = [d.rate.value for d in self._drives]
        self._rates = list(self._learned)
        self._sort_drives()

    # --- what anyone may ask ---

    @property
    def next_wakeup(self) -> float | None:
        """The next moment at which a deadline, hedge, back-off or check falls due; never too late, perhaps too early."""
        return None if self._due == inf else self._due

    @property
    def idle(self) -> bool:
        """No job is live and no read is in flight, late ones included."""
        return not self._works and not self._reads

    def is_live(self, key: Key) -> bool:
        """Submitted, and neither done, failed nor cancelled."""
        return key in self._works

    def health(self, drive: str) -> Health:
        return self._drives[self._index[drive]].health

    def rate(self, drive: str) -> float:
        """The learned rate of the drive alone, bytes/s."""
        return self._drives[self._index[drive]].rate.value

    def totals(self) -> dict[str, Totals]:
        return {d.name: d.totals for d in self._drives}

    # --- events ---

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at the time `now`, return what must be done, in order. Raises IllegalEvent."""
        if now < self._now:
            raise IllegalEvent(f"time went back from {self._now} to {now}")
        check, apply = _RULES[type(event)]
        check(self, event)
        if self._now == -inf:
            for drive in self._drives:
                drive.last_used = now
        self._now = now
        out: list[Action] = []
        apply(self, event, out)
        if now >= self._due:
            self._look_at_what_is_due(out)
        self._dispatch(out)
        return out

    def _may_submit(self, event: Submit) -> None:
        seen: set[Key] = set()
        demand = len(self._works) - self._prefetch_jobs
        for job in event.jobs:
            key, spans = job.key, job.spans
            if key in self._works or key in seen:
                raise IllegalEvent(f"job {key!r} is live already: promote it, or cancel it first")
            seen.add(key)
            demand += job.priority is Priority.DEMAND
            drives: set[str] = set()
            for s in spans:
                if s.drive not in self._index:
                    raise IllegalEvent(f"job {key!r} names the drive {s.drive!r}, which does not exist")
                if s.length < 1 or s.length != spans[0].length or s.offset < 0:
                    raise IllegalEvent(f"job {key!r}: its spans are not all of one positive length")
                drives.add(s.drive)
            if len(drives) != len(spans) or not spans:
                raise IllegalEvent(f"job {key!r} names a drive twice, or none")
        if demand > self.policy.max_demand_jobs:
            raise IllegalEvent(f"{demand} demand jobs would be live, at most {self.policy.max_demand_jobs} may be")

    def _submit(self, event: Submit, out: list[Action]) -> None:
        for job in event.jobs:
            prefetch = job.priority is Priority.PREFETCH
            if prefetch and self._prefetch_jobs >= self.policy.max_prefetch_jobs:
                out.append(JobCancelled(job.key))
                continue
            spans, holders, phases = {}, 0, set()
            for s in job.spans:
                drive = self._drives[self._index[s.drive]]
                spans[drive.index] = s
                holders |= drive.bit
                if drive.alignment > 1:
                    phases.add((drive.alignment, s.offset % drive.alignment))
            work = Work(job, spans, holders, job.priority, job.barrier, one_phase=len(phases) < 2)
            work.attempt = Attempt(work, Kind.FIRST, [(0, job.length)])
            self._works[job.key] = work
            self._prefetch_jobs += prefetch
            self._enqueue(work, out)
        self._check_drives(out, stale=True)

    def _may_promote(self, event: Promote) -> None:
        self._must_be_live(event.keys)

    def _promote(self, event: Promote, out: list[Action]) -> None:
        for key in event.keys:
            work = self._works[key]
            self._prefetch_jobs -= work.priority is Priority.PREFETCH
            self._dequeue(work.attempt)
            work.priority, work.barrier = Priority.DEMAND, event.barrier
            for read in self._reads.values():
                if read.attempt.work is work:
                    read.prefetch = False
            if work.attempt.todo:
                self._enqueue(work, out)

    def _may_cancel(self, event: Cancel) -> None:
        self._must_be_live(event.keys)

    def _cancel(self, event: Cancel, out: list[Action]) -> None:
        for key in event.keys:
            self._close(self._works[key], out)
            out.append(JobCancelled(key))

    def _may_end(self, event: Completed | Failed) -> None:
        if event.slice not in self._reads:
            raise IllegalEvent(f"slice {event.slice} is not in flight")

    def _completed(self, event: Completed, out: list[Action]) -> None:
        read = self._end(event.slice, well=True)
        attempt, drive, s = read.attempt, read.drive, read.slice
        drive.good_reads += 1
        if drive.good_reads == STRIKES_FORGIVEN:
            drive.strikes = 0
        if drive.good_reads == self.policy.forgive_reads:
            drive.back_off_s = self.policy.back_off_s
        drive.totals.reads += 1
        drive.totals.bytes += s.length
        drive.totals.prefetch_bytes += s.length if read.prefetch else 0
        drive.totals.bounced_bytes += s.length if s.bounce else 0
        if attempt.dead:
            drive.totals.wasted_bytes += s.length
            self._bury(attempt, out)
            return
        attempt.landed += s.length
        attempt.pieces.append(Piece(s.start, s.length, drive.name))
        work = attempt.work
        if attempt.landed == work.job.length:
            assert not attempt.reads and not attempt.todo and attempt.lease is not None
            done = JobDone(work.job.key, attempt.lease, tuple(attempt.pieces))
            attempt.lease = None  # it is the receiver's now
            self._close(work, out, winner=attempt)
            out.append(done)

    def _failed(self, event: Failed, out: list[Action]) -> None:
        read = self._end(event.slice, well=False)
        self._blame_copy(read, event.fault, event.detail)
        attempt = read.attempt
        if attempt.dead:
            self._bury(attempt, out)
        elif attempt is not attempt.work.attempt:
            self._drop_rival(attempt, out)
        else:
            self._dequeue(attempt)
            attempt.todo.append((read.slice.start, read.slice.length))
            attempt.kind = Kind.RETRY if attempt.kind is Kind.FIRST else attempt.kind
            self._enqueue(attempt.work, out)
        self._blame_drive(read.drive, event.fault, event.detail, out)

    def _may_check(self, event: DriveChecked) -> None:
        if event.drive not in self._index or self._drives[self._index[event.drive]].check_due is None:
            raise IllegalEvent(f"no check of the drive {event.drive!r} was asked for")

    def _drive_checked(self, event: DriveChecked, out: list[Action]) -> None:
        drive = self._drives[self._index[event.drive]]
        drive.check_due = None
        if not event.ok:
            self._check_failed(drive, event.detail, out)
            return
        if drive.hung > self.policy.max_hung_reads:
            self._check_failed(drive, f"{drive.hung} reads do not end", out)
            return
        drive.failed_checks = drive.strikes = drive.good_reads = 0
        drive.last_used = self._now
        drive.rate.measured(event.nbytes, event.seconds, 1.0 if drive.health is Health.NEW else CHECK_WEIGHT)
        self._rate_moved()
        if drive.health is not Health.READY:
            if drive.health is not Health.NEW:
                out.append(DriveBack(drive.name))
            drive.health = Health.READY
            self._sort_drives()
            self._enqueue_all(out)

    def _may_tick(self, event: Tick) -> None:
        pass

    def _tick(self, event: Tick, out: list[Action]) -> None:
        self._check_drives(out, stale=False)  # what else is due is looked at after every event

    def _must_be_live(self, keys: Sequence[Key]) -> None:
        if len(set(keys)) != len(keys):
            raise IllegalEvent("a key is named twice")
        for key in keys:
            if key not in self._works:
                raise IllegalEvent(f"job {key!r} is not live")

    # --- jobs and their attempts ---

    def _enqueue(self, work: Work, out: list[Action]) -> None:
        """Put the attempt's unstarted bytes where drives find them; fail the job when none ever will."""
        attempt = work.attempt
        mask = work.holders & self._ready
        if mask:
            tag = (int(work.priority), work.barrier)
            queue = next((q for q in self._queues if q.tag == tag), None)
            if queue is None:
                queue = BarrierQueue(tag)
                insort(self._queues, queue, key=lambda q: q.tag)
            queue.add(attempt, mask)
            return
        self._parked[attempt] = None
        if not work.holders & ~self._lost and not work.rivals:
            self._fail(work, out)

    def _dequeue(self, attempt: Attempt) -> None:
        self._parked.pop(attempt, None)
        if attempt.pool is not None:
            next(q for q in self._queues if attempt.pool in q.pools).remove(attempt)

    def _enqueue_all(self, out: list[Action]) -> None:
        """Who can serve what has changed: sort all unstarted bytes anew."""
        waiting = [w for w in self._works.values() if w.attempt.todo]
        self._queues.clear()
        self._parked.clear()
        for work in waiting:
            work.attempt.pool = None
            self._enqueue(work, out)

    def _fail(self, work: Work, out: list[Action]) -> None:
        reasons = list(work.reasons)
        told = {drive for drive, _, _ in reasons}
        for d, span in work.spans.items():
            if span.drive not in told and self._drives[d].health is Health.LOST:
                reasons.append((span.drive, Fault.GONE, "the drive does not answer its checks"))
        self._close(work, out)
        out.append(JobFailed(work.job.key, tuple(reasons)))

    def _close(self, work: Work, out: list[Action], winner: Attempt | None = None) -> None:
        """The job is over: no attempt of it but the winner may come to anything."""
        del self._works[work.job.key]
        self._prefetch_jobs -= work.priority is Priority.PREFETCH
        for attempt in [work.attempt, *work.rivals]:
            if attempt is not winner:
                self._kill(attempt, out)
        self._rivals -= len(work.rivals)
        work.rivals.clear()

    def _kill(self, attempt: Attempt, out: list[Action]) -> None:
        self._dequeue(attempt)
        attempt.dead = True
        for piece in attempt.pieces:
            self._drives[self._index[piece.drive]].totals.wasted_bytes += piece.length
        if attempt.reads:
            self._zombies[attempt] = None
        elif attempt.lease is not None:
            out.append(LeaseReleased(attempt.lease))

    def _bury(self, attempt: Attempt, out: list[Action]) -> None:
        """A read into a dead lease has ended: when it was the last, the lease is free."""
        if not attempt.reads:
            del self._zombies[attempt]
            assert attempt.lease is not None
            out.append(LeaseReleased(attempt.lease))

    def _drop_rival(self, attempt: Attempt, out: list[Action]) -> None:
        work = attempt.work
        work.rivals.remove(attempt)
        self._rivals -= 1
        self._kill(attempt, out)
        if not work.rivals and work.attempt in self._parked and not work.holders & ~self._lost:
            self._fail(work, out)

    def _begin_again(self, work: Work, out: list[Action]) -> None:
        """Read the whole job once more into another lease, because reads into the present one do not end."""
        work.attempt = Attempt(work, Kind.HEDGE, [(0, work.job.length)])
        self._enqueue(work, out)

    # --- reads ---

    def _start(
        self,
        pool: BytePool,
        queue: BarrierQueue,
        attempt: Attempt,
        drive: DriveLedger,
        size: int,
        bounce: bool,
        out: list[Action],
    ) -> None:
        work = attempt.work
        start, length = attempt.todo.pop()
        if size < length:
            attempt.todo.append((start + size, length - size))
        span = work.spans[drive.index]
        self._ids += 1
        if attempt.lease is None:
            attempt.lease = self._ids
            attempt.origin = self._phase_for(work, drive)
            del pool.fresh[attempt]
            pool.partial[attempt] = None
        if not attempt.todo:
            del pool.partial[attempt]
            attempt.pool = None
        pool.nbytes -= size
        queue.nbytes -= size
        pool.quota[drive.index] = pool.quota.get(drive.index, 0.0) - size
        queue.quota[drive.index] -= size

        now, policy, rate = self._now, self.policy, self._rates[drive.index]
        expected = drive.free_in(now) + size / rate
        # served side by side, each of `depth` equal reads takes as long as all of them together
        limit = max(expected, drive.latency_s + drive.depth * size / rate)
        deadline = now + max(policy.deadline_floor_s, policy.deadline_factor * limit)
        part = Slice(
            self._ids,
            work.job.key,
            drive.name,
            span.file,
            span.offset + start,
            start,
            size,
            attempt.lease,
            work.job.length,
            attempt.origin,
            bounce,
            attempt.kind,
            work.priority,
            work.barrier,
            expected,
            deadline,
        )
        prefetch = work.priority is Priority.PREFETCH
        give_up = now + max(policy.give_up_s, policy.deadline_factor * limit)
        read = Read(part, attempt, drive, now, deadline, give_up, prefetch)
        self._reads[part.id] = read
        attempt.reads += 1
        self._bounces += bounce
        drive.begin(read, now, rate)
        if attempt.kind is Kind.HEDGE:
            drive.totals.hedges += 1
        elif attempt.kind is Kind.RETRY:
            drive.totals.retries += 1
        self._due = min(self._due, deadline)
        out.append(Start(part))

    def _end(self, slice_id: int, well: bool) -> Read:
        read = self._reads.pop(slice_id)
        read.attempt.reads -= 1
        self._bounces -= read.slice.bounce
        if read.drive.end(read, self._now, well):
            self._rate_moved()
        return read

    def _phase_for(self, work: Work, drive: DriveLedger) -> int:
        """The phase of a new lease: that of the drive that starts it, unless this drive can read to any address."""
        if drive.alignment > 1:
            return work.spans[drive.index].offset % drive.alignment
        for d, span in work.spans.items():
            if self._drives[d].alignment > 1:
                return span.offset % self._drives[d].alignment
        return 0

    def _fits(self, attempt: Attempt, drive: DriveLedger) -> bool:
        """Can the drive read straight into the attempt's lease?"""
        if attempt.work.one_phase or attempt.lease is None:
            return True
        return (attempt.work.spans[drive.index].offset - attempt.origin) % drive.alignment == 0

    # --- who reads what ---

    def _dispatch(self, out: list[Action]) -> None:
        """Start whatever should be started now: demand on every drive with a free slot, then prefetch on idle ones."""
        unstarted = 0
        for queue in list(self._queues):
            if not queue.nbytes:
                self._queues.remove(queue)
                continue
            demand = queue.tag[0] == Priority.DEMAND
            if demand:
                free = [d for d in self._usable if d.slots > 0]
            else:
                free = [d for d in self._usable if not d.live and d.slots > 0 and not d.bit & unstarted]
            if free:
                self._serve(queue, free, demand, out)
            if demand and queue.nbytes:
                for pool in queue.pools:
                    unstarted |= pool.mask if pool.nbytes else 0

    def _serve(self, queue: BarrierQueue, free: list[DriveLedger], demand: bool, out: list[Action]) -> None:
        """Let the free drives take what the plan gives them; make the plan anew when it has nothing for one of them."""
        fresh = not queue.planned
        if fresh:
            self._plan(queue)
        for drive in free:
            while queue.nbytes and drive.slots > 0:
                if self._take(queue, drive, demand, out):
                    if not demand:
                        break
                elif fresh or not any(p.nbytes and p.mask & drive.bit for p in queue.pools):
                    break
                else:
                    self._plan(queue)
                    fresh = True

    def _plan(self, queue: BarrierQueue) -> None:
        now = self._now
        pools = queue.pools = [p for p in queue.pools if p.nbytes]
        if self._uplinks:
            self._rates = list(self._learned)
            drives = {d for p in pools for d in p.members} | {d.index for d in self._drives if d.live}
            for uplink in self._uplinks:
                for d in uplink.members & drives:
                    self._rates[d] *= uplink.factor(drives)
        share_out(pools, [d.free_in(now) for d in self._drives], self._rates, self.policy.min_slice_bytes)
        queue.quota = [sum(p.quota.get(d.index, 0.0) for p in pools) for d in self._drives]
        queue.planned = True

    def _take(self, queue: BarrierQueue, drive: DriveLedger, demand: bool, out: list[Action]) -> bool:
        """Start one slice of the queue on the drive, if the plan has one for it."""
        least = self.policy.min_slice_bytes
        for pool in queue.pools:
            quota = pool.quota.get(drive.index, 0.0)
            if not pool.nbytes or quota < min(least / 2, pool.nbytes):
                continue
            lone = len(pool.members) == 1
            attempt, fits = self._choose(pool, drive)
            if attempt is None:
                continue
            start, length = attempt.todo[-1]
            wish = float(length) if lone else min(quota, max(queue.quota[drive.index] / TAKE, 2 * least))
            if not (demand and fits):
                wish = min(wish, self.policy.prefetch_slice_bytes)
            size = cut(start, length, wish, least, self.policy.cut_bytes)
            self._start(pool, queue, attempt, drive, size, not fits, out)
            return True
        return False

    def _choose(self, pool: BytePool, drive: DriveLedger) -> tuple[Attempt | None, bool]:
        """The pool's next job for this drive: one already begun if the drive can read into its lease, else a fresh
        one, else one that needs a bounce; and whether it fits."""
        misfit = None
        for n, attempt in enumerate(pool.partial):
            if self._fits(attempt, drive):
                return attempt, True
            misfit = misfit or attempt
            if n == LOOK_AHEAD:
                break
        for attempt in pool.fresh:
            return attempt, True
        return (misfit, False) if self._bounces < self.policy.max_bounces else (None, False)

    def _rate_moved(self) -> None:
        """Once a learned rate has moved by enough, nothing is planned with the old one any more."""
        learned = [d.rate.value for d in self._drives]
        if any(abs(new - old) > RATE_MOVED * old for new, old in zip(learned, self._learned, strict=True)):
            self._learned = learned
            self._rates = list(learned)
            for queue in self._queues:
                queue.planned = False

    # --- drives that misbehave ---

    def _blame_copy(self, read: Read, fault: Fault, detail: str) -> None:
        """Note against the job's copy on this drive; a bad one, or one tried too often, is given up (rule 5)."""
        work, drive = read.attempt.work, read.drive
        if not read.attempt.dead:
            work.reasons.append((drive.name, fault, detail))
            tries = work.tries[drive.index] = work.tries.get(drive.index, 0) + 1
            if BLAME[fault].give_up_copy or tries >= self.policy.max_tries:
                work.holders &= ~drive.bit

    def _blame_drive(self, drive: DriveLedger, fault: Fault, detail: str, out: list[Action]) -> None:
        drive.totals.faults += 1
        drive.good_reads = 0
        drive.strikes += BLAME[fault].strikes
        if drive.strikes >= STRIKES_OUT:
            self._suspect(drive, fault, detail, out)

    def _suspect(self, drive: DriveLedger, fault: Fault, detail: str, out: list[Action]) -> None:
        if drive.health in (Health.SUSPECT, Health.LOST):
            return
        drive.health = Health.SUSPECT
        self._back_off(drive)
        out.append(DriveSuspect(drive.name, fault, detail, drive.retry_at - self._now))
        self._sort_drives()
        self._enqueue_all(out)

    def _back_off(self, drive: DriveLedger) -> None:
        drive.retry_at = self._now + drive.back_off_s
        drive.back_off_s = min(2 * drive.back_off_s, self.policy.back_off_max_s)
        self._due = min(self._due, drive.retry_at)

    def _check(self, drive: DriveLedger, out: list[Action]) -> None:
        drive.check_due = self._now + self.policy.check_timeout_s
        self._due = min(self._due, drive.check_due)
        out.append(CheckDrive(drive.name, self.policy.check_bytes))

    def _check_failed(self, drive: DriveLedger, detail: str, out: list[Action]) -> None:
        """A check said no, or says nothing: `check_due` is infinite then, until its answer comes after all."""
        drive.failed_checks += 1
        hangs = drive.check_due is not None
        if drive.health in (Health.READY, Health.NEW):
            self._suspect(drive, Fault.GONE, detail, out)
        else:
            self._back_off(drive)
        if (hangs or drive.failed_checks >= self.policy.lost_after_checks) and drive.health is not Health.LOST:
            drive.health = Health.LOST
            self._sort_drives()
            out.append(DriveSuspect(drive.name, Fault.GONE, detail, drive.retry_at - self._now, lost=True))
            self._enqueue_all(out)

    def _check_drives(self, out: list[Action], stale: bool) -> None:
        """Learn what is not known of the drives yet, and, when work has come, what may be true no longer."""
        for drive in self._drives:
            old = stale and drive.health is Health.READY and self._now - drive.last_used >= self.policy.check_after_s
            if drive.check_due is None and (old or drive.health is Health.NEW):
                self._check(drive, out)

    def _look_at_what_is_due(self, out: list[Action]) -> None:
        now = self._now
        for read in list(self._reads.values()):
            if now >= read.deadline:
                self._late(read, out)
        for drive in self._drives:
            if drive.check_due is not None:
                if now >= drive.check_due:
                    drive.check_due = inf
                    self._check_failed(drive, "a check does not end", out)
            elif drive.health in (Health.SUSPECT, Health.LOST) and now >= drive.retry_at:
                self._check(drive, out)
        times = [read.deadline for read in self._reads.values()]
        for drive in self._drives:
            if drive.check_due is not None:
                times.append(drive.check_due)
            elif drive.health in (Health.SUSPECT, Health.LOST):
                times.append(drive.retry_at)
        self._due = min(times, default=inf)

    def _late(self, read: Read, out: list[Action]) -> None:
        """A deadline has passed: hedge if another drive can serve, else look again later, until the copy is given up."""
        attempt, now = read.attempt, self._now
        work = attempt.work
        if not read.hung:
            read.drive.hang(read, now)
            detail = f"no answer after {now - read.started:.2f} s"
            self._blame_copy(read, Fault.LATE, detail)
            self._blame_drive(read.drive, Fault.LATE, detail, out)
        read.deadline = inf
        if attempt.dead:
            return
        if now >= read.give_up:
            work.holders &= ~read.drive.bit
            if attempt is not work.attempt:
                self._drop_rival(attempt, out)
                return
            self._kill(attempt, out)
            self._begin_again(work, out)
        elif (
            attempt is work.attempt and work.holders & self._ready and self._hedge_leases < self.policy.max_hedge_leases
        ):
            if attempt.todo:
                self._kill(attempt, out)
            else:
                work.rivals.append(attempt)
                self._rivals += 1
            self._begin_again(work, out)
        if not attempt.dead:
            read.deadline = min(now + self.policy.deadline_floor_s, read.give_up)

    @property
    def _hedge_leases(self) -> int:
        return self._rivals + len(self._zombies)

    def _sort_drives(self) -> None:
        """Bit sets of the drives by health, and the ledger of those that may be given work, fastest first."""
        self._ready = sum(d.bit for d in self._drives if d.health is Health.READY)
        self._lost = sum(d.bit for d in self._drives if d.health is Health.LOST)
        self._usable = sorted((d for d in self._drives if d.bit & self._ready), key=lambda d: -d.rate.value)

    # --- proof of order ---

    def audit(self) -> None:
        """Recount everything from the reads and jobs themselves; AssertionError where a counter is wrong."""
        reads = self._reads.values()
        for drive in self._drives:
            own = [r for r in reads if r.drive is drive]
            live = [r for r in own if not r.hung]
            assert drive.live == len(live) <= drive.depth, drive.name
            assert drive.hung == len(own) - len(live), drive.name
            assert drive.bytes_in_flight == sum(r.slice.length for r in live), drive.name
        for uplink in self._uplinks:
            members = [self._drives[d] for d in uplink.members]
            assert uplink.in_flight == sum(d.bytes_in_flight for d in members)
        assert self._bounces == sum(r.slice.bounce for r in reads) <= self.policy.max_bounces
        attempts = [a for w in self._works.values() for a in (w.attempt, *w.rivals)] + list(self._zombies)
        for attempt in attempts:
            assert attempt.reads == sum(r.attempt is attempt for r in reads)
            under_way = sum(r.slice.length for r in reads if r.attempt is attempt)
            unstarted = sum(length for _, length in attempt.todo)
            assert attempt.dead or attempt.landed + under_way + unstarted == attempt.work.job.length
            assert attempt.dead == (attempt in self._zombies) and (attempt.reads or not attempt.dead)
        assert sum(a.reads for a in attempts) == len(self._reads)
        assert self._rivals == sum(len(w.rivals) for w in self._works.values())
        assert self._prefetch_jobs == sum(w.priority is Priority.PREFETCH for w in self._works.values())
        queued: dict[Attempt, None] = {}
        for queue in self._queues:
            assert queue.nbytes == sum(p.nbytes for p in queue.pools)
            for pool in queue.pools:
                waiting = [*pool.partial, *pool.fresh]
                assert pool.nbytes == sum(length for a in waiting for _, length in a.todo)
                queued |= dict.fromkeys(waiting)
        waiting = [w.attempt for w in self._works.values() if w.attempt.todo]
        assert set(waiting) == set(queued) | set(self._parked) and not set(queued) & set(self._parked)
        if not self._works:
            assert not self._parked and not self._prefetch_jobs and not any(q.nbytes for q in self._queues)


_RULES: dict[type[Any], tuple[Callable[[Scheduler, Any], None], Callable[[Scheduler, Any, list[Action]], None]]] = {
    # event: (may it happen now? raises IllegalEvent, what it does: never raises)
    Submit: (Scheduler._may_submit, Scheduler._submit),
    Promote: (Scheduler._may_promote, Scheduler._promote),
    Cancel: (Scheduler._may_cancel, Scheduler._cancel),
    Completed: (Scheduler._may_end, Scheduler._completed),
    Failed: (Scheduler._may_end, Scheduler._failed),
    DriveChecked: (Scheduler._may_check, Scheduler._drive_checked),
    Tick: (Scheduler._may_tick, Scheduler._tick),
}
