"""The copies of experts on one drive, read one at a time and past the page cache, for whoever checks or copies them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.checkpoint import Checkpoint
from runtime.drives.buffers import Buffer, BufferPool
from runtime.drives.jobs import DEPTH
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL, ExpertFiles, Holder, Shards, open_holder


class Copies:
    """What a drive holds. Safe to read from DEPTH threads. Raises StorageError when the drive cannot be read."""

    def __init__(self, checkpoint: Checkpoint, holder: Holder, path: Path) -> None:
        self.name, self.path, self.holder = holder.name, path, holder
        self._checkpoint = checkpoint
        self._device = open_holder(holder, path, checkpoint)
        self._pool = BufferPool(0, max(mmap.PAGESIZE, self._device.alignment))
        self._pool.limit_bytes = DEPTH * self._pool.cost(checkpoint.expert_nbytes)

    @property
    def mode(self) -> str:
        """How bytes come: `direct`, `nocache`, `buffered: reason`."""
        return self._device.mode

    def keys(self) -> Iterator[tuple[int, int]]:
        """(layer, expert) of each, layer by layer, in the order in which they lie on the drive."""
        for row, layer in enumerate(self._checkpoint.config.moe_layers):
            here = self.holder.here[row].nonzero()[0].tolist()
            yield from ((layer, e) for e in self._in_order(layer, here))

    def _in_order(self, layer: int, experts: list[int]) -> list[int]:
        return self._checkpoint.disk_order(layer, experts) if isinstance(self.holder, Shards) else experts

    def place(self, layer: int, expert: int) -> str:
        """The name of the file that has it, for people."""
        if isinstance(self.holder, Shards):
            files = {span.path.name: None for span in self._checkpoint.expert_spans(layer, expert)}
            return ", ".join(files)
        return self.holder.span(layer, expert).file

    def fetch(self, layer: int, expert: int) -> Buffer:
        """All bytes of an expert that is here, in a buffer to be released. Raises DeviceError."""
        span = self.holder.span(layer, expert)
        buffer = self._pool.take(span.length, span.offset)
        try:
            self._device.read(span.file, span.offset, buffer.view)
        except BaseException:
            buffer.release()
            raise
        return buffer

    @contextmanager
    def read(self, layer: int, expert: int) -> Iterator[memoryview]:
        """The same for as long as the block lasts."""
        buffer = self.fetch(layer, expert)
        try:
            yield buffer.view
        finally:
            buffer.release()

    def close(self) -> None:
        """Give back the files."""
        self._device.close()


def open_copies(checkpoint: Checkpoint, layout: Layout) -> list[Copies]:
    """Of the model directory, when it holds any, and of each directory. Raises StorageError."""
    holders: list[Holder] = [Shards(MODEL, checkpoint)] if checkpoint.experts_here.any() else []
    holders += [ExpertFiles(name, path, checkpoint) for name, path in layout.directories]
    paths = layout.paths(checkpoint.path)
    opened: list[Copies] = []
    try:
        for holder in holders:
            opened.append(Copies(checkpoint, holder, paths[holder.name]))
    except BaseException:
        for copies in opened:
            copies.close()
        raise
    return opened
