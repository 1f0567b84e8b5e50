"""The expert store: what the model asks for routed experts.

`plan` names what a layer needs and yields each expert as it is at hand; the model calls `release` when it has
computed with it. Between tokens experts stay in a cache of a fixed number of bytes, the least recently used going
first; an expert that is in use is never dropped. The answer never depends on what is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.errors import DoesNotFitError
from runtime.ops import Ops, Weight


@dataclass
class CacheStats:
    """Counts since the store was opened; bytes are the experts' packed bytes.

    `wanted` counts each distinct expert of each plan, `hits` those that were held, `reads` what was read in fact.
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


def staging_floor(checkpoint: Checkpoint) -> int:
    """The smallest legal budget in bytes: one layer's top-k experts."""
    return checkpoint.config.num_experts_per_token * checkpoint.expert_nbytes


def check_budget(checkpoint: Checkpoint, budget_bytes: int) -> None:
    """Raise DoesNotFitError when the budget is below one layer's top-k."""
    floor = staging_floor(checkpoint)
    if budget_bytes < floor:
        raise DoesNotFitError(
            f"an expert cache of {budget_bytes:,} bytes was asked for, but one layer's top-"
            f"{checkpoint.config.num_experts_per_token} experts take {floor:,}: give --expert-cache at least that"
        )


class ExpertStore:
    """Reads experts from the checkpoint and keeps up to `budget_bytes` of them.

    With `reuse` off, nothing is kept once it is released (`--expert-cache off`).
    Raises DoesNotFitError when the budget is below one layer's top-k.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, budget_bytes: int, reuse: bool = True) -> None:
        check_budget(checkpoint, budget_bytes)
        self.budget_bytes = budget_bytes
        self.reuse = reuse
        self.stats = CacheStats()
        self._checkpoint = checkpoint
        self._ops = ops
        self._held: OrderedDict[tuple[int, int], Weight] = OrderedDict()
        self._in_use: set[tuple[int, int]] = set()

    def plan(self, layer: int, ids: npt.NDArray[np.int64]) -> Generator[tuple[int, Weight], None, None]:
        """Yield each distinct expert of ids [T, k] once, with its weights: cached ones first, then in disk order.

        Close it when not all are taken: what is not released by then is.
        Raises StorageError when an expert cannot be read, CheckpointError when its bytes cannot be weights.
        """
        wanted = {(layer, int(e)) for e in np.unique(ids)}
        cached = sorted(key for key in wanted if key in self._held)
        missing = self._checkpoint.disk_order(layer, [e for _, e in wanted.difference(cached)])
        self.stats.wanted += len(wanted)
        self.stats.hits += len(cached)
        self._in_use.update(cached)  # so that no read below evicts one of them
        try:
            for key in cached:
                self._held.move_to_end(key)
                yield key[1], self._held[key]
            for e in missing:
                yield e, self._read((layer, e))
        finally:  # also when the model stopped in the middle and released nothing
            for key in wanted & self._in_use:
                self.release(*key)

    def release(self, layer: int, expert: int) -> None:
        """The model has computed with the expert: it may be dropped."""
        self._in_use.discard((layer, expert))
        if not self.reuse:
            self._drop((layer, expert))

    def _read(self, key: tuple[int, int]) -> Weight:
        nbytes = self._checkpoint.expert_nbytes
        self._make_room(nbytes)
        weight = self._ops.expert(self._checkpoint.read_expert(*key))
        self._held[key] = weight
        self._in_use.add(key)
        self.stats.reads += 1
        self.stats.bytes_read += nbytes
        self.stats.bytes_held += nbytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.bytes_held)
        return weight

    def _make_room(self, nbytes: int) -> None:
        while self.stats.bytes_held + nbytes > self.budget_bytes:
            idle = next((key for key in self._held if key not in self._in_use), None)
            if idle is None:
                raise AssertionError("the expert store is full of experts in use: release each one before the next")
            self._drop(idle)
            self.stats.evictions += 1

    def _drop(self, key: tuple[int, int]) -> None:
        del self._held[key]
        self.stats.bytes_held -= self._checkpoint.expert_nbytes
