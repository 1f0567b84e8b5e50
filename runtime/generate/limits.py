"""What memory a process may use: what was asked for, or what the machine and its control groups leave.

Page cache is not counted as used: the system gives it up for whoever needs memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from runtime.units import size

RESERVE = 0.1
"""Share of the memory found that is left to everyone else when no limit was asked for."""


@dataclass(frozen=True)
class Limit:
    """`nbytes` the process may use, in all; `reserve` was found beside that, and left to others."""

    nbytes: int
    source: str
    reserve: int = 0

    def __str__(self) -> str:
        less = f", less a reserve of {size(self.reserve)}" if self.reserve else ""
        return f"{size(self.nbytes)} ({self.source}{less})"


def memory_limit(requested: int | None) -> Limit:
    """As asked for; else the lower of what is available and of what the control groups leave, less a reserve."""
    memory, held = psutil.virtual_memory(), psutil.Process().memory_info().rss
    if requested is not None:
        there = "" if requested <= memory.total else f", of {size(memory.total)} there are"
        return Limit(requested, f"--memory{there}")
    found, source = memory.available + held, "available memory"
    cgroup = cgroup_room(held)
    if cgroup is not None and cgroup < found:
        found, source = cgroup, "cgroup limit"
    reserve = int(found * RESERVE)
    return Limit(found - reserve, source, reserve)


def cgroup_room(
    held: int = 0, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int | None:
    """What the memory limits of the process's control group, and of those above it, leave it; None without a limit.

    held: what it has of that already. Looks at version 2 (memory.max) and version 1 (memory.limit_in_bytes); "max" and
    huge numbers are no limit.
    """
    rooms = []
    for group in _groups(own):
        for folder, limit_name, usage_name in (
            (root / group, "memory.max", "memory.current"),
            (root / "memory" / group, "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < 1 << 60:
                used = (_number(folder / usage_name) or 0) - _page_cache(folder / "memory.stat")
                rooms.append(limit - max(0, used - held))
    return min(rooms, default=None)


def _groups(own: Path) -> set[str]:
    """The process's control groups that may limit memory, and those above them, relative to the root."""
    groups = {""}
    with suppress(OSError, ValueError):  # no control groups here: the root's own files decide, if there are any
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                parts = Path(path.strip("/")).parts
                groups.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return groups


def _number(file: Path) -> int | None:
    with suppress(OSError):
        text = file.read_text().strip()
        return int(text) if text.isdigit() else None
    return None


def _page_cache(stat: Path) -> int:
    """Bytes of files in memory that the system can drop. Shared memory is counted among them, and is none."""
    facts = dict(_facts(stat))
    if "total_cache" in facts:  # version 1
        return max(0, facts["total_cache"] - facts.get("total_shmem", 0))
    return max(0, facts.get("file", 0) - facts.get("shmem", 0))


def _facts(stat: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, number = line.split()
            yield name, int(number)
