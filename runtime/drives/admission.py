"""The jobs somebody waits for, and which of them the scheduler is given: those for whose buffers there is room.

This file knows memory, and neither drives nor outcomes. The room of a job is *promised* from when it is let in until
its buffer is taken. Demand is let in in the order of its barriers, a prefetch behind all of it; nothing here waits or
reads. It belongs to the reader's lock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, replace

from runtime.drives.buffers import BufferPool
from runtime.drives.jobs import Job, Key, Priority
from runtime.drives.waits import DEMAND, LATE

GUESS = 1 << 62
"""Where prefetch stands in the queue of jobs that wait for memory: behind every barrier."""


@dataclass(slots=True)
class Ticket:
    """A job somebody waits for; cost: what its buffer counts. admitted: the scheduler has it. leased: its buffer is
    taken, no longer promised. late: it was a guess, and was needed before it was there."""

    job: Job
    kind: str
    queued: float
    cost: int
    admitted: bool = False
    leased: bool = False
    late: bool = False

    @property
    def guess(self) -> bool:
        """Is it prefetch?"""
        return self.job.priority is Priority.PREFETCH

    @property
    def awaited(self) -> str:
        """What somebody waits for who waits for this."""
        return self.kind or (LATE if self.late else DEMAND)


class Admission:
    """See the top of the file. most_demand: demand jobs that the scheduler takes at one time."""

    def __init__(self, pool: BufferPool, most_demand: int) -> None:
        self.tickets: dict[Key, Ticket] = {}
        self._pool, self._most_demand = pool, most_demand
        self._pending: list[tuple[int, int, Key]] = []
        self._barriers: Counter[int] = Counter()
        self._arrivals = 0
        self._promised = 0
        self._demand_live = 0

    def fits(self, ticket: Ticket) -> bool:
        """Is there room for its buffer, beside all that is promised?"""
        return ticket.cost <= self._pool.limit_bytes - self._pool.in_use - self._promised

    def enter(self, ticket: Ticket) -> None:
        """Somebody wants a job that nobody has wanted."""
        self.tickets[ticket.job.key] = ticket
        if not ticket.guess:
            self._barriers[ticket.job.barrier] += 1
        self._queue(ticket)

    def next_demand(self) -> Ticket | None:
        """The demand that is to be let in next, if the scheduler takes more of it."""
        if not self._pending or self._pending[0][0] >= GUESS or self._demand_live >= self._most_demand:
            return None
        return self.tickets[self._pending[0][2]]

    def waiting_guesses(self) -> list[Ticket]:
        """The prefetch that is not let in."""
        first = bisect_left(self._pending, GUESS, key=lambda waiting: waiting[0])
        return [self.tickets[key] for _, _, key in self._pending[first:]]

    def let_in(self, ticket: Ticket) -> Job:
        """The scheduler gets it."""
        self._take_back(ticket.job.key)
        ticket.admitted = True
        self._demand_live += not ticket.guess
        self._promised += ticket.cost
        return ticket.job

    def lease(self, ticket: Ticket) -> None:
        """Its buffer is taken: the first one keeps the promise, later ones are beside it."""
        if not ticket.leased:
            ticket.leased = True
            self._promised -= ticket.cost

    def promote(self, ticket: Ticket, barrier: int) -> None:
        """A prefetch is demand now."""
        ticket.job = replace(ticket.job, priority=Priority.DEMAND, barrier=barrier)
        ticket.late = True
        self._barriers[barrier] += 1
        if ticket.admitted:
            self._demand_live += 1
        else:
            self._take_back(ticket.job.key)
            self._queue(ticket)

    def leave(self, key: Key) -> Ticket:
        """The job is over, or nobody wants it any more."""
        ticket = self.tickets.pop(key)
        if ticket.admitted:
            self._demand_live -= not ticket.guess
            if not ticket.leased:
                self._promised -= ticket.cost
        else:
            self._take_back(key)
        if not ticket.guess:
            self._barriers[ticket.job.barrier] -= 1
            if not self._barriers[ticket.job.barrier]:
                del self._barriers[ticket.job.barrier]
        return ticket

    def awaits(self, barrier: int) -> bool:
        """Is there more demand of this barrier?"""
        return barrier in self._barriers

    def audit(self) -> None:
        """AssertionError where a count does not fit what it counts."""
        tickets = self.tickets.values()
        assert self._promised == sum(t.cost for t in tickets if t.admitted and not t.leased)
        assert Counter(p[2] for p in self._pending) == Counter(k for k, t in self.tickets.items() if not t.admitted)
        assert self._demand_live == sum(t.admitted and not t.guess for t in tickets)
        assert self._barriers == Counter(t.job.barrier for t in tickets if not t.guess)
        assert tickets or not self._promised

    def _queue(self, ticket: Ticket) -> None:
        """It waits for memory."""
        self._arrivals += 1
        insort(self._pending, (GUESS if ticket.guess else ticket.job.barrier, self._arrivals, ticket.job.key))

    def _take_back(self, key: Key) -> None:
        """It does not wait for memory any more."""
        del self._pending[next(n for n, waiting in enumerate(self._pending) if waiting[2] == key)]
