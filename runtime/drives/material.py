"""What of a directory can be read to measure the drive below it: large files, whatever is in them. Nothing is written.

Files behind links count when they lie on the same drive; files with holes do not, since holes are read from nowhere.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from pathlib import Path

from runtime.drives.jobs import Span
from runtime.drives.real import entries_below

MOST_ENTRIES = 200_000
"""Directory entries that are looked at."""
PLENTY_BYTES = 64 * 10**9
"""No more is looked for once there is so much."""
DENSE = 0.9
"""A file with fewer of its bytes on the drive has holes, or is compressed."""


def large_files(drive: str, root: Path, least_bytes: int) -> list[Span]:
    """A span for each regular file of at least `least_bytes` below `root`, in the order of their names.

    What cannot be looked at is passed over. Raises OSError when the root cannot be.
    """
    device, found, nbytes = os.stat(root).st_dev, [], 0
    for path, facts in islice(entries_below(root), MOST_ENTRIES):
        dense = facts.st_blocks * 512 >= DENSE * facts.st_size
        if stat.S_ISREG(facts.st_mode) and facts.st_size >= least_bytes and facts.st_dev == device and dense:
            found.append(Span(drive, os.path.relpath(path, root), 0, facts.st_size))
            nbytes += facts.st_size
            if nbytes >= PLENTY_BYTES:
                break
    return found
