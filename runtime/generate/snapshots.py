"""What has been computed of earlier conversations, kept to go on from.

A snapshot is the state after some tokens, with the logits that follow where they were computed. It serves a prompt
that begins with exactly those tokens, and none other: a recurrent state cannot be taken back by even one token. What
is kept in memory never takes more than a budget of bytes; the snapshot used longest ago is let go first, to a disk
where there is one for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.generate.sampling import Logits
from runtime.model.state import State

WORTH_A_PASS = 32
"""Tokens for which a prompt is read in one pass more, so that they need not be read again."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The tokens, the state after them, the logits [V] that follow or None, and the bytes all that takes.

    `state` is never run forward: sessions go on from copies.
    """

    ids: tuple[int, ...]
    state: State
    logits: Logits | None
    nbytes: int


class Disk(Protocol):
    """Where snapshots go that memory lets go."""

    def longest(self, prompt: Sequence[int], beyond: int) -> Snapshot | None:
        """The longest of more than `beyond` tokens that the prompt extends, or equals when the logits are there."""
        ...

    def write(self, snapshot: Snapshot) -> None:
        """Keep it. Never raises for what the disk cannot do."""
        ...


class Snapshots:
    """Snapshots within `budget_bytes`, in the order in which they were last used. For one thread at a time."""

    def __init__(self, budget_bytes: int, disk: Disk | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._disk = disk
        self.held_bytes = 0
        self._kept: list[Snapshot] = []

    def __len__(self) -> int:
        return len(self._kept)

    def fits(self, nbytes: int) -> bool:
        """Whether one of this size may be kept at all."""
        return nbytes <= self.budget_bytes or self._disk is not None

    def longest(self, prompt: Sequence[int]) -> Snapshot | None:
        """The longest that the prompt extends, or equals when the logits are there."""
        ids = tuple(prompt)
        fitting = [
            kept
            for kept in self._kept
            if ids[: len(kept.ids)] == kept.ids and (len(kept.ids) < len(ids) or kept.logits is not None)
        ]
        best = max(fitting, key=lambda kept: len(kept.ids), default=None)
        known = 0 if best is None else len(best.ids)
        if self._disk is not None and (read := self._disk.longest(prompt, known)) is not None:
            self._hold(read)
            return read
        if best is not None:
            self._kept.remove(best)
            self._kept.append(best)
        return best

    def branch(self, prompt: Sequence[int], message_end: int) -> int | None:
        """Where a snapshot would have helped this prompt, and will help the next one like it.

        That is the end of the last message up to which the prompt and one that is kept agree, where they part later
        on; None unless it is WORTH_A_PASS tokens beyond what is known.
        """
        known = max((len(kept.ids) for kept in self._kept if tuple(prompt[: len(kept.ids)]) == kept.ids), default=0)
        agreed = max((_agreed(kept.ids, prompt) for kept in self._kept), default=0)
        ends = (place for place in range(agreed, known, -1) if prompt[place - 1] == message_end)
        end = next(ends, known)
        return end if end - known >= WORTH_A_PASS and end < len(prompt) else None

    def keep(self, snapshot: Snapshot) -> None:
        """Keep it, in place of one with the same tokens; let go what there is no room for, it included."""
        for kept in [kept for kept in self._kept if kept.ids == snapshot.ids]:
            self._drop(kept)
        self._hold(snapshot)

    def put_down(self) -> None:
        """Have the disk, if there is one, keep everything."""
        if self._disk is not None:
            for kept in self._kept:
                self._disk.write(kept)

    def _hold(self, snapshot: Snapshot) -> None:
        self._kept.append(snapshot)
        self.held_bytes += snapshot.nbytes
        while self.held_bytes > self.budget_bytes:
            let_go = next((kept for kept in self._kept if kept.nbytes > self.budget_bytes), self._kept[0])
            self._drop(let_go)
            if self._disk is not None:
                self._disk.write(let_go)

    def _drop(self, snapshot: Snapshot) -> None:
        self._kept.remove(snapshot)
        self.held_bytes -= snapshot.nbytes


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
