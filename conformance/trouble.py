"""Drives to which things happen: reads that wait, fail, hang or give other bytes, by drive and while it runs.

    with trouble() as doings, Engine.load(...) as engine:
        doings["a"] = lost
        ...

What is read still comes from the real files below; nothing is ever done to them.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runtime.drives.device import DeviceError
from runtime.drives.jobs import Fault
from runtime.drives.real import RealDevice
from runtime.generate import Engine
from runtime.weights import layout as arrangement

Read = Callable[[], int]
Doing = Callable[[Read, memoryview], int]
"""Carries out a read, given how, and where its bytes go; returns the bytes moved, or raises DeviceError."""

TRUSTED = 1
"""Reads after which a drive is: one to see that it answers."""

HANGS_S = 60.0
"""Nothing is waited for longer."""

RELUCTANT_S = 0.5
"""A read that waits for another drive to be asked waits so long: after one or two of them it will be."""

Doings = dict[str, Doing]
"""By the name of a drive. Drives that are not named are well."""


def unreadable(monkeypatch: pytest.MonkeyPatch, bad: Path) -> None:
    """Whoever looks at `bad` before he opens it hears that its drive fails."""
    stat = Path.stat

    def looked_at(path: Path, **options: Any) -> os.stat_result:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", looked_at)


@contextmanager
def trouble() -> Iterator[Doings]:
    """Meanwhile the drives of engines that are loaded do what the dictionary says, as it is at each read."""
    doings: Doings = {}

    class Troubled(RealDevice):
        def read(self, file: str, offset: int, into: memoryview) -> int:
            read = super().read
            doing = doings.get(self.name)
            return read(file, offset, into) if doing is None else doing(lambda: read(file, offset, into), into)

    with mock.patch("runtime.drives.real.RealDevice", Troubled):
        yield doings


@contextmanager
def by_drive(patient: bool = True) -> Iterator[None]:
    """Meanwhile experts are read by drive however small; and, if patient, no read is ever late.

    So a busy machine makes no hedges, and what is read can be counted.
    """
    policy = replace(arrangement.POLICY, deadline_floor_s=1000.0, check_timeout_s=20.0)
    with (
        mock.patch.object(arrangement, "PLAIN_BYTES", 1),
        mock.patch.object(arrangement, "POLICY", policy if patient else arrangement.POLICY),
    ):
        yield


def delayed(seed: int, most_s: float) -> Doing:
    """Each read comes when it likes."""
    chance = random.Random(seed)

    def doing(read: Read, into: memoryview) -> int:
        time.sleep(chance.random() * most_s)
        return read()

    return doing


def failing(fault: Fault, message: str) -> Doing:
    """Each read fails."""

    def doing(read: Read, into: memoryview) -> int:
        raise DeviceError(fault, message)

    return doing


lost = failing(Fault.GONE, "no such device")
"""Unplugged."""


def wrong(read: Read, into: memoryview) -> int:
    """One bit of each read is another one."""
    moved = read()
    into[len(into) // 2] ^= 16
    return moved


def afterwards(count: int, then: Doing, before: Doing | None = None) -> Doing:
    """`then` from the read of this number on, counted from 0."""
    reads = iter(range(count))

    def doing(read: Read, into: memoryview) -> int:
        if next(reads, None) is None:
            return then(read, into)
        return read() if before is None else before(read, into)

    return doing


class Turns:
    """Two drives, of which the second gives nothing before the first was asked, more often than to see that it
    answers: so that what happens to the first one happens, on a machine however busy."""

    def __init__(
        self, doings: Doings, first: str, second: str, then: Doing | None = None, pause_s: float = 0.0
    ) -> None:
        """`then` is what the first one does from then on, `pause_s` what each read of the second one waits."""
        self.doings, self.then = doings, then
        self._asked, self._pause_s = threading.Event(), pause_s
        doings |= {first: afterwards(TRUSTED, self._first), second: self._second}

    def again(self, then: Doing | None = None) -> None:
        """The second one waits once more, until the first is asked."""
        self.then = then
        self._asked.clear()

    def _first(self, read: Read, into: memoryview) -> int:
        self._asked.set()
        return read() if self.then is None else self.then(read, into)

    def _second(self, read: Read, into: memoryview) -> int:
        self._asked.wait(RELUCTANT_S)
        time.sleep(self._pause_s)
        return read()


def lost_on_the_way(engine: Engine, prompt: Sequence[int], new: int, doings: Doings) -> list[tuple[int, str | None]]:
    """An answer, id and digest of each step; behind the first step the drive `s1` is lost, beside `s0`."""
    steps: list[tuple[int, str | None]] = []
    for step in engine.session().generate(prompt, new, logits_hash=True):
        steps.append((step.token_id, step.logits_sha256))
        if len(steps) == 1:
            Turns(doings, "s1", "s0", lost)
    return steps
