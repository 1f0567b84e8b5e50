"""The expert store: what the model asks for routed experts.

`plan` names what a layer needs and yields each expert as it is at hand; the model calls `release` when it has
computed with it. Between tokens experts stay in a cache of a fixed number of bytes, the least recently used going
first; an expert that is in use is never dropped. The answer never depends on what is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.errors import DoesNotFitError
from runtime.ops import Ops, Weight


@dataclass
class CacheStats:
    """Counts since the store was opened; bytes are the experts' packed bytes."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0


def staging_floor(checkpoint: Checkpoint) -> int:
    """The smallest legal budget in bytes: one layer's top-k experts."""
    return checkpoint.config.num_experts_per_token * checkpoint.expert_nbytes


class ExpertStore:
    """Reads experts from the checkpoint and keeps up to `budget_bytes` of them.

    With `reuse` off, nothing is kept once it is released (`--expert-cache off`).
    Raises DoesNotFitError when the budget is below one layer's top-k.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, budget_bytes: int, reuse: bool = True) -> None:
        floor = staging_floor(checkpoint)
        if budget_bytes < floor:
            raise DoesNotFitError(
                f"an expert cache of {budget_bytes:,} bytes was asked for, but one layer's top-"
                f"{checkpoint.config.num_experts_per_token} experts take {floor:,}: give --expert-cache at least that"
            )
        self.budget_bytes = budget_bytes
        self.reuse = reuse
        self.stats = CacheStats()
        self._checkpoint = checkpoint
        self._ops = ops
        self._held: OrderedDict[tuple[int, int], Weight] = OrderedDict()
        self._in_use: set[tuple[int, int]] = set()

    def plan(self, layer: int, ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, Weight]]:
        """Yield each distinct expert of ids [T, k] once, with its weights: cached ones first, then in disk order.

        Raises StorageError when an expert cannot be read, CheckpointError when its bytes cannot be weights.
        """
        wanted: list[int] = np.unique(ids).tolist()
        cached = [e for e in wanted if (layer, e) in self._held]
        missing = [e for e in wanted if (layer, e) not in self._held]
        self.stats.hits += len(cached)
        self.stats.misses += len(missing)
        self._in_use.update((layer, e) for e in cached)  # so that no read below evicts one of them
        try:
            for e in cached:
                self._held.move_to_end((layer, e))
                yield e, self._held[layer, e]
            for e in self._checkpoint.disk_order(layer, missing):
                yield e, self._read(layer, e)
        finally:
            self._in_use.clear()

    def release(self, layer: int, expert: int) -> None:
        """The model has computed with the expert: it may be dropped."""
        self._in_use.discard((layer, expert))
        if not self.reuse:
            self._drop((layer, expert))

    def hint(self, layer: int, ids: npt.NDArray[np.int64]) -> None:
        """Guesses of what `plan` will ask for. This store reads on demand only and takes no notice."""

    def end_of_token(self) -> None:
        """A pass over all layers has ended. Least-recently-used order needs no more than `plan` tells it."""

    def _read(self, layer: int, expert: int) -> Weight:
        nbytes = self._checkpoint.expert_nbytes
        self._make_room(nbytes)
        weight = self._ops.expert(self._checkpoint.read_expert(layer, expert))
        self._held[layer, expert] = weight
        self._in_use.add((layer, expert))
        self.stats.bytes_read += nbytes
        self.stats.bytes_held += nbytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.bytes_held)
        return weight

    def _make_room(self, nbytes: int) -> None:
        idle = (key for key in list(self._held) if key not in self._in_use)
        while self.stats.bytes_held + nbytes > self.budget_bytes:
            self._drop(next(idle))
            self.stats.evictions += 1

    def _drop(self, key: tuple[int, int]) -> None:
        del self._held[key]
        self.stats.bytes_held -= self._checkpoint.expert_nbytes
