"""What the operating system itself counts: the one witness that a read came from a device and not from memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

SYS_BLOCK = Path("/sys/block")
_PROCESS, _THREAD = Path("/proc/self/io"), Path("/proc/thread-self/io")


def device_bytes_read(this_thread: bool = False) -> int | None:
    """Bytes that this process, or this thread of it, had fetched from storage; None where the system does not say."""
    try:
        lines = (_THREAD if this_thread else _PROCESS).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """What a whole disk has done since the system started. read_s, write_s: service times of all requests, summed;
    in_flight: requests under way now, or -1 where the system does not say."""

    reads: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    writes: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    in_flight: int = -1

    def __sub__(self, before: DiskCounts) -> DiskCounts:
        """What was done since then; in_flight stays as it is now."""
        done: dict[str, Any] = {name: getattr(self, name) - getattr(before, name) for name in _SUMMED}
        return replace(self, **done)

    def __add__(self, other: DiskCounts) -> DiskCounts:
        """Two disks as one. What is in flight is unknown where it is of one of them."""
        done: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        unknown = -1 in (self.in_flight, other.in_flight)
        return replace(self, **done, in_flight=-1 if unknown else self.in_flight + other.in_flight)


_SUMMED = ("reads", "read_bytes", "read_s", "writes", "written_bytes", "write_s")


class DiskCounters:
    """The counters of whole disks, by the names that `identity` gives; quick enough to be asked 100 times a second.

    Linux: `/sys/block/NAME/stat`, kept open, 6 µs a disk (Documentation/block/stat.rst); elsewhere psutil, which says
    nothing of what is in flight. A disk that is not there, or goes, is missing in what is read.
    """

    def __init__(self, disks: Iterable[str]) -> None:
        self.disks = tuple(dict.fromkeys(disks))
        self._files: dict[str, int] = {}
        for disk in self.disks if sys.platform == "linux" else ():
            with suppress(OSError):
                self._files[disk] = os.open(SYS_BLOCK / disk / "stat", os.O_RDONLY)

    @staticmethod
    def all_disks() -> tuple[str, ...]:
        """Every disk that is a device, no volume made of others."""
        if sys.platform == "linux":
            return tuple(sorted(path.parent.name for path in SYS_BLOCK.glob("*/device")))
        return tuple(sorted(psutil.disk_io_counters(perdisk=True) or ()))

    def read(self) -> dict[str, DiskCounts]:
        """By disk."""
        if sys.platform != "linux":
            known = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
            return {disk: _of_psutil(known[disk]) for disk in self.disks if disk in known}
        counts = {}
        for disk, file in self._files.items():
            with suppress(OSError, ValueError, IndexError):
                counts[disk] = _of_sysfs(os.pread(file, 512, 0))
        return counts

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _of_sysfs(line: bytes) -> DiskCounts:
    """Sectors are of 512 bytes and times in ms, whatever the disk."""
    n = line.split()
    return DiskCounts(
        int(n[0]), int(n[2]) * 512, int(n[3]) / 1000, int(n[4]), int(n[6]) * 512, int(n[7]) / 1000, int(n[8])
    )


def _of_psutil(n: Any) -> DiskCounts:
    return DiskCounts(n.read_count, n.read_bytes, n.read_time / 1000, n.write_count, n.write_bytes, n.write_time / 1000)


class Witness:
    """The system's own counts beside those of a run, from now on: of the process, and of the disks below its drives.

    disks: by drive the disks below it, as far as they are known.
    """

    def __init__(self, disks: Mapping[str, Sequence[str]]) -> None:
        self.disks = {drive: tuple(names) for drive, names in disks.items()}
        self._counters = DiskCounters(disk for names in disks.values() for disk in names)
        self._process, self._before = device_bytes_read(), self._counters.read()

    def since(self) -> tuple[int | None, dict[str, DiskCounts]]:
        """(bytes this process had fetched from storage, what each disk has done), since the start."""
        process = device_bytes_read()
        read = None if process is None or self._process is None else process - self._process
        return read, {d: now - self._before[d] for d, now in self._counters.read().items() if d in self._before}

    def close(self) -> None:
        self._counters.close()
