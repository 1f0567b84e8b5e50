"""Which experts stay in memory, and in how little of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.rejected.trial import EXPERTS, LAYERS, TOP_K, Outcome, Trial, token_s
from runtime.drives.jobs import Job, Key
from runtime.drives.virtual import World
from runtime.forecast import Cache, routes
from runtime.weights import worth
from runtime.weights.worth import Worth

CACHED = 500
"""Experts that a cache of 8.8 GB holds: fewer than the 1,472 of one token."""
CACHED_TOKENS = 12
ROOM = TOP_K // 8
"""Experts there is room for below one layer's top-k."""


def least_recently_used(trial: Trial) -> Outcome:
    """The expert that was not used for longest goes first."""
    counted = f"experts read, {CACHED} cached: least worth goes | least recently used"
    return Outcome(counted, misses(trial, CACHED, Worth), misses(trial, CACHED, LeastRecentlyUsed))


def cache_below_a_layer(trial: Trial) -> Outcome:
    """A cache that has no room for the experts of one layer: each makes room for the next before that is read."""
    counted = f"virtual s/token: room for {TOP_K} experts | for {ROOM}"
    return Outcome(counted, token_s(trial), token_s(trial, Narrow))


def misses(trial: Trial, slots: int, rule: type[Worth]) -> int:
    """Experts that tokens have to read, one after the other, with a cache of so many that was empty before."""
    with mock.patch.object(routes, "Worth", rule):
        cache = Cache(slots, len(LAYERS), EXPERTS)
    for token in trial.routes[:CACHED_TOKENS]:
        cache.token(token)
    return cache.wanted - cache.hits


class LeastRecentlyUsed(Worth):
    """What is held, in the order of its last use."""

    def __init__(self, layers: Collection[int], experts: int) -> None:
        self._used: dict[worth.Key, None] = {}

    def visit(self, layer: int, chosen: npt.NDArray[np.int64]) -> None:
        for key in ((layer, expert) for expert in chosen.tolist()):
            if key in self._used:
                self._used[key] = self._used.pop(key)

    def enter(self, key: worth.Key) -> None:
        self._used[key] = None

    def leave(self, key: worth.Key) -> None:
        del self._used[key]

    def least(self, but: Collection[worth.Key], below: float | None = None) -> worth.Key | None:
        return next((key for key in self._used if key not in but), None)


class Narrow(World):
    """Has room for ROOM experts at once: the next is asked for when one has landed and gone."""

    def submit(self, jobs: Iterable[Job]) -> None:
        waiting = deque(jobs)

        def ask(_: Key = None) -> None:
            if waiting:
                super(Narrow, self).submit([waiting.popleft()])

        self.on_done = ask
        for _ in range(ROOM):
            ask()
