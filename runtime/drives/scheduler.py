"""Which drive reads which bytes, and when: a state machine that never reads, never sleeps and never looks at a clock.

    scheduler = Scheduler(drives)
    for action in scheduler.handle(event, now): carry it out
    wait until something happens or until scheduler.next_wakeup, whatever comes first; then handle that

The theory. A layer can go on when its slowest read has landed, so what counts is when the last byte of a barrier
arrives, not how many bytes a second flow. Bytes that several drives hold are poured over them so that all finish
together (`plan.py`): a drive's expected completion is its latency, plus what is in flight and planned ahead on it,
plus the slice, over the rate learned from what it really did (`rates.py`).

The rules.

 1. Nothing is bound to a drive before it starts. What has not started is planned anew when what it was planned from
    has changed (`board.py`).
 2. Barriers in their order; within one, what has the fewest holders first. A lone holder gets a job whole.
 3. Demand before any prefetch that has not started. A prefetch starts only on a drive with nothing in flight that
    holds no unstarted demand, one bounded slice at a time: demand waits for no more than that.
 4. A job is published whole or not at all, exactly once, in a lease no read is writing to.
 5. A failed slice is read again from another holder. A copy that is bad is given up for the job; a drive that
    misbehaves is suspect: it sits out, with growing back-off, until a check succeeds (`health.py`).
 6. A read cannot be taken back. One past its deadline is hedged: the job is read again, from other drives, into
    another lease; the first whole lease wins. A lease is released when every read into it has ended.
 7. A job fails when no copy is left: all given up, or their drives lost.
 8. Everything is bounded by `Policy`: jobs, reads in flight, hung reads, second leases, bounces, tries, waits.
 9. When nothing is live all counters are zero; `audit` recounts them.
10. An event against the rules raises IllegalEvent and changes nothing.

What this file does not know: files, threads, buffers, experts, and what time it is.

Cost in CPU time on one core of a busy server (CPython 3.11): about 14 µs an event, 0.5 ms for a barrier of 16 experts
over four full mirrors (37 slices, 38 events), 0.8 ms over four partial copies, where more has to be planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

from runtime.drives.board import Board
from runtime.drives.health import BLAME, Roll
from runtime.drives.jobs import (
    Action,
    Cancel,
    Completed,
    DriveChecked,
    DriveSpec,
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
from runtime.drives.ledger import Attempt, DriveLedger, Health, InFlight, Totals, Work
from runtime.drives.rates import Uplink


class Scheduler:
    """See the top of the file. One caller at a time; `handle` costs microseconds and never blocks."""

    def __init__(
        self, drives: Sequence[DriveSpec], policy: Policy | None = None, uplinks: Mapping[str, float] | None = None
    ) -> None:
        """`uplinks`: what a group of drives can move together, bytes/s, where a probe knows it; else it is learned."""
        self.policy = policy or Policy()
        self._drives = [DriveLedger(i, spec, self.policy) for i, spec in enumerate(drives)]
        self._named = {d.name: d for d in self._drives}
        if len(self._named) != len(drives):
            raise ValueError("two drives have the same name")
        self._uplinks = self._join_uplinks(uplinks or {})
        self._board = Board(self._drives, self._uplinks, self.policy)
        self._roll = Roll(self._drives, self.policy)
        self._now = -inf
        self._works: dict[Key, Work] = {}
        self._prefetch_jobs = 0
        self._parked: dict[Attempt, None] = {}
        self._reads: dict[int, InFlight] = {}
        self._dying: dict[Attempt, None] = {}
        self._rivals = 0
        self._ids = 0
        self._reads_due = inf

    def _join_uplinks(self, known: Mapping[str, float]) -> list[Uplink]:
        uplinks = []
        for group in dict.fromkeys(d.spec.group for d in self._drives if d.spec.group is not None):
            members = [d for d in self._drives if d.spec.group == group]
            uplinks.append(Uplink({d.index: d.rate for d in members}, known.get(group), self.policy.rate_floor))
            for d in members:
                d.uplink = uplinks[-1]
        return uplinks

    # --- what anyone may ask ---

    @property
    def next_wakeup(self) -> float | None:
        """When the next deadline, hedge, back-off or check falls due; never too late, perhaps too early."""
        due = min(self._reads_due, self._roll.due)
        return None if due == inf else due

    @property
    def idle(self) -> bool:
        """No job is live and no read is in flight, late ones included."""
        return not self._works and not self._reads

    def is_live(self, key: Key) -> bool:
        """Submitted, and neither done, failed nor cancelled."""
        return key in self._works

    def health(self, drive: str) -> Health:
        return self._named[drive].health

    def rate(self, drive: str) -> float:
        """The learned rate of the drive alone, bytes/s."""
        return self._named[drive].rate.value

    def totals(self) -> dict[str, Totals]:
        """Counts since the start, by drive; live objects, not to be changed."""
        return {d.name: d.totals for d in self._drives}

    # --- events ---

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at the time `now`; returns what must be done, in order. Raises IllegalEvent."""
        if now < self._now:
            raise IllegalEvent(f"time went back from {self._now} to {now}")
        check, apply = _RULES[type(event)]
        check(self, event)
        self._now = now
        out: list[Action] = []
        apply(self, event, out)
        if now >= self._reads_due:
            self._look_at_late_reads(out)
        if now >= self._roll.due:
            self._roll.look_at_what_is_due(now, out)
        if self._roll.changed:
            self._sort_unstarted(out)
        for drive, attempt, start, length, bounce in self._board.take(self._roll.usable, now):
            self._start(drive, attempt, start, length, bounce, out)
        if type(event) in (Submit, Tick):
            self._roll.check_unknown(now, out, stale=type(event) is Submit)
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
            drives = set()
            for s in spans:
                if s.drive not in self._named:
                    raise IllegalEvent(f"job {key!r} names the drive {s.drive!r}, which does not exist")
                if s.length < 1 or s.length != spans[0].length or s.offset < 0:
                    raise IllegalEvent(f"job {key!r}: its spans are not all of one positive length")
                drives.add(s.drive)
            if not spans or len(drives) != len(spans):
                raise IllegalEvent(f"job {key!r} names no drive, or one twice")
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
                drive = self._named[s.drive]
                spans[drive.index] = s
                holders |= drive.bit
                if drive.alignment > 1:
                    phases.add((drive.alignment, s.offset % drive.alignment))
            work = Work(job, spans, holders, job.priority, job.barrier, one_phase=len(phases) < 2)
            work.attempt = Attempt(work, Kind.FIRST, [(0, job.length)])
            self._works[job.key] = work
            self._prefetch_jobs += prefetch
            self._offer(work, out)

    def _may_promote(self, event: Promote) -> None:
        self._must_be_live(event.keys)

    def _promote(self, event: Promote, out: list[Action]) -> None:
        for key in event.keys:
            work = self._works[key]
            self._prefetch_jobs -= work.priority is Priority.PREFETCH
            self._withdraw(work.attempt)
            work.priority, work.barrier = Priority.DEMAND, event.barrier
            if work.attempt.todo:
                self._offer(work, out)
        for read in self._reads.values():
            if read.attempt.work.priority is Priority.DEMAND:
                read.prefetch = False

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
        self._roll.praise(drive)
        totals = drive.totals
        totals.reads += 1
        totals.bytes += s.length
        if read.prefetch:
            totals.prefetch_bytes += s.length
        if s.bounce:
            totals.bounced_bytes += s.length
        if attempt.dead:
            totals.wasted_bytes += s.length
            self._bury(attempt, out)
            return
        attempt.landed += s.length
        attempt.pieces.append(Piece(s.start, s.length, drive.name))
        if attempt.landed == attempt.work.job.length:
            self._publish(attempt, out)

    def _failed(self, event: Failed, out: list[Action]) -> None:
        read = self._end(event.slice, well=False)
        attempt = read.attempt
        self._blame_copy(read, event.fault, event.detail)
        if attempt.dead:
            self._bury(attempt, out)
        elif attempt is not attempt.work.attempt:
            self._drop_rival(attempt, out)
        else:
            self._withdraw(attempt)
            attempt.todo.append((read.slice.start, read.slice.length))
            attempt.kind = Kind.RETRY if attempt.kind is Kind.FIRST else attempt.kind
            self._offer(attempt.work, out)
        self._roll.blame(read.drive, event.fault, event.detail, self._now, out)

    def _may_check(self, event: DriveChecked) -> None:
        if event.drive not in self._named or self._named[event.drive].check_due is None:
            raise IllegalEvent(f"no check of the drive {event.drive!r} was asked for")

    def _drive_checked(self, event: DriveChecked, out: list[Action]) -> None:
        self._roll.checked(self._named[event.drive], event, self._now, out)
        self._board.rate_moved()

    def _may_tick(self, event: Tick) -> None:
        """It always may."""

    def _tick(self, event: Tick, out: list[Action]) -> None:
        """Nothing of its own: what is due is looked at after every event."""

    def _must_be_live(self, keys: Sequence[Key]) -> None:
        if len(set(keys)) != len(keys):
            raise IllegalEvent("a key is named twice")
        for key in keys:
            if key not in self._works:
                raise IllegalEvent(f"job {key!r} is not live")

    # --- jobs and their attempts ---

    def _offer(self, work: Work, out: list[Action]) -> None:
        """Put the attempt's unstarted bytes where drives find them; fail the job when none ever will."""
        mask = work.holders & self._roll.ready
        if mask:
            self._board.add(work.attempt, mask)
        else:
            self._parked[work.attempt] = None
            self._fail_if_hopeless(work, out)

    def _withdraw(self, attempt: Attempt) -> None:
        self._parked.pop(attempt, None)
        self._board.remove(attempt)

    def _sort_unstarted(self, out: list[Action]) -> None:
        """Other drives than before may be given work: offer everything anew."""
        self._roll.changed = False
        self._board.clear()
        self._parked.clear()
        for work in [w for w in self._works.values() if w.attempt.todo]:
            self._offer(work, out)

    def _fail_if_hopeless(self, work: Work, out: list[Action]) -> None:
        """No holder is left that may ever serve what is unstarted, and no late read may come in first (rule 7)."""
        if work.attempt not in self._parked or work.holders & ~self._roll.lost or work.rivals:
            return
        reasons = list(work.reasons)
        told = {drive for drive, _, _ in reasons}
        for d, span in work.spans.items():
            if span.drive not in told and self._drives[d].health is Health.LOST:
                trouble = f"the drive does not answer its checks: {self._drives[d].trouble}"
                reasons.append((span.drive, Fault.GONE, trouble))
        self._close(work, out)
        out.append(JobFailed(work.job.key, tuple(reasons)))

    def _publish(self, attempt: Attempt, out: list[Action]) -> None:
        assert not attempt.reads
        assert not attempt.todo
        assert attempt.lease is not None
        done = JobDone(attempt.work.job.key, attempt.lease, tuple(attempt.pieces))
        self._close(attempt.work, out, winner=attempt)
        out.append(done)

    def _close(self, work: Work, out: list[Action], winner: Attempt | None = None) -> None:
        """The job is over: no attempt of it but the winner may come to anything."""
        del self._works[work.job.key]
        self._prefetch_jobs -= work.priority is Priority.PREFETCH
        self._rivals -= len(work.rivals)
        for attempt in (work.attempt, *work.rivals):
            if attempt is not winner:
                self._kill(attempt, out)
        work.rivals.clear()

    def _kill(self, attempt: Attempt, out: list[Action]) -> None:
        self._withdraw(attempt)
        attempt.dead = True
        for piece in attempt.pieces:
            self._named[piece.drive].totals.wasted_bytes += piece.length
        if attempt.reads:
            self._dying[attempt] = None
        elif attempt.lease is not None:
            out.append(LeaseReleased(attempt.lease))

    def _bury(self, attempt: Attempt, out: list[Action]) -> None:
        """A read into a dead lease has ended: when it was the last, the lease is free."""
        if not attempt.reads:
            del self._dying[attempt]
            assert attempt.lease is not None
            out.append(LeaseReleased(attempt.lease))

    def _drop_rival(self, attempt: Attempt, out: list[Action]) -> None:
        work = attempt.work
        work.rivals.remove(attempt)
        self._rivals -= 1
        self._kill(attempt, out)
        self._fail_if_hopeless(work, out)

    # --- reads ---

    def _start(
        self, drive: DriveLedger, attempt: Attempt, start: int, length: int, bounce: bool, out: list[Action]
    ) -> None:
        work, now, policy = attempt.work, self._now, self.policy
        span, rate = work.spans[drive.index], self._board.rates[drive.index]
        self._ids += 1
        if attempt.lease is None:
            attempt.lease = self._ids
            attempt.origin = self._phase_for(work, drive)
        expected = drive.free_in(now) + length / rate
        # side by side with as many equal reads as the depth allows, it takes as long as all of them together
        longest = max(expected, drive.latency_s + drive.depth * length / rate)
        deadline = now + max(policy.deadline_floor_s, policy.deadline_factor * longest)
        part = Slice(
            self._ids,
            work.job.key,
            drive.name,
            span.file,
            span.offset + start,
            start,
            length,
            attempt.lease,
            span.length,
            attempt.origin,
            bounce,
            attempt.kind,
            work.priority,
            work.barrier,
            expected,
            deadline,
        )
        read = InFlight(part, attempt, drive, now, deadline, work.priority is Priority.PREFETCH)
        self._reads[part.id] = read
        attempt.reads += 1
        drive.begin(read, now, rate)
        if attempt.kind is Kind.HEDGE:
            drive.totals.hedges += 1
        elif attempt.kind is Kind.RETRY:
            drive.totals.retries += 1
        if deadline < self._reads_due:
            self._reads_due = deadline
        out.append(Start(part))

    def _end(self, slice_id: int, well: bool) -> InFlight:
        read = self._reads.pop(slice_id)
        read.attempt.reads -= 1
        if read.drive.end(read, self._now, well):
            self._board.rate_moved()
        return read

    def _phase_for(self, work: Work, drive: DriveLedger) -> int:
        """The phase of a new lease: that of the drive that starts it, unless this drive can read to any address."""
        if drive.alignment > 1:
            return work.spans[drive.index].offset % drive.alignment
        for d, span in work.spans.items():
            if self._drives[d].alignment > 1:
                return span.offset % self._drives[d].alignment
        return 0

    def _blame_copy(self, read: InFlight, fault: Fault, detail: str) -> None:
        """Note a fault of the job's copy on this drive; a bad copy, or one tried too often, is given up."""
        work, drive = read.attempt.work, read.drive
        if not read.attempt.dead:
            work.reasons.append((drive.name, fault, detail))
            tries = work.tries[drive.index] = work.tries.get(drive.index, 0) + 1
            if BLAME[fault].give_up_copy or tries >= self.policy.max_tries:
                work.holders &= ~drive.bit

    def _look_at_late_reads(self, out: list[Action]) -> None:
        for read in list(self._reads.values()):
            if self._now >= read.deadline:
                self._late(read, out)
        self._reads_due = min((read.deadline for read in self._reads.values()), default=inf)

    def _late(self, read: InFlight, out: list[Action]) -> None:
        """A deadline has passed (rule 6): hedge if another drive can serve, else wait on until the copy is given up."""
        attempt, work, now, policy = read.attempt, read.attempt.work, self._now, self.policy
        if not read.hung:
            read.drive.hang(read, now)
            read.give_up = now + policy.give_up_s
            detail = f"no answer after {now - read.started:.2f} s"
            self._blame_copy(read, Fault.LATE, detail)
            self._roll.blame(read.drive, Fault.LATE, detail, now, out)
            if not attempt.dead:
                self._fail_if_hopeless(work, out)
        current = attempt is work.attempt
        may_hedge = work.holders & self._roll.ready and self._rivals + len(self._dying) < policy.max_hedge_leases
        if attempt.dead:
            pass
        elif now >= read.give_up:
            work.holders &= ~read.drive.bit
            if current:
                self._kill(attempt, out)
                self._begin_again(work, out)
            else:
                self._drop_rival(attempt, out)
        elif current and may_hedge:
            if attempt.todo:
                self._kill(attempt, out)
            else:
                work.rivals.append(attempt)
                self._rivals += 1
            self._begin_again(work, out)
        read.deadline = inf if attempt.dead else min(now + policy.deadline_floor_s, read.give_up)

    def _begin_again(self, work: Work, out: list[Action]) -> None:
        """Read the whole job once more into another lease, because reads into the present one do not end."""
        work.attempt = Attempt(work, Kind.HEDGE, [(0, work.job.length)])
        self._offer(work, out)

    # --- proof ---

    def audit(self) -> None:
        """Recount everything from the reads and the jobs themselves; AssertionError where a counter is wrong."""
        reads = list(self._reads.values())
        for drive in self._drives:
            own = [r for r in reads if r.drive is drive]
            live = [r for r in own if not r.hung]
            assert drive.live == len(live) <= drive.depth, f"{drive.name}: reads"
            assert drive.hung == len(own) - len(live) <= self.policy.max_hung_reads + drive.depth, f"{drive.name}: hung"
            assert drive.bytes_in_flight == sum(r.slice.length for r in live), f"{drive.name}: bytes"
            assert drive.bounces == sum(r.slice.bounce for r in live), f"{drive.name}: bounces"
        assert sum(d.bounces for d in self._drives) <= self.policy.max_bounces
        for uplink in self._uplinks:
            assert uplink.in_flight == sum(self._drives[d].bytes_in_flight for d in uplink.members)
        works = self._works.values()
        attempts = [a for w in works for a in (w.attempt, *w.rivals)] + list(self._dying)
        for attempt in attempts:
            own = [r for r in reads if r.attempt is attempt]
            assert attempt.reads == len(own)
            assert attempt.dead == (attempt in self._dying)
            if not attempt.dead:
                under_way = sum(r.slice.length for r in own)
                assert attempt.landed + under_way + attempt.unstarted == attempt.work.job.length
        assert sum(a.reads for a in attempts) == len(reads), "a read belongs to nobody"
        assert self._rivals == sum(len(w.rivals) for w in works)
        assert self._prefetch_jobs == sum(w.priority is Priority.PREFETCH for w in works)
        offered: set[Attempt] = set()
        for queue in self._board.queues:
            assert queue.nbytes == sum(p.nbytes for p in queue.pools)
            for pool in queue.pools:
                assert pool.nbytes == sum(a.unstarted for a in (*pool.fresh, *pool.partial))
                offered |= {*pool.fresh, *pool.partial}
        assert offered | set(self._parked) == {w.attempt for w in works if w.attempt.todo}, "bytes nobody will read"
        assert not offered & set(self._parked)


_RULES: dict[type[Any], tuple[Callable[[Scheduler, Any], None], Callable[[Scheduler, Any, list[Action]], None]]] = {
    # event: (may it happen now? raises IllegalEvent; what it does: never raises)
    Submit: (Scheduler._may_submit, Scheduler._submit),
    Promote: (Scheduler._may_promote, Scheduler._promote),
    Cancel: (Scheduler._may_cancel, Scheduler._cancel),
    Completed: (Scheduler._may_end, Scheduler._completed),
    Failed: (Scheduler._may_end, Scheduler._failed),
    DriveChecked: (Scheduler._may_check, Scheduler._drive_checked),
    Tick: (Scheduler._may_tick, Scheduler._tick),
}
