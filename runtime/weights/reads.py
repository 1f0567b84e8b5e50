"""Where the expert store gets its bytes from: the model directory, plainly, or the engine that reads several drives.

`PlainReads` reads one expert after the other through the page cache, in the thread that asks: right for experts of
a few kilobytes, for which handing a read to a thread takes longer than the read. `DriveReads` is the real thing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.drives.buffers import Buffer
from runtime.drives.jobs import Job
from runtime.drives.reader import Landed, Lost, Reader
from runtime.errors import StorageError
from runtime.weights.checks import ReadChecks
from runtime.weights.placement import MODEL, Placement

PATIENCE_S = 300.0
"""A layer that gets nothing for so long is told that its drives hang."""

Release = Callable[[], None]


class Reads(Protocol):
    """What the store needs. unit_bytes: what one expert takes in memory; ahead: how many may be under way at once."""

    unit_bytes: int
    ahead: int

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read; does not wait."""
        ...

    def landed(self, layer: int, experts: Collection[int]) -> Iterator[tuple[int, PackedExpert, Release]]:
        """Yield these, which were submitted, as they come; the release gives the memory back, once.

        When it is closed, those it has not yielded are cancelled.
        Raises StorageError naming layer, expert and place, CheckpointError for bytes that cannot be weights.
        """
        ...

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        """Nobody wants these any more, which were submitted and not waited for."""
        ...


class PlainReads:
    """Reads an expert when it is waited for."""

    ahead = 1

    def __init__(self, checkpoint: Checkpoint, checks: ReadChecks | None = None) -> None:
        self.unit_bytes = checkpoint.expert_nbytes
        self._checkpoint, self._checks = checkpoint, checks

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        """There is nobody to begin."""

    def landed(self, layer: int, experts: Collection[int]) -> Iterator[tuple[int, PackedExpert, Release]]:
        for expert in experts:
            data = np.empty(self.unit_bytes, np.uint8)
            self._checkpoint.read_expert(layer, expert, data, check=False)
            if self._checks is not None:
                self._checks.whole(MODEL, layer, expert, data.data)
            yield expert, self._checkpoint.view_expert(layer, expert, data), _nothing

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        """Nothing was begun."""


def _nothing() -> None:
    """The memory goes with the arrays."""


class DriveReads:
    """Reads through a `Reader`: all experts of a call are one barrier, and each may come from any of its holders."""

    def __init__(
        self, checkpoint: Checkpoint, placement: Placement, reader: Reader, unit_bytes: int, ahead: int
    ) -> None:
        self.unit_bytes, self.ahead = unit_bytes, ahead
        self._checkpoint, self._placement, self._reader = checkpoint, placement, reader
        self._barrier = 0

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        self._barrier += 1
        spans = self._placement.spans
        self._reader.submit([Job((layer, e), spans(layer, e), barrier=self._barrier) for e in experts])

    def landed(self, layer: int, experts: Collection[int]) -> Iterator[tuple[int, PackedExpert, Release]]:
        left = {(layer, e) for e in experts}
        outcomes = self._reader.as_landed(tuple(left), PATIENCE_S)
        try:
            for outcome in outcomes:
                left.remove(outcome.key)  # type: ignore[arg-type]
                expert = outcome.key[1]  # type: ignore[index]
                if isinstance(outcome, Lost):
                    raise outcome.error(f"layer {layer} expert {expert}")
                if not isinstance(outcome, Landed):
                    raise StorageError(f"layer {layer} expert {expert}: its read was cancelled")
                yield expert, self._view(layer, expert, outcome.buffer), outcome.buffer.release
        except TimeoutError:
            raise StorageError(
                f"layer {layer}: {len(left)} experts, {min(left)[1]} among them, have not come and nothing else has "
                f"for {PATIENCE_S:.0f} s: a drive hangs"
            ) from None
        finally:
            if left:
                self._reader.cancel(left)
                with suppress(StorageError, TimeoutError):  # what had landed, and was not taken
                    for outcome in outcomes:
                        if isinstance(outcome, Landed):
                            outcome.buffer.release()

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        self._reader.cancel([(layer, e) for e in experts])

    def _view(self, layer: int, expert: int, buffer: Buffer) -> PackedExpert:
        try:
            return self._checkpoint.view_expert(layer, expert, np.frombuffer(buffer.view, np.uint8))
        except BaseException:
            buffer.release()
            raise
