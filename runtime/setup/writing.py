"""How `replicate` and `convert` write: one process to a directory, and past the page cache, so that what is read back
comes from the drive."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from runtime.drives.real import F_NOCACHE


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
