"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, in all), in bytes or in pieces of work, while something long is going on."""

Pulse = Callable[[], None]
"""Called time and again while something long goes on, such as waiting for reads; what it raises ends that."""
