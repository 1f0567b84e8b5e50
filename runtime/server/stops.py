"""Stop texts: where they end an answer that comes in pieces.

The law: the answer is what comes before the first place where a stop text begins, whichever pieces it came in. So a
piece is let through up to where a stop text may have begun, held back from there, and released when none has.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Looks through one answer. `hit` once a stop text has ended it; then nothing comes any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """What of the answer is certain now."""
        if self.hit:
            return ""
        self._held += text
        found, begun = self._found(), self._begun()
        if found is not None and found <= begun:
            return self._cut(found)
        out, self._held = self._held[:begun], self._held[begun:]
        return out

    def finish(self) -> str:
        """What was held back, when nothing more comes: up to a stop text that waited for an earlier one to end."""
        found = None if self.hit else self._found()
        if found is not None:
            return self._cut(found)
        out, self._held = self._held, ""
        return out

    def _cut(self, place: int) -> str:
        out, self._held, self.hit = self._held[:place], "", True
        return out

    def _found(self) -> int | None:
        """Where the first whole stop text begins."""
        places = (self._held.find(stop) for stop in self._stops)
        return min((place for place in places if place >= 0), default=None)

    def _begun(self) -> int:
        """Where the first stop text begins that is not whole yet; the end when there is none."""
        held, length = self._held, len(self._held)
        starts = range(max(0, length - max(map(len, self._stops), default=0) + 1), length)
        return next((i for i in starts if any(stop.startswith(held[i:]) for stop in self._stops)), length)
