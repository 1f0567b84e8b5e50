"""Which drive holds which expert, and where.

Two layouts, in any mix: the released shards of the model directory, in place; and directories with one file per
expert, `L<layer>-E<expert>.bin`, the six tensors back to back in the order of `PackedExpert`, at the top or in
`k3-experts/`. A directory may have all experts, some of them, or none. Nothing is ever written there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import expert_file
from runtime.checkpoint.manifest import Table
from runtime.checkpoint.survey import ranges
from runtime.drives.device import Device, DeviceInFront
from runtime.drives.jobs import Span
from runtime.drives.real import open_drive
from runtime.errors import CheckpointError, StorageError

MODEL = "model"
"""The name of the model directory as a drive."""

FOLDERS = ("", "k3-experts")
"""Where in a directory the files of experts may lie. What is found first counts."""

SHOWN = 8
"""Stretches of experts that a message names."""

_FILE = re.compile(r"L(0|[1-9][0-9]{0,8})-E(0|[1-9][0-9]{0,8})\.bin")


class Holder(Protocol):
    """A drive's copies. `here`: of which experts; `notes`: what was found odd."""

    name: str
    here: Table
    notes: list[str]

    def span(self, layer: int, expert: int) -> Span:
        """Where the copy of an expert that is here lies."""
        ...


class Shards:
    """The released files of the model directory.

    An expert whose six tensors are not one run has no single place; it goes by the name of a file that is not there,
    `L<layer>-E<expert>.bin`, which `Gathering` reads from its six places.
    """

    def __init__(self, name: str, checkpoint: Checkpoint) -> None:
        self.name, self.here = name, checkpoint.experts_here
        self.notes: list[str] = []
        self._checkpoint = checkpoint

    def span(self, layer: int, expert: int) -> Span:
        nbytes = self._checkpoint.expert_nbytes
        if not self._checkpoint.is_one_run(layer, expert):
            return Span(self.name, expert_file(layer, expert), 0, nbytes)
        path, offset = self._checkpoint.expert_start(layer, expert)
        return Span(self.name, path.name, offset, nbytes)


class ExpertFiles:
    """A directory with a file per expert. Only regular files of exactly an expert's length count.

    `odd`: the others, (layer, expert, what is wrong with it).

    Raises StorageError when the directory cannot be listed.
    """

    def __init__(self, name: str, path: Path, checkpoint: Checkpoint) -> None:
        self.name = name
        self.here = np.zeros_like(checkpoint.experts_here)
        self.notes: list[str] = []
        self._folder = np.zeros(self.here.shape, np.uint8)
        self._rows = {layer: row for row, layer in enumerate(checkpoint.config.moe_layers)}
        self._nbytes = checkpoint.expert_nbytes
        self.odd: list[tuple[int, int, str]] = []
        layers = checkpoint.config.moe_layers
        for index, folder in enumerate(FOLDERS):
            for row, expert, found in self._files(path / folder):
                file = expert_file(layers[row], expert)
                if not stat.S_ISREG(found.st_mode):
                    self.odd.append((layers[row], expert, f"{file} is no regular file"))
                elif found.st_size != self._nbytes:
                    wrong = f"{file} has {found.st_size:,} bytes, not {self._nbytes:,}"
                    self.odd.append((layers[row], expert, wrong))
                elif not self.here[row, expert]:
                    self.here[row, expert] = True
                    self._folder[row, expert] = index
        if self.odd:
            said = min(what for _, _, what in self.odd) + ", …" * (len(self.odd) > 1)
            self.notes.append(f"drive {name}: {len(self.odd)} files are not used: {said}")

    def _files(self, folder: Path) -> Iterator[tuple[int, int, os.stat_result]]:
        """(row, expert, what it is) of everything here that has the name of one of the model's experts."""
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    match = _FILE.fullmatch(entry.name)
                    row = self._rows.get(int(match[1])) if match else None
                    if match and row is not None and int(match[2]) < self.here.shape[1]:
                        with suppress(FileNotFoundError):  # it went meanwhile
                            yield row, int(match[2]), entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"drive {self.name}: cannot list {folder}: {error.strerror or error}") from None

    def span(self, layer: int, expert: int) -> Span:
        folder = FOLDERS[int(self._folder[self._rows[layer], expert])]
        return Span(self.name, os.path.join(folder, expert_file(layer, expert)), 0, self._nbytes)


def count_expert_files(path: Path) -> int:
    """How many files below `path` have the name of an expert of some model. Raises OSError."""
    found = 0
    for folder in FOLDERS:
        if (path / folder).is_dir():
            with os.scandir(path / folder) as entries:
                found += sum(bool(_FILE.fullmatch(entry.name)) for entry in entries)
    return found


class Placement:
    """Every expert's holders. Raises CheckpointError naming the experts that have none."""

    def __init__(self, checkpoint: Checkpoint, holders: Sequence[Holder]) -> None:
        self.holders = [holder for holder in holders if holder.here.any()]
        self.notes = [note for holder in holders for note in holder.notes]
        idle = [h.name for h in holders if h not in self.holders and not isinstance(h, Shards)]
        self.notes += [f"drive {name} holds no expert of this model" for name in idle]
        layers = checkpoint.config.moe_layers
        self._rows = {layer: row for row, layer in enumerate(layers)}
        held = np.zeros_like(checkpoint.experts_here)
        for holder in holders:
            held |= holder.here
        if not held.all():
            stretches = [
                f"layer {layer} expert{'s' if first < last else ''} {first}" + f" to {last}" * (first < last)
                for layer, row in self._rows.items()
                for first, last in ranges(np.flatnonzero(~held[row]).tolist())
            ]
            more = f" and {len(stretches) - SHOWN} more stretches" if len(stretches) > SHOWN else ""
            raise CheckpointError(
                f"{np.count_nonzero(~held):,} of {held.size:,} experts are on none of the drives "
                f"{', '.join(holder.name for holder in holders)}: {', '.join(stretches[:SHOWN])}{more}; "
                "name a directory that has them with --drive"
            )

    def spans(self, layer: int, expert: int) -> tuple[Span, ...]:
        """Every copy of an expert."""
        row = self._rows[layer]
        return tuple(holder.span(layer, expert) for holder in self.holders if holder.here[row, expert])


class Gathering(DeviceInFront):
    """The drive of the model directory, where some experts are not one run: those are read from their six places.

    Such a read counts as one, and may move two blocks more than it was asked for at each of the places.
    """

    def __init__(self, inner: Device, checkpoint: Checkpoint) -> None:
        super().__init__(inner)
        self._checkpoint = checkpoint

    def read(self, file: str, offset: int, into: memoryview) -> int:
        match = _FILE.fullmatch(file)
        if match is None:
            return self.inner.read(file, offset, into)
        moved, start, end = 0, 0, offset + len(into)
        for span in self._checkpoint.expert_spans(int(match[1]), int(match[2])):
            first, last = max(offset, start), min(end, start + span.nbytes)
            if first < last:
                part = into[first - offset : last - offset]
                moved += self.inner.read(span.path.name, span.offset + first - start, part)
            start += span.nbytes
        return moved


def open_holder(holder: Holder, path: Path, checkpoint: Checkpoint) -> Device:
    """What a holder's copies are read from; `path` is its directory. Raises StorageError when it cannot be read."""
    device = open_drive(holder.name, path)
    return Gathering(device, checkpoint) if isinstance(holder, Shards) and checkpoint.scattered else device
