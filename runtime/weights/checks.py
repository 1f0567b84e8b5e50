"""`--verify-reads`: what is read for the model is compared with the manifest before anybody computes with it; of a
converted trunk, which has its own checksums, before what was computed with it is used.

The manifest of the program's home speaks for every copy. One that lies in a drive's directory speaks for that drive's
copies, where the first says nothing: it can tell that they were damaged, never that others were. What no manifest
knows is not checked.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import ConvertedTrunk, damaged
from runtime.checkpoint.manifest import (
    BLOCK_BYTES,
    COPY_NAME,
    Manifest,
    blocks,
    checksum,
    load_if_there,
    manifest_path,
)
from runtime.checkpoint.mxfp4 import SCALE_NAN
from runtime.drives.buffers import aligned
from runtime.drives.device import Device, DeviceError
from runtime.drives.jobs import MIB, Slice
from runtime.errors import StorageError

VerifyReads = Literal["off", "first", "all"]

MAKE_ONE = "python -m runtime verify makes one"
HOW = {"first": "the first read of each expert and drive", "all": "every read"}


class ReadChecks:
    """Compares slices as they are read; safe to call from several threads. `notes`: what a person should know.

    A block of an expert whose bytes were right is, with `first`, not looked at again when the same drive gives it.
    """

    def __init__(self, checkpoint: Checkpoint, mode: VerifyReads, manifests: Mapping[str, Manifest]) -> None:
        """manifests: by drive, those that know something."""
        self.mode: VerifyReads = mode if manifests else "off"
        self.notes: list[str] = []
        self.wrong: Counter[str] = Counter()
        """By drive, how often what it gave was wrong."""
        self._lock = threading.Lock()
        self._asked, self._total = mode, checkpoint.experts_here.size
        self._manifests = dict(manifests) if mode != "off" else {}
        self._seen: dict[str, npt.NDArray[np.bool_]] = {}
        if mode == "first":
            self._seen = {name: np.zeros(m.blocks.shape, np.bool_) for name, m in self._manifests.items()}

    @classmethod
    def open(cls, checkpoint: Checkpoint, mode: VerifyReads, drives: Mapping[str, Path]) -> ReadChecks:
        """With what is known of the copies on these drives: (name, directory). Bad manifests are noted, not raised."""
        if mode == "off":
            return cls(checkpoint, mode, {})
        notes = []
        general, trouble = load_if_there(manifest_path(checkpoint), checkpoint)
        notes += [trouble] if trouble else []
        manifests = {}
        for name, path in drives.items():
            own, trouble = None, ""
            if path != checkpoint.path:
                own, trouble = load_if_there(path / COPY_NAME, checkpoint)
            if trouble:
                notes.append(f"drive {name}: {trouble}")
            if own is not None and general is not None:
                if not (own.known & ~general.known).any():
                    own = None
                else:
                    own.take(general, general.known)
            if (manifest := own or general) is not None:
                manifests[name] = manifest
        checks = cls(checkpoint, mode, manifests)
        checks.notes = notes
        return checks

    @property
    def active(self) -> bool:
        """Whether anything is compared."""
        return self.mode != "off"

    @property
    def nbytes(self) -> int:
        """What it keeps in memory."""
        manifests = {id(manifest): manifest.nbytes for manifest in self._manifests.values()}
        return sum(manifests.values()) + sum(seen.nbytes for seen in self._seen.values())

    @property
    def coverage(self) -> dict[str, int]:
        """Experts whose copies are compared, by drive."""
        return {name: int(np.count_nonzero(manifest.known)) for name, manifest in self._manifests.items()}

    def __str__(self) -> str:
        if self._asked == "off":
            return "off, as asked"
        if not self.active:
            return f"off: no manifest; {MAKE_ONE}"
        known = sorted(set(self.coverage.values()))
        span = f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}, by drive,"
        return f"{HOW[self.mode]}, {span} of {self._total:,} experts in the manifest"

    def settings(self) -> dict[str, object]:
        """For the record."""
        return {"mode": self.mode, "experts": self.coverage}

    def __call__(self, part: Slice, view: memoryview) -> str:
        """What is wrong with a slice that was read, or "". The key of its job is (layer, expert)."""
        key: Any = part.key
        return self._compare(part.drive, key[0], key[1], part.start, view, part.file)

    def whole(self, drive: str, layer: int, expert: int, data: memoryview) -> None:
        """Raise StorageError where all of an expert's bytes are not what they should be."""
        wrong = self._compare(drive, layer, expert, 0, data, "")
        if wrong:
            raise StorageError(f"layer {layer} expert {expert}: drive {drive}: wrong bytes: {wrong}")

    def _compare(self, drive: str, layer: int, expert: int, start: int, data: memoryview, file: str) -> str:
        manifest = self._manifests.get(drive)
        if manifest is None:
            return ""
        assert start % BLOCK_BYTES == 0, "the scheduler cuts at the grain of the checksums"
        place = manifest.rows[layer], expert
        if not manifest.known[place]:
            return ""
        wanted, seen = manifest.blocks[place], self._seen.get(drive)
        wrong = []
        for number, block in blocks(start, data):
            if seen is not None and seen[*place, number]:
                continue
            if checksum(block) != int(wanted[number]):
                wrong.append(number)
            elif seen is not None:
                seen[*place, number] = True
        if not wrong:
            return ""
        with self._lock:
            self.wrong[drive] += 1
        where = f"{file}: " if file else ""
        found = f"MiB {mebibytes(wrong)} of {len(wanted)} not as the manifest says"
        return f"{where}{found}; python -m runtime verify tells more"


class ScaleCheck:
    """Looks at slices for scales that no weight has, whether a manifest knows the expert or not: with NaN nothing is
    computed, and another drive may have a better copy."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._ranges = checkpoint.scale_ranges

    def __call__(self, part: Slice, view: memoryview) -> str:
        """What is wrong with a slice that was read, or ""."""
        for name, first, end in self._ranges:
            scales = view[max(0, first - part.start) : max(0, end - part.start)]
            if scales and int(np.frombuffer(scales, np.uint8).max()) == SCALE_NAN:
                return f"{part.file}: {name} has the scale byte 255 (NaN), which no released weight has"
        return ""


class TrunkCheck:
    """Compares what is read of a converted trunk with its checksums: with `first` each matrix once, with `all` always.

    A matrix is whole with its last rows, and before those are computed with it is compared.
    """

    def __init__(self, converted: ConvertedTrunk, copies: Sequence[tuple[Device, Path]], mode: VerifyReads) -> None:
        """copies: each drive that has the file, and where."""
        self._converted, self._copies, self._mode = converted, copies, mode
        self._seen: set[str] = set()
        self._hash, self._hashed = xxhash.xxh3_64(), 0

    def __call__(self, name: str, first: int, data: memoryview) -> None:
        """Rows `first` on of a matrix, whose rows come in their order, are these. Raises StorageError."""
        if self._mode == "off" or name in self._seen:
            return
        if not first:
            self._hash.reset()
            self._hashed = 0
        self._hash.update(data)
        self._hashed += len(data)
        if self._hashed < self._converted.matrices[name].nbytes:
            return
        if self._hash.intdigest() != self._converted.sums[name].values:
            raise StorageError(self._blame(name))
        if self._mode == "first":
            self._seen.add(name)

    def _blame(self, name: str) -> str:
        """Which copies of a matrix are wrong: its rows came from any of them, so each is read again, alone."""
        wrong, buffer = [], aligned(MIB, mmap.PAGESIZE)
        for device, path in self._copies:
            try:
                if not values_right(self._converted, device, name, buffer):
                    wrong.append(damaged(path, name))
            except DeviceError as error:
                wrong.append(f"{path} cannot be read again: {error}")
        if wrong:
            return "; ".join(wrong)
        paths = " and ".join(str(path) for _, path in self._copies)
        return (
            f"{name} was read with wrong bytes, and is right when it is read again from {paths}: a drive, its cable or "
            "this machine's memory cannot be trusted"
        )


def values_right(
    converted: ConvertedTrunk,
    device: Device,
    name: str,
    buffer: memoryview,
    told: Callable[[int], None] = lambda nbytes: None,
) -> bool:
    """Whether a matrix's values on this drive are as their checksum says; read through `buffer`.

    `told` hears of the bytes of every read. Raises DeviceError.
    """
    span, digest = converted.matrices[name], xxhash.xxh3_64()
    for start in range(0, span.nbytes, len(buffer)):
        part = buffer[: min(len(buffer), span.nbytes - start)]
        device.read(span.path.name, span.offset + start, part)
        digest.update(part)
        told(len(part))
    return digest.intdigest() == converted.sums[name].values


def mebibytes(numbers: list[int]) -> str:
    """Blocks of an expert for people, counted from 1: `3, 5 and 9 more`."""
    shown = ", ".join(str(number + 1) for number in numbers[:4])
    return shown + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
