"""Through the page cache or past it, on a real file."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.arms import drop
from benchmarks.rejected.trial import EXPERT_BYTES, Outcome, Trial
from runtime.drives import real
from runtime.drives.buffers import aligned
from runtime.drives.real import RealDevice
from runtime.errors import UsageError

FILE, FILE_EXPERTS = "experts", 8
ROUNDS = 3


def page_cache(trial: Trial) -> Outcome:
    """Experts are read through the page cache. Processor time: a clock on the wall would tell of other work, too."""
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=trial.work)))
            write_experts(folder / FILE)
        except OSError as error:
            raise UsageError(f"{error.filename or FILE}: {error.strerror}: name a directory with --work") from None
        direct, buffered = devices(folder)
        spent = dict.fromkeys((direct, buffered), 0.0)
        for _ in range(ROUNDS):
            for device in spent:
                spent[device] += read_all(device)
        direct.close()
        buffered.close()
    kept, rejected = (1e9 * s / (ROUNDS * FILE_EXPERTS * EXPERT_BYTES) for s in spent.values())
    return Outcome("processor s/GB: past the page cache | through it", kept, rejected)


def write_experts(file: Path) -> None:
    """A file of which nothing is left in memory."""
    bits = np.random.default_rng(0)
    with open(file, "wb") as out:
        for _ in range(FILE_EXPERTS):
            out.write(bits.bytes(EXPERT_BYTES))
        out.flush()
        os.fsync(out.fileno())
    drop([file])


def devices(folder: Path) -> tuple[RealDevice, RealDevice]:
    """The reader in its own mode, and as it is where the system has no direct reads. Raises UsageError."""
    direct = RealDevice("direct", folder)
    if direct.mode != "direct":
        raise UsageError(f"{folder} is read {direct.mode}: name a directory on a drive with --work")
    with mock.patch.object(real, "O_DIRECT", 0):
        return direct, RealDevice("buffered", folder)


def read_all(device: RealDevice) -> float:
    """Read every expert of the file; seconds of the processor."""
    into = aligned(EXPERT_BYTES, device.alignment)
    into[:] = bytes(EXPERT_BYTES)  # touched, so that no page fault is measured
    began = time.process_time()
    for n in range(FILE_EXPERTS):
        device.read(FILE, n * EXPERT_BYTES, into)
    return time.process_time() - began
