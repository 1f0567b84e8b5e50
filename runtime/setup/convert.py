"""`convert`: the trunk in int8, made once. Its file gets its name when it has been read back and found right.

Memory does not depend on the model but for the scales: rows are read, rounded, written. A process that is killed in
the middle leaves a file under another name, which the next one removes; one process at a time has the directory.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import FILE_NAME, ConvertedTrunk, Form, damaged
from runtime.checkpoint.int8 import empty, quantize
from runtime.checkpoint.manifest import checksum
from runtime.config import CONFIG_NAME
from runtime.drives.buffers import aligned
from runtime.drives.device import DeviceError
from runtime.drives.real import Descriptors, RealDevice
from runtime.errors import StorageError, UsageError
from runtime.home import whole
from runtime.progress import Progress, Tally
from runtime.setup.target import TARGET
from runtime.setup.writing import hold, missing, sync, take_back, uncached
from runtime.units import size
from runtime.weights.checks import values_right

PART_BYTES = 16 << 20
"""The most that is read, or read back, at once, but for a longer row."""

SYNC_BYTES = 256 << 20
"""What is written goes to the drive at least so often, so that the end does not wait for all of it."""

SPARE_BYTES = 16 << 20
"""Free space asked for beyond the file, for the file system's own needs."""

_UNFINISHED = re.compile(rf"\.{re.escape(FILE_NAME)}\.[0-9a-f]{{8}}")


@dataclass(frozen=True)
class Outcome:
    """What is there in the end. written: by this run; mode: how it was read back."""

    path: Path
    matrices: int
    nbytes: int
    written: bool
    mode: str


def convert(checkpoint: Checkpoint, folder: Path, progress: Progress) -> Outcome:
    """Write the checkpoint's trunk in int8 to a directory, which is made where it is missing.

    One that is there already is read and compared with its checksums. Raises UsageError for a directory that is a
    checkpoint's or in use, CheckpointError for a file there that is not this model's and for weights that int8 cannot
    hold, StorageError for what cannot be read or written, or is damaged. Whatever is raised, nothing half is left.
    """
    path = folder / FILE_NAME
    form = Form.of(checkpoint, path)
    values_nbytes = sum(span.nbytes for span in form.matrices.values())
    with _claimed(checkpoint, folder):
        if os.path.lexists(path):
            mode, wrong = read_back(path, checkpoint, Tally(progress, values_nbytes))
            if wrong:
                raise StorageError(damaged(path, wrong))
            return Outcome(path, len(form.matrices), form.nbytes, False, mode)
        free = shutil.disk_usage(folder).free
        if free < form.nbytes + SPARE_BYTES:
            raise StorageError(
                f"{folder} has {size(free)} free; the trunk in int8 takes {size(form.nbytes)}, and {size(SPARE_BYTES)} "
                "are to stay free: make room, or give --out a directory on another drive"
            )
        tally = Tally(progress, 3 * values_nbytes)
        try:
            with whole(path) as file:
                _write(checkpoint, form, file, tally)
                mode, wrong = read_back(Path(file.name), checkpoint, tally)
                if wrong:
                    raise StorageError(
                        f"{path}: what was written is not what is read back, in {wrong}: this drive, or its cable, "
                        "cannot be trusted"
                    )
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from None
        return Outcome(path, len(form.matrices), form.nbytes, True, mode)


@contextmanager
def _claimed(checkpoint: Checkpoint, folder: Path) -> Iterator[None]:
    """The directory is this process's alone; what was made of it and above it goes again if the block fails."""
    made = missing(folder)
    nearest = next(place for place in (folder, *folder.parents) if place not in made)
    if not nearest.is_dir():
        raise UsageError(f"--out {folder}: {nearest} is no directory: give one, or a name that is still free")
    if folder.resolve().is_relative_to(checkpoint.path.resolve()):
        raise UsageError(f"--out {folder} is in the model's directory, where nothing is written: give another one")
    if os.path.lexists(folder / CONFIG_NAME):
        raise UsageError(f"--out {folder} is the directory of a checkpoint, where nothing is written: give another one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder)
    except BlockingIOError:
        raise UsageError(f"--out {folder}: another process is writing there; wait for it to end") from None
    except OSError as error:
        take_back(made)
        raise StorageError(f"--out {folder} cannot be written to: {error.strerror or error}") from None
    try:
        for name in os.listdir(folder):
            if _UNFINISHED.fullmatch(name):
                with suppress(OSError):  # where nothing can be removed, nothing can be written either
                    (folder / name).unlink()
        yield
    except BaseException:
        take_back(made)
        raise
    finally:
        os.close(lock)


def _write(checkpoint: Checkpoint, form: Form, file: BinaryIO, tally: Tally) -> None:
    """Write everything, the head last: what is in it is known then. On the drive when this returns."""
    uncached(file.fileno())
    file.write(form.header)
    file.seek(form.head_nbytes, os.SEEK_CUR)
    sums, scales, unsynced = [], [], 0
    for name, span in form.matrices.items():
        rows, columns = span.shape
        step, digest = max(1, PART_BYTES // (2 * columns)), xxhash.xxh3_64()
        own = np.empty(rows, "<f2")
        for first in range(0, rows, step):
            bits = checkpoint.read_rows(name, first, min(first + step, rows))
            made = empty(*bits.shape)
            quantize(bits, made, name, first)
            own[first : first + step] = made.scales
            digest.update(made.values.data)
            file.write(made.values.data)
            unsynced += made.values.nbytes
            if unsynced >= SYNC_BYTES:
                _sync(file)
                unsynced = 0
            tally.add(bits.nbytes)
        sums.append((digest.intdigest(), checksum(own.data)))
        scales.append(own.tobytes())
    head = np.array(sums, "<u8").tobytes() + b"".join(scales)
    file.seek(len(form.header))
    file.write(head)
    _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    sync(file.fileno())


def read_back(path: Path, checkpoint: Checkpoint, tally: Tally) -> tuple[str, str]:
    """(how the file was read, the first matrix that is not as its checksum says, or ""). Raises StorageError."""
    there = ConvertedTrunk.open(path, checkpoint)
    try:
        device = RealDevice(TARGET, path.parent, probe=path, descriptors=Descriptors(1))
        buffer = aligned(PART_BYTES, device.alignment)
        try:
            for name in there.matrices:
                if not values_right(there, device, name, buffer, tally.add):
                    return device.mode, name
        finally:
            device.close()
    except DeviceError as error:
        raise StorageError(f"{path.parent}: what is there cannot be read: {error}") from None
    return device.mode, ""
