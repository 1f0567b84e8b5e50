"""Where the expert store gets its bytes from: the model directory, plainly, or the engine that reads several drives.

`PlainReads` reads one expert after the other through the page cache, in the thread that asks: right for experts of
a few kilobytes, for which handing a read to a thread takes longer than the read. `DriveReads` is the real thing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol

import numpy as np

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.drives.buffers import Buffer, nothing
from runtime.drives.jobs import Job, Priority
from runtime.drives.outcomes import Fate, Landed
from runtime.drives.reader import Reader
from runtime.drives.waits import DEMAND, Waits
from runtime.weights.checks import ReadChecks
from runtime.weights.landing import as_landed
from runtime.weights.placement import MODEL, Placement

Release = Callable[[], None]


class Arrival(NamedTuple):
    """An expert that has been read; `release` gives its memory back, once."""

    expert: int
    packed: PackedExpert
    release: Release


class Reads(Protocol):
    """What the store needs.

    unit_bytes: what one expert takes in memory; ahead: how many may be under way at once; guesses: how many of them
    may have been guessed, 0 where nothing is read before it is waited for; waits: for what was not there.
    """

    unit_bytes: int
    ahead: int
    guesses: int
    waits: Waits

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read; does not wait. What was guessed is not read again."""
        ...

    def landed(
        self, layer: int, experts: Collection[int], pulse: Callable[[], None] | None = None
    ) -> Iterator[Arrival]:
        """Yield these, which were submitted, as they come; `pulse` is called time and again while it waits.

        When it is closed, or `pulse` raises, those it has not yielded are cancelled. Raises StorageError naming layer,
        expert and place, and where they are looked at here, CheckpointError for bytes that cannot be weights.
        """
        ...

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        """Read these when there is nothing better to do. Never waits."""
        ...

    def settle(self, layer: int, experts: Collection[int]) -> tuple[list[Arrival], list[int]]:
        """Of what was guessed: what has landed, the caller's from now on, and what will not come. Never waits."""
        ...

    def judge(self, layer: int, expert: int, needed: bool) -> None:
        """What was guessed, landed and taken is needed now, or goes unused."""
        ...

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        """Nobody wants these any more, which were submitted or guessed and not taken."""
        ...


class PlainReads:
    """Reads an expert when it is waited for."""

    ahead, guesses = 1, 0

    def __init__(self, checkpoint: Checkpoint, checks: ReadChecks | None = None) -> None:
        self.unit_bytes, self.waits = checkpoint.expert_nbytes, Waits()
        self._checkpoint, self._checks = checkpoint, checks

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        """There is nobody to begin."""

    def landed(
        self, layer: int, experts: Collection[int], pulse: Callable[[], None] | None = None
    ) -> Iterator[Arrival]:
        for expert in experts:
            began = time.monotonic()
            data = np.empty(self.unit_bytes, np.uint8)
            self._checkpoint.read_expert(layer, expert, data, check=False)
            self.waits.add(DEMAND, (layer, expert), began, time.monotonic())
            if self._checks is not None:
                self._checks.whole(MODEL, layer, expert, data.data)
            yield Arrival(expert, self._checkpoint.view_expert(layer, expert, data), nothing)

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        raise AssertionError("nothing is read here before it is waited for")

    def settle(self, layer: int, experts: Collection[int]) -> tuple[list[Arrival], list[int]]:
        return [], list(experts)

    def judge(self, layer: int, expert: int, needed: bool) -> None:
        """There are no guesses."""

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        """Nothing was begun."""


class DriveReads:
    """Reads through a `Reader`: all experts of a call are one barrier, and each may come from any of its holders."""

    def __init__(
        self, checkpoint: Checkpoint, placement: Placement, reader: Reader, unit_bytes: int, ahead: int, guesses: int
    ) -> None:
        self.unit_bytes, self.ahead, self.guesses, self.waits = unit_bytes, ahead, guesses, reader.waits
        self._checkpoint, self._placement, self._reader = checkpoint, placement, reader
        self._barrier = 0

    def submit(self, layer: int, experts: Sequence[int]) -> None:
        self._barrier += 1
        self._reader.submit(self._jobs(layer, experts, Priority.DEMAND, self._barrier))

    def guess(self, layer: int, experts: Sequence[int]) -> None:
        self._reader.submit(self._jobs(layer, experts, Priority.PREFETCH, self._barrier + 1))

    def landed(
        self, layer: int, experts: Collection[int], pulse: Callable[[], None] | None = None
    ) -> Iterator[Arrival]:
        keys = [(layer, expert) for expert in experts]
        with closing(as_landed(self._reader, keys, _name, pulse)) as landing:  # type: ignore[type-var]
            for landed in landing:
                yield self._arrival(layer, landed.key[1], landed.buffer)  # type: ignore[index]

    def settle(self, layer: int, experts: Collection[int]) -> tuple[list[Arrival], list[int]]:
        arrivals, gone = [], []
        for outcome in self._reader.poll([(layer, e) for e in experts]):
            expert = outcome.key[1]  # type: ignore[index]
            if isinstance(outcome, Landed):
                arrivals.append(self._arrival(layer, expert, outcome.buffer))
            else:
                gone.append(expert)
        return arrivals, gone

    def judge(self, layer: int, expert: int, needed: bool) -> None:
        self._reader.judge((layer, expert), Fate.NEEDED if needed else Fate.UNUSED)

    def cancel(self, layer: int, experts: Collection[int]) -> None:
        self._reader.cancel([(layer, e) for e in experts])

    def _jobs(self, layer: int, experts: Sequence[int], priority: Priority, barrier: int) -> list[Job]:
        return [Job((layer, e), self._placement.spans(layer, e), priority, barrier) for e in experts]

    def _arrival(self, layer: int, expert: int, buffer: Buffer) -> Arrival:
        """Its scales were looked at when they were read (`checks.ScaleCheck`)."""
        data = np.frombuffer(buffer.view, np.uint8)
        return Arrival(expert, self._checkpoint.view_expert(layer, expert, data, check=False), buffer.release)


def _name(key: tuple[int, int]) -> str:
    layer, expert = key
    return f"layer {layer} expert {expert}"
