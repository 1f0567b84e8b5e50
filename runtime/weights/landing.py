"""Waiting for bytes that nothing goes on without: what is lost, cancelled or kept back by a drive is an error here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

from runtime.drives.jobs import Key
from runtime.drives.outcomes import Landed, Lost
from runtime.drives.reader import Reader
from runtime.errors import StorageError
from runtime.progress import Pulse

PATIENCE_S = 300.0
"""Whoever gets nothing for so long is told that a drive hangs."""


def as_landed(
    reader: Reader, keys: Collection[Key], name: Callable[[Any], str], pulse: Pulse | None
) -> Iterator[Landed]:
    """Yield these jobs, which were submitted, as they land. name: what a job's key says to a person.

    `pulse` is called time and again while it waits. When it raises, or this is closed, what was not yielded is
    cancelled. Raises StorageError naming a job that does not come.
    """
    left = dict.fromkeys(keys)
    outcomes = reader.as_landed(keys, PATIENCE_S, pulse)
    try:
        for outcome in outcomes:
            del left[outcome.key]
            if isinstance(outcome, Lost):
                raise outcome.error(name(outcome.key))
            if not isinstance(outcome, Landed):
                raise StorageError(f"{name(outcome.key)}: its read was cancelled")
            yield outcome
    except TimeoutError:
        first, *others = left
        beside = f" and {len(others):,} more have" if others else " has"
        raise StorageError(
            f"{name(first)}{beside} not come, and nothing else has for {PATIENCE_S:.0f} s: a drive hangs"
        ) from None
    finally:
        if left:
            reader.cancel(left)
            with suppress(StorageError, TimeoutError):  # what had landed, and was not taken
                for outcome in outcomes:
                    if isinstance(outcome, Landed):
                        outcome.buffer.release()
