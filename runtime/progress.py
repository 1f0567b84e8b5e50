"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, in all), in bytes or in pieces of work, while something long is going on."""

Pulse = Callable[[], None]
"""Called time and again while something long goes on, such as waiting for reads; what it raises ends that."""


class Tally:
    """Counts bytes, or pieces of work, and tells."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, amount: int) -> None:
        """So much more is done."""
        self._done += amount
        self._progress(self._done, self._total)
