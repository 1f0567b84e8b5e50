"""The board on which unstarted bytes stand until a drive takes them: rules 1 to 3 of the scheduler.

Bytes stand in queues, one per priority and barrier, and in each queue in pools, one per set of drives that can serve
them. A plan gives each drive a quota of each pool (`plan.share_out`); it is thrown away when the bytes, the drives
or the rates change, and made anew when a drive with a free slot finds nothing in it. Only what a drive takes is
bound.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from runtime.drives.jobs import Policy, Priority
from runtime.drives.ledger import Attempt, DriveLedger
from runtime.drives.plan import cut, share_out
from runtime.drives.rates import Uplink

TAKE = 3
"""A drive takes at most the TAKEth part of what it should still take, or two smallest slices: the cuts get finer
towards the end, where a wrong rate would hurt."""
RATE_MOVED = 0.03
"""A plan is made anew when a rate it was made with has moved by more than this part."""
LOOK_AHEAD = 8
"""Begun jobs of one pool looked at for one whose lease fits the drive's phase."""


class BytePool:
    """Bytes that the same drives can serve, at one barrier; the plan's quotas in bytes per drive."""

    __slots__ = ("fresh", "mask", "members", "nbytes", "partial", "quota")

    def __init__(self, mask: int) -> None:
        self.mask = mask
        self.members = tuple(d for d in range(mask.bit_length()) if mask >> d & 1)
        self.nbytes = 0
        self.quota: dict[int, float] = {}
        self.partial: dict[Attempt, None] = {}
        self.fresh: dict[Attempt, None] = {}


class BarrierQueue:
    """The bytes of one priority and barrier, scarcest first; what each drive should take of all of them."""

    __slots__ = ("nbytes", "planned", "pools", "quota", "tag")

    def __init__(self, tag: tuple[int, int], drives: int) -> None:
        self.tag = tag
        self.nbytes = 0
        self.planned = False
        self.pools: list[BytePool] = []
        self.quota = [0.0] * drives


class Board:
    """All unstarted bytes that some drive can serve now, and the rates they are planned with."""

    def __init__(self, drives: Sequence[DriveLedger], uplinks: Sequence[Uplink], policy: Policy) -> None:
        self.policy = policy
        self.queues: list[BarrierQueue] = []
        self._drives, self._uplinks = drives, uplinks
        self._learned = [d.rate.value for d in drives]
        self.rates = list(self._learned)

    # --- bytes come and go ---

    def add(self, attempt: Attempt, mask: int) -> None:
        """The drives in `mask` can serve what the attempt has not started."""
        tag = (int(attempt.work.priority), attempt.work.barrier)
        queue = next((q for q in self.queues if q.tag == tag), None)
        if queue is None:
            queue = BarrierQueue(tag, len(self._drives))
            insort(self.queues, queue, key=lambda q: q.tag)
        pool = next((p for p in queue.pools if p.mask == mask), None)
        if pool is None:
            pool = BytePool(mask)
            insort(queue.pools, pool, key=lambda p: len(p.members))
        (pool.fresh if attempt.lease is None else pool.partial)[attempt] = None
        attempt.pool = pool
        nbytes = attempt.unstarted
        pool.nbytes += nbytes
        queue.nbytes += nbytes
        queue.planned = False

    def remove(self, attempt: Attempt) -> None:
        """Nobody shall start the rest of the attempt."""
        pool = attempt.pool
        if pool is None:
            return
        queue = next(q for q in self.queues if pool in q.pools)
        attempt.pool = None
        (pool.fresh if attempt.lease is None else pool.partial).pop(attempt)
        nbytes = attempt.unstarted
        pool.nbytes -= nbytes
        queue.nbytes -= nbytes
        queue.planned = False

    def clear(self) -> None:
        for queue in self.queues:
            for pool in queue.pools:
                for attempt in (*pool.fresh, *pool.partial):
                    attempt.pool = None
        self.queues.clear()

    def rate_moved(self) -> None:
        """A rate was learned: once one has moved by enough, nothing is planned with the old one any more."""
        learned = [d.rate.value for d in self._drives]
        if any(abs(new - old) > RATE_MOVED * old for new, old in zip(learned, self._learned, strict=True)):
            self._learned, self.rates = learned, list(learned)
            for queue in self.queues:
                queue.planned = False

    # --- drives take them ---

    def take(self, usable: Sequence[DriveLedger], now: float) -> Iterator[tuple[DriveLedger, Attempt, int, int, bool]]:
        """What should be started now: (drive, attempt, start, length, through a bounce?).

        Demand on every drive with a free slot, then prefetch on drives with nothing in flight that hold no unstarted
        demand. The caller starts each slice before it asks for the next.
        """
        if any(not q.nbytes for q in self.queues):
            self.queues = [q for q in self.queues if q.nbytes]
        wanted = 0
        ahead = [0.0] * len(self._drives)  # seconds of work that earlier barriers have planned on each drive
        before: BarrierQueue | None = None
        for queue in list(self.queues):
            demand = queue.tag[0] == Priority.DEMAND
            if before is not None:
                ahead = [t + max(0.0, n) / r for t, n, r in zip(ahead, before.quota, self.rates, strict=True)]
                if before.tag[0] == Priority.DEMAND:
                    for pool in before.pools:
                        wanted |= pool.mask if pool.nbytes else 0
            if demand:
                free = [d for d in usable if d.live < d.depth]
            else:
                free = [d for d in usable if not d.live and not d.bit & wanted]
            if free:
                yield from self._serve(queue, free, demand, now, ahead)
            if queue.nbytes:
                before = queue

    def _serve(
        self, queue: BarrierQueue, free: list[DriveLedger], demand: bool, now: float, ahead: list[float]
    ) -> Iterator[tuple[DriveLedger, Attempt, int, int, bool]]:
        """Let the free drives take their quotas; plan anew when there is work for one that has no quota of it."""
        new_plan = not queue.planned
        if new_plan:
            self._plan(queue, now, ahead)
        for drive in free:
            while queue.nbytes and drive.live < drive.depth:
                taken = self._slice_for(drive, queue, demand, now)
                if taken is not None:
                    yield drive, *taken
                    if not demand:
                        break
                elif new_plan or not any(p.nbytes and p.mask & drive.bit for p in queue.pools):
                    break
                else:
                    self._plan(queue, now, ahead)
                    new_plan = True

    def _plan(self, queue: BarrierQueue, now: float, ahead: list[float]) -> None:
        pools = queue.pools = [p for p in queue.pools if p.nbytes]
        if self._uplinks:
            self.rates = list(self._learned)
            drives = {d for p in pools for d in p.members} | {d.index for d in self._drives if d.live}
            for uplink in self._uplinks:
                for d in uplink.members & drives:
                    self.rates[d] *= uplink.factor(drives)
        free_in = [d.free_in(now) + wait for d, wait in zip(self._drives, ahead, strict=True)]
        share_out(pools, free_in, self.rates, self.policy.min_slice_bytes)
        queue.quota = [sum(p.quota.get(d.index, 0.0) for p in pools) for d in self._drives]
        queue.planned = True

    def _slice_for(
        self, drive: DriveLedger, queue: BarrierQueue, demand: bool, now: float
    ) -> tuple[Attempt, int, int, bool] | None:
        """Take one slice of the queue off the board for the drive, if the plan has one for it."""
        least, d = self.policy.min_slice_bytes, drive.index
        for pool in queue.pools:
            quota = pool.quota.get(d, 0.0)
            if not pool.nbytes or quota < min(least, pool.nbytes):
                continue
            attempt, bounce = self._choose(pool, queue, drive, now)
            if attempt is None:
                continue
            start, length = attempt.todo.pop()
            wish = float(length) if len(pool.members) == 1 else min(quota, max(queue.quota[d] / TAKE, 2 * least))
            bulk = demand and not bounce
            wish = min(wish, self.policy.max_slice_bytes if bulk else self.policy.prefetch_slice_bytes)
            size = cut(start, length, wish, least, self.policy.cut_bytes)
            if size < length:
                attempt.todo.append((start + size, length - size))
            if attempt.lease is None:
                del pool.fresh[attempt]
                pool.partial[attempt] = None
            if not attempt.todo:
                del pool.partial[attempt]
                attempt.pool = None
            pool.nbytes -= size
            queue.nbytes -= size
            pool.quota[d] = quota - size
            queue.quota[d] -= size
            return attempt, start, size, bounce
        return None

    def _choose(
        self, pool: BytePool, queue: BarrierQueue, drive: DriveLedger, now: float
    ) -> tuple[Attempt | None, bool]:
        """The pool's next job for this drive, and whether it needs a bounce.

        One already begun if the drive fits its lease and its rest can be cut to the quota; else a fresh one; else one
        whose rest has to be taken whole, unless that would end sooner elsewhere; else, as far as bounces are left,
        one whose lease the drive does not fit.
        """
        too_long = misfit = None
        for n, attempt in enumerate(pool.partial):
            if not attempt.fits(drive):
                misfit = misfit or attempt
            elif pool.quota[drive.index] < attempt.todo[-1][1] < 2 * self.policy.min_slice_bytes:
                too_long = too_long or attempt
            else:
                return attempt, False
            if n == LOOK_AHEAD:
                break
        for attempt in pool.fresh:
            return attempt, False
        if too_long is not None and not self._sooner_elsewhere(too_long.todo[-1][1], pool, queue, drive, now):
            return too_long, False
        if misfit is not None and sum(d.bounces for d in self._drives) < self.policy.max_bounces:
            return misfit, True
        return None, False

    def _sooner_elsewhere(
        self, nbytes: int, pool: BytePool, queue: BarrierQueue, drive: DriveLedger, now: float
    ) -> bool:
        """Would another drive of the pool have read these bytes, after all it should take, before this one had?"""
        here = drive.free_in(now) + nbytes / self.rates[drive.index]
        others = [self._drives[d] for d in pool.members if d != drive.index]
        return any(d.free_in(now) + (queue.quota[d.index] + nbytes) / self.rates[d.index] < here for d in others)
