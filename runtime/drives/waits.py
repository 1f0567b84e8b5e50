"""How long somebody could not go on because bytes were not there yet, and what he waited for.

One wait is from when nothing was at hand to when something came; what came first says what was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.drives.jobs import Key

DEMAND, LATE, TRUNK = "demand", "late", "trunk"
WAITS = (DEMAND, LATE, TRUNK)
"""Experts that were asked for when it was sure that they are needed; those begun on a guess and under way then; the
rest of the weights."""

Hear = Callable[[str, Key | None, float, float], None]
"""(what for, the job that came first or None, began, ended), times by `time.monotonic`."""


@dataclass(frozen=True)
class Waited:
    """Seconds, by what was waited for."""

    demand_s: float = 0.0
    late_s: float = 0.0
    trunk_s: float = 0.0

    @property
    def total_s(self) -> float:
        """For whatever it was."""
        return self.demand_s + self.late_s + self.trunk_s

    def __add__(self, other: Waited) -> Waited:
        return Waited(self.demand_s + other.demand_s, self.late_s + other.late_s, self.trunk_s + other.trunk_s)

    def __sub__(self, other: Waited) -> Waited:
        return Waited(self.demand_s - other.demand_s, self.late_s - other.late_s, self.trunk_s - other.trunk_s)


NOTHING = Waited()


class Waits:
    """Adds up the waits of one thread. `hear`, when it is set, is told of each."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(WAITS, 0.0)
        self.hear: Hear | None = None

    def add(self, what: str, key: Key | None, began: float, ended: float) -> None:
        """A wait has ended; what: one of WAITS."""
        self._seconds[what] += ended - began
        if self.hear is not None:
            self.hear(what, key, began, ended)

    @property
    def so_far(self) -> Waited:
        """All of them."""
        return Waited(*(self._seconds[what] for what in WAITS))
