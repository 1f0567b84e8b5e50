"""Positional reads from many files through a bounded number of descriptors, from any thread."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import StorageError

_LARGEST_READ = 1 << 30  # one call of Linux or macOS takes less than 2 GiB


class Files:
    """Files opened at their first read; the longest unused are closed when there are more than `limit`.

    `reads` counts the system calls that returned bytes, `bytes_read` their bytes.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit or descriptor_budget()
        self.reads = 0
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, tuple[int, int]] = OrderedDict()  # path → (descriptor, readers now)
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    def read(self, path: Path, offset: int, out: memoryview, what: str) -> None:
        """Fill `out` from the file's byte `offset`. Raises StorageError naming `what`, place, wanted and got."""
        got = 0
        try:
            with self._borrow(path) as descriptor:
                while got < len(out):
                    count = os.preadv(descriptor, [out[got : got + _LARGEST_READ]], offset + got)
                    if count == 0:
                        break
                    got += count
                    with self._lock:
                        self.reads += 1
                        self.bytes_read += count
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if got == len(out):
                return
            reason = "the file ends there; it was whole when it was opened"
        raise StorageError(f"cannot read {what} from {path} at byte {offset}: wanted {len(out)}, got {got}: {reason}")

    def close(self) -> None:
        """Close every file; those being read, when their read ends. Further reads are errors."""
        with self._lock:
            self._closed = True
            self._close_unused(0)

    @contextmanager
    def _borrow(self, path: Path) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise ValueError("read from a closed checkpoint")
            descriptor, readers = self._open.get(path) or (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0)
            self._open[path] = (descriptor, readers + 1)
            self._open.move_to_end(path)
            self._close_unused(self.limit)
        try:
            yield descriptor
        finally:
            with self._lock:
                descriptor, readers = self._open[path]
                self._open[path] = (descriptor, readers - 1)
                self._close_unused(0 if self._closed else self.limit)

    def _close_unused(self, keep: int) -> None:
        """Close the longest unused files until `keep` are left. The lock is held."""
        idle = [path for path, (_, readers) in self._open.items() if readers == 0]
        for path in idle[: max(0, len(self._open) - keep)]:
            os.close(self._open.pop(path)[0])


def descriptor_budget() -> int:
    """A quarter of what the process may open, so that drives and sockets have the rest."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 128 if allowed == resource.RLIM_INFINITY else min(128, max(8, allowed // 4))
