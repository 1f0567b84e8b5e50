"""Trunk bytes read through the drives, in the order in which they are wanted, ahead of the one who wants them.

A *block* is one job: a trunk tensor, some rows of one, or several small ones that lie next to each other. Blocks are
demand: nobody guesses. While experts are wanted, too, the barriers decide: those of the trunk come behind all of
theirs, so that what is read ahead for later layers waits for what this layer needs now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from runtime.checkpoint import Checkpoint, TensorSpan
from runtime.checkpoint.converted import ConvertedTrunk, trunk_spans
from runtime.drives.buffers import Buffer
from runtime.drives.jobs import Job, Span
from runtime.drives.reader import Reader
from runtime.ops import Ops
from runtime.progress import Pulse
from runtime.weights.checks import TrunkCheck
from runtime.weights.landing import as_landed

BEHIND = 1 << 40
"""Barriers of blocks that are read ahead: behind those of experts."""


class BlockKey(NamedTuple):
    """Names the job of a block."""

    name: str
    first: int

    def __str__(self) -> str:
        return self.name + f" from row {self.first}" * (self.first > 0)


class Block(NamedTuple):
    """Rows `first` on of the tensor `name`, or all of it and of what lies behind it: `nbytes` from byte `start`."""

    name: str
    first: int
    start: int
    nbytes: int

    @property
    def key(self) -> BlockKey:
        """Of its job."""
        return BlockKey(self.name, self.first)


def row_blocks(name: str, span: TensorSpan, ops: Ops | type[Ops]) -> Iterator[Block]:
    """The blocks in which a matrix, which lies there, is read by rows."""
    rows, columns = span.shape
    step, row_nbytes = ops.block_rows(columns), span.nbytes // rows
    for first in range(0, rows, step):
        yield Block(name, first, first * row_nbytes, (min(first + step, rows) - first) * row_nbytes)


@dataclass(frozen=True)
class TrunkReads:
    """Where the trunk lies: in the released files, on the drives `holders`, every one that stands for the model's
    directory; or, of the matrices in `converted`, in that file, on every drive of `converted_on` that has it."""

    checkpoint: Checkpoint
    reader: Reader
    holders: tuple[str, ...]
    converted: ConvertedTrunk | None = None
    converted_on: tuple[str, ...] = ()
    check: TrunkCheck | None = None
    """Looks at what is read of the converted ones."""

    @cached_property
    def spans(self) -> dict[str, TensorSpan]:
        """By released name."""
        return trunk_spans(self.checkpoint, self.converted is not None)

    def is_converted(self, name: str) -> bool:
        """Whether this tensor is read as int8."""
        return self.converted is not None and name in self.converted.matrices

    def job(self, block: Block, barrier: int = 0, room: int = 0) -> Job:
        """The block as what the drives are asked for. `room`: see `Job`."""
        span = self.spans[block.name]
        file, offset = span.path.name, span.offset + block.start
        holders = self.converted_on if self.is_converted(block.name) else self.holders
        copies = tuple(Span(holder, file, offset, block.nbytes) for holder in holders)
        return Job(block.key, copies, barrier=barrier, room=room)

    def cost(self, nbytes: int) -> int:
        """What the buffer of a block counts."""
        return self.reader.pool.cost(nbytes)


class Ahead:
    """Blocks under way and landed, none twice, in `room_bytes` of buffers, or one block; taken in their order.

    `take` gives the next one's buffer; until it is told by `done` that the buffer was released or kept, that counts in
    the room. Whatever goes wrong, close it: nothing of it is under way then.
    """

    def __init__(
        self,
        reads: TrunkReads,
        blocks: Iterator[tuple[Block, int]],
        room_bytes: int,
        pulse: Pulse,
        block_bytes: int = 0,
    ) -> None:
        """Begins to read blocks, each with its barrier. block_bytes: what every buffer could hold at least.

        `pulse` is called time and again while a block is waited for; what it raises ends that."""
        self._reads, self._blocks, self._pulse = reads, blocks, pulse
        self._room, self._block_bytes = room_bytes, block_bytes
        self._waiting = next(blocks, None)
        self._begun: deque[BlockKey] = deque()
        self._out: dict[BlockKey, int] = {}
        self._begin()

    def take(self) -> tuple[BlockKey, Buffer] | None:
        """The next block, when it has landed; None behind the last. Raises StorageError naming the tensor."""
        if not self._begun:
            return None
        key = self._begun[0]
        landed = next(as_landed(self._reads.reader, [key], str, self._pulse))
        del self._begun[0]
        return key, landed.buffer

    def done(self, key: BlockKey) -> None:
        """The buffer of this block is released, or kept: there is room for others."""
        del self._out[key]
        self._begin()

    def close(self) -> None:
        """Cancel what is under way."""
        self._waiting = None
        self._reads.reader.cancel(self._begun)
        self._begun.clear()

    def _begin(self) -> None:
        """Have as many blocks read as there is room for."""
        batch: list[Job] = []
        while self._waiting is not None:
            block, barrier = self._waiting
            cost = self._reads.cost(max(block.nbytes, self._block_bytes))
            if self._out and (block.key in self._out or sum(self._out.values()) + cost > self._room):
                break
            self._out[block.key] = cost
            self._begun.append(block.key)
            batch.append(self._reads.job(block, barrier, self._block_bytes))
            self._waiting = next(self._blocks, None)
        if batch:
            self._reads.reader.submit(batch)
