"""What the tests of the command line share."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANGS_S = 300
"""When a process counts as hanging, on a machine however busy."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        return json.loads(self.out)


Command = Callable[..., Outcome]


Start = Callable[..., subprocess.Popen[bytes]]


def readable(fds: Iterable[Any], seconds: float) -> list[Any]:
    """Those that can be read within `seconds`, at once if there are any; also past what `select` can take."""
    with selectors.DefaultSelector() as selector:
        for fd in fds:
            selector.register(fd, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def read_until(fd: int, marker: bytes, seconds: float = HANGS_S) -> bytes:
    """What appears there, up to the marker."""
    shown, until = b"", time.monotonic() + seconds
    while marker not in shown:
        ready = readable([fd], max(0.0, until - time.monotonic()))
        assert ready, f"{marker!r} has not come in {seconds} s, only {shown!r}"
        part = os.read(fd, 4096)
        assert part, f"{marker!r} has not come before the end, only {shown!r}"
        shown += part
    return shown


def on(model: Path) -> list[object]:
    """Options for a checkpoint and the backend that needs no compiling."""
    return ["--model", model, "--backend", "reference"]
