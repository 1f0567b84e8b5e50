"""What the reader gives back of each job, and where that lies until somebody takes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import nan

from runtime.drives.buffers import Buffer, BufferPool
from runtime.drives.jobs import Fault, Key, Piece
from runtime.errors import StorageError


@dataclass(frozen=True, slots=True)
class Landed:
    """The job's bytes, whole, in `buffer`; the receiver releases it. pieces: which drive delivered what, in the order
    in which it came."""

    key: Key
    buffer: Buffer
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """No copy is left. reasons: (drive, fault, detail) of each failure, oldest first."""

    key: Key
    reasons: tuple[tuple[str, Fault, str], ...]

    def error(self, what: str) -> StorageError:
        """`what` names the job for a person: `layer 3, expert 17`."""
        last = {drive: f"drive {drive}: {fault.value}: {detail}" for drive, fault, detail in self.reasons}
        return StorageError(f"{what}: no copy left that can be read; {'; '.join(last.values()) or 'no drive answers'}")


@dataclass(frozen=True, slots=True)
class Dropped:
    """The job was cancelled, or was a prefetch for which there was no room."""

    key: Key


Outcome = Landed | Lost | Dropped


class Fate(Enum):
    """What becomes of a prefetch: it turns out to be needed, is given up before it was read, is read and thrown away,
    or is read and taken by somebody who only guesses, too."""

    NEEDED = "needed"
    DROPPED = "dropped"
    UNUSED = "unused"
    TAKEN = "taken"


GuessHeard = Callable[[Key, Fate, float, int], None]
"""Hears what becomes of a prefetch: its key, its fate, when it was submitted, and the barrier it is needed at."""


class Outcomes:
    """What has come and nobody has taken; belongs to the reader's lock.

    guesses: of those that landed as prefetch, and that nobody has needed yet, when they were submitted; oldest first.
    """

    def __init__(self, pool: BufferPool, hear: GuessHeard | None) -> None:
        self.guesses: dict[Key, float] = {}
        self._pool, self._hear = pool, hear
        self._by_key: dict[Key, Outcome] = {}

    def landed(self, key: Key) -> bool:
        """Are the job's bytes here?"""
        return isinstance(self._by_key.get(key), Landed)

    def add(self, outcome: Outcome, guessed: float | None = None) -> None:
        """A job has ended; guessed: as a prefetch that was submitted then."""
        self._by_key[outcome.key] = outcome
        if guessed is not None:
            self.guesses[outcome.key] = guessed

    def take(self, key: Key) -> Outcome | None:
        """It is the caller's now."""
        self._settle(key, Fate.TAKEN)
        return self._by_key.pop(key, None)

    def need(self, key: Key, barrier: int) -> None:
        """If this is a prefetch that has landed, it is none any more."""
        self._settle(key, Fate.NEEDED, barrier)

    def forget(self, key: Key) -> None:
        """Throw away what nobody has taken."""
        outcome = self._by_key.pop(key, None)
        self._settle(key, Fate.UNUSED)
        if isinstance(outcome, Landed):
            self._pool.give(outcome.buffer)

    def forget_all(self) -> None:
        """Throw away everything."""
        for key in list(self._by_key):
            self.forget(key)

    def tell(self, key: Key, fate: Fate, queued: float = nan, barrier: int = -1) -> None:
        """This became of a prefetch that is not here."""
        if self._hear is not None:
            self._hear(key, fate, queued, barrier)

    def audit(self) -> None:
        """AssertionError where something is a guess that has not landed."""
        assert all(self.landed(key) for key in self.guesses)

    def _settle(self, key: Key, fate: Fate, barrier: int = -1) -> None:
        queued = self.guesses.pop(key, None)
        if queued is not None:
            self.tell(key, fate, queued, barrier)
