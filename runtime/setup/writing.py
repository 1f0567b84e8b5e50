"""How `replicate` and `convert` write: one process to a directory, and past the page cache, so that what is read back
comes from the drive; and what `convert` and `synth` leave of directories that they made for nothing."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runtime.drives.real import F_NOCACHE


def missing(folder: Path) -> list[Path]:
    """Of a directory and those above it, what is not there yet, the innermost first."""
    return [place for place in (folder, *folder.parents) if not os.path.lexists(place)]


def take_back(made: Sequence[Path]) -> None:
    """Remove the directories that were `missing`, as far as they are there and empty."""
    for place in made:
        with suppress(OSError):
            place.rmdir()


def hold(folder: Path) -> int:
    """Keep others out of a directory as long as the descriptor is open. Raises BlockingIOError when one is there."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        pass  # a file system without locks
    return fd


def uncached(fd: int) -> None:
    """What is written here stays in no cache, so that it is read back from the drive; elsewhere `sync` sees to it."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, F_NOCACHE, 1)


def sync(fd: int) -> None:
    """What was written is on the drive when this returns, and not in memory. Raises OSError."""
    os.fsync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
