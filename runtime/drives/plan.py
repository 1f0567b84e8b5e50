"""The arithmetic of the plan: who should read how many bytes so that all finish together. Pure functions.

Theory. Bytes that several drives hold can be divided at will. If drive d is free at time t_d and reads r_d bytes a
second, n bytes are read soonest when all drives that take part finish at one level L: Σ r_d · max(0, L − t_d) = n.
That is water poured into a vessel whose floor has steps t_d and widths r_d (`fill`). With several groups of bytes,
each held by other drives, the division that is best for all minimises Σ r_d · L_d² over the drives' finishing times;
it is reached by pouring one group after the other, again and again (`share_out`: block-wise descent on a convex
function over a product of simplices, which converges to the one minimum). Its highest level is the least possible
time for the whole, its lower levels are as low as they can be.

This file knows nothing of jobs, failures or time that passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

ROUNDS = 4
SETTLED = 0.005
"""Pouring stops when a round moved no drive's finishing time by more than this part of the longest."""


class Pool(Protocol):
    """Bytes that are all held by the same drives, and what each of these drives should take of them."""

    members: tuple[int, ...]
    nbytes: int
    quota: dict[int, float]


def fill(nbytes: float, free_in: Sequence[float], rates: Sequence[float], least: float = 0.0) -> list[float]:
    """Divide `nbytes` over drives that are free in `free_in` seconds so that those that take part finish together.

    Returns bytes per drive. No share is in (0, least) unless `nbytes` itself is: a share too small to be worth a read
    goes to the others.
    """
    out = [0.0] * len(rates)
    order = sorted(range(len(rates)), key=free_in.__getitem__)
    while True:
        width = ground = level = 0.0
        used = 0
        for d in order:
            if used and free_in[d] >= level:
                break
            width += rates[d]
            ground += rates[d] * free_in[d]
            level = (nbytes + ground) / width
            used += 1
        if used == 1 or nbytes < 2 * least:
            out[min(range(len(rates)), key=lambda d: free_in[d] + nbytes / rates[d])] = nbytes
            return out
        taking = order[:used]
        if least:
            small = [d for d in taking if rates[d] * (level - free_in[d]) < least]
            if small:  # leave out the one whose share raises the level least when the others take it over
                order.remove(min(small, key=lambda d: rates[d] * (level - free_in[d]) / (width - rates[d])))
                continue
        for d in taking:
            out[d] = rates[d] * (level - free_in[d])
        return out


def share_out(
    pools: Sequence[Pool], free_in: Sequence[float], rates: Sequence[float], least: float = 0.0
) -> list[float]:
    """Set every pool's `quota` so that the whole is read soonest; returns when each drive is free after that.

    `free_in` and `rates` are indexed by drive. Former quotas do not matter.
    """
    free = list(free_in)
    open_pools = []
    for pool in pools:
        pool.quota.clear()
        if not pool.nbytes:
            continue
        if len(pool.members) == 1:
            d = pool.members[0]
            pool.quota[d] = pool.nbytes
            free[d] += pool.nbytes / rates[d]
        else:
            open_pools.append(pool)
    if len(open_pools) == 1:
        _pour(open_pools[0], free, rates, least)
        return free
    for _ in range(ROUNDS if open_pools else 0):
        before = list(free)
        for pool in open_pools:
            _pour(pool, free, rates, 0.0)
        if max(map(abs, map(float.__sub__, free, before))) <= SETTLED * max(free):
            break
    for pool in open_pools:
        _pour(pool, free, rates, least)
    return free


def _pour(pool: Pool, free: list[float], rates: Sequence[float], least: float) -> None:
    """Take the pool's bytes out of `free`, divide them anew and put them back in."""
    members, quota = pool.members, pool.quota
    for d, share in quota.items():
        free[d] -= share / rates[d]
    quota.clear()
    own_rates = [rates[d] for d in members]
    for d, share in zip(members, fill(pool.nbytes, [free[d] for d in members], own_rates, least), strict=True):
        if share > 0:
            quota[d] = share
            free[d] += share / rates[d]


def cut(start: int, length: int, wish: float, least: int, grain: int) -> int:
    """How many bytes to take from the front of a piece of `length` bytes at `start` of its job; `wish` would be best.

    The cut lies on a multiple of `grain`, not beyond `wish`, and neither part is smaller than `least`; where that
    cannot be, the part taken is `least`, and a piece that cannot be cut at all is taken whole.
    """
    if wish >= length:
        return length
    low = -(-(start + least) // grain) * grain
    high = (start + length - least) // grain * grain
    if low > high:
        return length
    at = int((start + wish) // grain) * grain
    return min(max(at, low), high) - start


Uplinks = Sequence[tuple[frozenset[int], float]]
"""Groups of drives behind one uplink each: which they are, and the bytes/s they can move together."""


def joint_rate(drives: frozenset[int], rates: Sequence[float], uplinks: Uplinks = ()) -> float:
    """Bytes/s of these drives together."""
    total = sum(rates[d] for d in drives)
    return total - sum(max(0.0, sum(rates[d] for d in group & drives) - limit) for group, limit in uplinks)


def fluid_bound(nbytes: Mapping[frozenset[int], float], rates: Sequence[float], uplinks: Uplinks = ()) -> float:
    """Least seconds in which idle drives can read bytes held by the given sets of drives, were they divisible at will.

    The largest, over all sets S of drives, of (bytes that only S holds) / (rate of S): max-flow, min-cut. No other S
    than unions of the given sets can be the one.
    """
    unions = {frozenset[int]()}
    for holders in nbytes:
        unions |= {holders | others for others in unions}
    bounds = (
        sum(n for holders, n in nbytes.items() if holders <= inside) / joint_rate(inside, rates, uplinks)
        for inside in unions - {frozenset[int]()}
    )
    return max(bounds, default=0.0)
