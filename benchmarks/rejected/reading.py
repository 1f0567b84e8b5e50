"""How a real file is read: through what, and into what.

Processor time is counted: a clock on the wall would tell of other work, too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.arms import drop
from benchmarks.rejected.trial import EXPERT_BYTES, Outcome, Trial
from runtime.drives import buffers, real
from runtime.drives.real import RealDevice
from runtime.errors import UsageError

FILE, FILE_EXPERTS = "experts", 8
ROUNDS = 3

Way = tuple[RealDevice, memoryview]
"""What reads, and where to."""


def page_cache(trial: Trial) -> Outcome:
    """Experts are read through the page cache."""
    with direct(trial) as device, closing(through_the_cache(device)) as buffered:
        found = by_turns((device, pages()), (buffered, pages()))
    return Outcome("processor s/GB: past the page cache | through it", *found)


def small_pages(trial: Trial) -> Outcome:
    """Experts are read into pages of 4 KiB."""
    if not buffers.HAS_HUGE:
        raise UsageError("this system has no huge pages to compare with")
    with direct(trial) as device:
        found = by_turns((device, pages()), (device, pages(huge=False)))
    return Outcome("processor s/GB: into huge pages | into small ones", *found)


@contextmanager
def direct(trial: Trial) -> Iterator[RealDevice]:
    """A drive with a file of experts that is read past the page cache. Raises UsageError where it is not."""
    try:
        with tempfile.TemporaryDirectory(dir=trial.work) as folder:
            write_experts(Path(folder) / FILE)
            with closing(RealDevice("direct", folder)) as device:
                if device.mode != "direct":
                    raise UsageError(f"{folder} is read {device.mode}: name a directory on a drive with --work")
                yield device
    except OSError as error:
        raise UsageError(f"{error.filename or FILE}: {error.strerror}: name a directory with --work") from None


def write_experts(file: Path) -> None:
    """A file of which nothing is left in memory."""
    bits = np.random.default_rng(0)
    with open(file, "wb") as out:
        for _ in range(FILE_EXPERTS):
            out.write(bits.bytes(EXPERT_BYTES))
        out.flush()
        os.fsync(out.fileno())
    drop([file])


def through_the_cache(device: RealDevice) -> RealDevice:
    """The same drive as it is read where the system has no direct reads."""
    with mock.patch.object(real, "O_DIRECT", 0):
        return RealDevice("buffered", device.root)


def pages(huge: bool = True) -> memoryview:
    """Room for an expert, as buffers are made, or in small pages; touched, so that no page fault is measured."""
    with mock.patch.object(buffers, "HAS_HUGE", huge and buffers.HAS_HUGE):
        into = buffers.aligned(EXPERT_BYTES, mmap.PAGESIZE)
    if not huge:
        assert isinstance(into.obj, mmap.mmap)
        into.obj.madvise(mmap.MADV_NOHUGEPAGE)
    into[:] = bytes(EXPERT_BYTES)
    return into


def by_turns(*ways: Way) -> list[float]:
    """Seconds of the processor a GB, of each way."""
    spent = [0.0] * len(ways)
    for _ in range(ROUNDS):
        for n, way in enumerate(ways):
            began = time.process_time()
            read_all(*way)
            spent[n] += time.process_time() - began
    return [1e9 * s / (ROUNDS * FILE_EXPERTS * EXPERT_BYTES) for s in spent]


def read_all(device: RealDevice, into: memoryview) -> None:
    """Read every expert of the file."""
    for n in range(FILE_EXPERTS):
        device.read(FILE, n * EXPERT_BYTES, into)
