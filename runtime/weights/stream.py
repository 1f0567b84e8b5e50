"""Trunk matrices that do not fit: read again in every pass, block by block, ahead of the layer that wants them.

A matrix comes in blocks of rows and is multiplied block by block as they land (`Ops.linear_in_blocks`), so that what
is needed of it at one moment is one block, and the same numbers come out as if it were there as a whole. The order of
a pass is known, and after its end it begins anew; blocks are read ahead in this order as far as their room goes.
Whoever leaves the order, by a pass that was stopped or wants no logits, makes the reading begin where he is.

Of the embedding only the rows that are asked for are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.inventory import PREFIX
from runtime.drives.buffers import Buffer, nothing
from runtime.ops import Array, Ops, Weight
from runtime.progress import Pulse
from runtime.weights.ahead import BEHIND, Ahead, Block, BlockKey, TrunkReads, row_blocks

InForm = Callable[[str, int, memoryview], Weight]
"""(name, first row, the bytes of some rows) → a matrix of these rows, in the backend's form."""

HEAD = PREFIX + "lm_head.weight"
"""The matrix that not every pass wants, the last one of those that do."""

ROWS_AT_ONCE = 32
"""Rows of the embedding under way at once."""


@dataclass(frozen=True)
class Streamed:
    """A matrix [rows, columns] that is not in memory."""

    name: str
    rows: int
    columns: int


class Stream:
    """Gives blocks in the order of a pass.

    `restarts`: how often somebody left the order; `taken_bytes`: of all blocks and rows that were given.
    """

    def __init__(
        self, reads: TrunkReads, ops: Ops, in_form: InForm, names: Sequence[str], room_bytes: int, block_bytes: int
    ) -> None:
        """names: of the matrices, in the order of a pass. Nothing is read before a pass begins.

        room_bytes: of all buffers; block_bytes: what each of them could hold, at least the largest block.
        """
        self.restarts = self.taken_bytes = 0
        self._reads, self._ops, self._in_form = reads, ops, in_form
        self._room, self._block_bytes = room_bytes, block_bytes
        self._order = [block for name in names for block in row_blocks(name, reads.spans[name], ops)]
        self._place = {block.key: at for at, block in enumerate(self._order)}
        self._head, self._pulse = True, nothing
        self._ahead: Ahead | None = None
        self._begun: deque[Block] = deque()

    def handle(self, name: str) -> Streamed:
        """The matrix of this released name."""
        rows, columns = self._reads.spans[name].shape
        return Streamed(name, rows, columns)

    def begin_pass(self, head: bool, pulse: Pulse) -> None:
        """From now on `pulse` is called while blocks are waited for; without `head`, the head will not be wanted."""
        self._head, self._pulse = head, pulse
        if self._order and not (self._begun and self._begun[0] is self._order[0]):
            self.restarts += self._ahead is not None
            self._begin(0)

    def blocks(self, matrix: Streamed) -> Iterator[Weight]:
        """The matrix in blocks of rows; one is gone when the next is asked for. Raises StorageError, naming it."""
        at = self._place[BlockKey(matrix.name, 0)]
        while at < len(self._order) and (block := self._order[at]).name == matrix.name:
            key, buffer = self._take(at)
            try:
                yield self._in_form(block.name, block.first, buffer.view)
            except BaseException:
                self.close()
                raise
            finally:
                buffer.release()
            self.taken_bytes += block.nbytes
            assert self._ahead is not None
            self._ahead.done(key)
            at += 1

    def embed(self, table: Streamed, ids: npt.NDArray[np.int64]) -> Array:
        """Rows `ids` of the embedding: [T, H]."""
        distinct, back = np.unique(ids, return_inverse=True)
        rows = np.empty((len(distinct), table.columns), np.uint16)
        wide, into = rows.itemsize * table.columns, dict(zip(distinct.tolist(), rows, strict=True))
        blocks = ((Block(table.name, row, row * wide, wide), 0) for row in into)
        ahead = Ahead(self._reads, blocks, ROWS_AT_ONCE * self._reads.cost(wide), self._pulse)
        try:
            while (taken := ahead.take()) is not None:
                key, buffer = taken
                into[key.first][:] = self._reads.checkpoint.view_rows(table.name, buffer.view)[0]
                buffer.release()
                ahead.done(key)
        finally:
            ahead.close()
        self.taken_bytes += rows.nbytes
        return self._ops.embed(self._ops.matrix(rows), back.reshape(-1))

    def close(self) -> None:
        """Nothing is read ahead any more."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None
        self._begun.clear()

    # --- in order ---

    def _take(self, at: int) -> tuple[BlockKey, Buffer]:
        """The block at this place of the order."""
        if self._ahead is None or not self._begun or self._begun[0] is not self._order[at]:
            self.restarts += self._ahead is not None
            self._begin(at)
        assert self._ahead is not None
        try:
            taken = self._ahead.take()
        except BaseException:
            self.close()
            raise
        assert taken is not None, "a pass begins anew when it ends"
        self._begun.popleft()
        return taken

    def _begin(self, at: int) -> None:
        """Read ahead from this place on."""
        self.close()
        self._ahead = Ahead(self._reads, self._wanted(at), self._room, lambda: self._pulse(), self._block_bytes)

    def _wanted(self, at: int) -> Iterator[tuple[Block, int]]:
        """What is read, without end. Blocks of a matrix are one barrier, behind those before it."""
        barrier, some = BEHIND, True
        while some:
            some = False
            for block in self._order[at:]:
                if block.name != HEAD or self._head:
                    some = True
                    barrier += block.first == 0
                    self._begun.append(block)
                    yield block, barrier
            at = 0
