"""The expert store: what the model asks for routed experts.

`plan` names what a layer needs and yields each expert as it is at hand; the model calls `release` when it has
computed with it. Between tokens experts stay in a cache of a fixed number of bytes, the least recently used going
first; an expert that is in use is never dropped. The answer never depends on what is cached.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.errors import DoesNotFitError
from runtime.ops import Ops, Weight
from runtime.weights.reads import PlainReads, Reads, Release

COPYING = ("mlx",)
"""Backends that keep a copy of an expert, and need the bytes it was read into no longer."""


@dataclass
class CacheStats:
    """Counts since the store was opened.

    `wanted` counts each distinct expert of each plan, `hits` those that were held, `reads` those that were read and
    `bytes_read` their packed bytes. `bytes_held` is memory, of experts that are being read too.
    """

    wanted: int = 0
    hits: int = 0
    reads: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0

    @property
    def misses(self) -> int:
        """Experts that were wanted and not held."""
        return self.wanted - self.hits


def staging_floor(checkpoint: Checkpoint, unit_bytes: int | None = None) -> int:
    """The smallest legal budget in bytes: one layer's top-k experts, of `unit_bytes` each where buffers are larger."""
    return checkpoint.config.num_experts_per_token * (unit_bytes or checkpoint.expert_nbytes)


def check_budget(checkpoint: Checkpoint, budget_bytes: int, unit_bytes: int | None = None) -> None:
    """Raise DoesNotFitError when the budget is below one layer's top-k."""
    floor = staging_floor(checkpoint, unit_bytes)
    if budget_bytes < floor:
        raise DoesNotFitError(
            f"an expert cache of {budget_bytes:,} bytes was asked for, but one layer's top-"
            f"{checkpoint.config.num_experts_per_token} experts take {floor:,}: give --expert-cache at least that"
        )


class ExpertStore:
    """Has experts read and keeps up to `budget_bytes` of them, those that are being read included.

    With `reuse` off, nothing is kept once it is released (`--expert-cache off`). `reads`: where they come from; the
    model directory, plainly, when nothing is given.
    Raises DoesNotFitError when the budget is below one layer's top-k.
    """

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, budget_bytes: int, reuse: bool = True, reads: Reads | None = None
    ) -> None:
        self._reads = reads or PlainReads(checkpoint)
        check_budget(checkpoint, budget_bytes, self._reads.unit_bytes)
        self.budget_bytes = budget_bytes
        self.reuse = reuse
        self.stats = CacheStats()
        self._checkpoint = checkpoint
        self._ops = ops
        self._held: OrderedDict[tuple[int, int], tuple[Weight, Release]] = OrderedDict()
        self._in_use: set[tuple[int, int]] = set()
        self._under_way: set[tuple[int, int]] = set()

    def plan(self, layer: int, ids: npt.NDArray[np.int64]) -> Generator[tuple[int, Weight], None, None]:
        """Yield each distinct expert of ids [T, k] once, with its weights: cached ones first, then as they land.

        What is missing is asked for here and now, in disk order, as far as the budget goes; the rest follows as
        experts are released. Close it when not all are taken: what is not released by then is.
        Raises StorageError when an expert cannot be read, CheckpointError when its bytes cannot be weights.
        """
        begun = self._plan(layer, ids)
        next(begun)
        return begun

    def _plan(self, layer: int, ids: npt.NDArray[np.int64]) -> Generator[tuple[int, Weight], None, None]:
        """`plan`, with a first stop where everything is under way and nothing is taken."""
        wanted = {(layer, int(e)) for e in np.unique(ids)}
        cached = sorted(key for key in wanted if key in self._held)
        missing = deque(self._checkpoint.disk_order(layer, [e for _, e in wanted.difference(cached)]))
        self.stats.wanted += len(wanted)
        self.stats.hits += len(cached)
        self._in_use.update(cached)  # so that no read below evicts one of them
        try:
            wave = self._submit(layer, missing)
            yield -1, None
            for key in cached:
                self._held.move_to_end(key)
                yield key[1], self._held[key][0]
                wave += self._submit(layer, missing)
            while wave or missing:
                if not wave:
                    raise AssertionError("the expert store is full of experts in use: release each one before the next")
                with closing(self._reads.landed(layer, wave)) as landing:  # type: ignore[type-var]
                    wave = []
                    for e, packed, give_back in landing:
                        yield e, self._take((layer, e), packed, give_back)
                        wave += self._submit(layer, missing)
        finally:  # also when the model stopped in the middle and released nothing
            if self._under_way:
                self._reads.cancel(layer, [e for _, e in self._under_way])
                self.stats.bytes_held -= len(self._under_way) * self._reads.unit_bytes
                self._under_way.clear()
            for key in wanted & self._in_use:
                self.release(*key)

    def release(self, layer: int, expert: int) -> None:
        """The model has computed with the expert: it may be dropped."""
        self._in_use.discard((layer, expert))
        if not self.reuse:
            self._drop((layer, expert))

    def _submit(self, layer: int, missing: deque[int]) -> list[int]:
        """Have as many of these read as may be under way and there is room for; they are taken off the list."""
        wave: list[int] = []
        while missing and len(self._under_way) < self._reads.ahead and self._make_room():
            wave.append(missing.popleft())
            self._under_way.add((layer, wave[-1]))
            self.stats.bytes_held += self._reads.unit_bytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.bytes_held)
        if wave:
            self._reads.submit(layer, wave)
        return wave

    def _take(self, key: tuple[int, int], packed: PackedExpert, give_back: Release) -> Weight:
        """An expert has landed."""
        try:
            weight = self._ops.expert(packed)
        except BaseException:
            give_back()
            raise
        if self._ops.name in COPYING:
            give_back()
            give_back = _nothing
        self._under_way.remove(key)
        self._held[key] = weight, give_back
        self._in_use.add(key)
        self.stats.reads += 1
        self.stats.bytes_read += self._checkpoint.expert_nbytes
        return weight

    def _make_room(self) -> bool:
        """Drop the least recently used until one more fits; False when all are in use."""
        while self.stats.bytes_held + self._reads.unit_bytes > self.budget_bytes:
            idle = next((key for key in self._held if key not in self._in_use), None)
            if idle is None:
                return False
            self._drop(idle)
            self.stats.evictions += 1
        return True

    def _drop(self, key: tuple[int, int]) -> None:
        _, give_back = self._held.pop(key)
        self.stats.bytes_held -= self._reads.unit_bytes
        give_back()


def _nothing() -> None:
    """The bytes were given back before."""
