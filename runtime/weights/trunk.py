"""The trunk: every weight that is not a routed expert, in the backend's own form, resident as far as it fits.

`bf16` is the released weights. `int8` halves most of them, each output row with one scale (`checkpoint.int8`), and is
then not weight-exact. It is made of the released weights while they are read, or read from a file in which they are
int8 already (`checkpoint.converted`), with the same bits.

What does not fit is read again in every pass (`stream.py`); which that is, `division.py` decides. Where there are no
drives, everything is read plainly and stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint, TensorSpan
from runtime.checkpoint.int8 import Int8Matrix, empty, is_int8, quantize, rows_at_once
from runtime.checkpoint.inventory import PREFIX, is_vector
from runtime.ops import Array, Ops, Weight
from runtime.progress import Progress, Pulse
from runtime.weights.ahead import Ahead, Block, TrunkReads, row_blocks
from runtime.weights.stream import Stream, Streamed

LayerWeights: TypeAlias = Mapping[str, Weight | Streamed]
"""Weights of one layer by released name, less the layer's prefix and the ending `.weight`."""

Precision = Literal["bf16", "int8"]

EMBEDDING = "embed_tokens"

IN_PLACE = ("cpu",)
"""Backends whose matrices stay in the memory they were read into."""

NEIGHBOUR_BYTES = 1 << 20
"""Tensors below this are read together with their neighbours, and copied from there."""

TOGETHER_BYTES = 4 << 20
"""The most that is read together."""

LOADING_BYTES = 256 << 20
"""Blocks under way at once while loading: enough for several quick drives."""


class Trunk:
    """All trunk weights of a checkpoint: `streamed` ones are handles, the others are read once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        precision: Precision = "bf16",
        progress: Progress | None = None,
        reads: TrunkReads | None = None,
        streamed: Sequence[str] = (),
        room_bytes: int = 0,
        block_bytes: int = 0,
    ) -> None:
        """`reads`: the drives, without which everything is read plainly. streamed: released names, in the order of a
        pass; room_bytes and block_bytes, of its buffers: see `Division`. `progress` is called time and again; what it
        raises ends this.

        Raises CheckpointError for weights that int8 cannot hold, StorageError for what cannot be read.
        """
        self.precision: Precision = precision
        self.top: dict[str, Weight | Streamed] = {}
        self._layers: list[dict[str, Weight | Streamed]] = [{} for _ in range(checkpoint.config.num_hidden_layers)]
        self._checkpoint, self._ops = checkpoint, ops
        self._converted, self._check = (None, None) if reads is None else (reads.converted, reads.check)
        self.stream: Stream | None = None
        names = [name for name in checkpoint.trunk_names() if name not in streamed]
        span = checkpoint.span if reads is None else reads.spans.__getitem__
        self._total, self._done = sum(span(name).nbytes for name in names), 0
        self._progress = progress
        if reads is None:
            self._read_plainly(names)
        else:
            self._read(names, reads)
        if streamed:
            assert reads is not None, "there is nothing to stream from"
            matrices = [name for name in streamed if not name.endswith(f"{EMBEDDING}.weight")]
            self.stream = Stream(reads, ops, self._rows, matrices, room_bytes, block_bytes)
            for name in streamed:
                self._put(name, self.stream.handle(name))

    def layer(self, layer: int) -> LayerWeights:
        """The weights of 0-based layer `layer`."""
        return self._layers[layer]

    def begin_pass(self, head: bool, pulse: Pulse) -> None:
        """A pass through all layers begins; without `head`, no logits are wanted of it.

        `pulse` is called while weights are waited for; what it raises ends the wait.
        """
        if self.stream is not None:
            self.stream.begin_pass(head, pulse)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of all passes so far that were not resident."""
        return 0 if self.stream is None else self.stream.taken_bytes

    def embed(self, ids: npt.NDArray[np.int64]) -> Array:
        """The embeddings of ids [T]: [T, H]."""
        table = self.top[EMBEDDING]
        if isinstance(table, Streamed):
            assert self.stream is not None
            return self.stream.embed(table, ids)
        return self._ops.embed(table, ids)

    def linear(self, x: Array, weight: Weight | Streamed) -> Array:
        """x · weightᵀ, wherever the weight is."""
        if isinstance(weight, Streamed):
            assert self.stream is not None
            return self._ops.linear_in_blocks(x, weight.rows, self.stream.blocks(weight))
        return self._ops.linear(x, weight)

    # --- loading ---

    def _put(self, name: str, weight: Weight | Streamed) -> None:
        """Where a released name belongs, under its short form."""
        short = name.removeprefix(PREFIX).removeprefix("model.").removesuffix(".weight")
        home = self.top
        if short.startswith("layers."):
            _, layer, short = short.split(".", 2)
            home = self._layers[int(layer)]
        home[short] = weight

    def _told(self, nbytes: int = 0) -> None:
        """So many bytes more are there."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _is_halved(self, name: str) -> bool:
        """Whether int8 is made of what is read."""
        return self.precision == "int8" and self._converted is None and is_int8(name)

    def _read_plainly(self, names: Sequence[str]) -> None:
        for name in names:
            if self._is_halved(name):
                rows, columns = self._checkpoint.span(name).shape
                whole, step = empty(rows, columns), rows_at_once(columns)
                for first in range(0, rows, step):
                    bits = self._checkpoint.read_rows(name, first, min(first + step, rows))
                    _take(bits, whole, name, first)
                    self._told(bits.nbytes)
                self._put(name, self._ops.int8_matrix(whole))
                continue
            values = self._checkpoint.read(name)
            self._put(name, self._ops.vector(values) if is_vector(name) else self._ops.matrix(values))
            self._told(values.nbytes)

    def _read(self, names: Sequence[str], reads: TrunkReads) -> None:
        """From the drives, block by block, as many under way as memory that will be used anyway has room for."""
        pool, in_place = reads.reader.pool, self._ops.name in IN_PLACE
        runs = list(_runs(reads.spans, names))
        blocks = [block for run in runs for block in self._blocks(run, reads)]
        members = {run[0]: run for run in runs}
        halves: dict[str, Int8Matrix] = {}
        limit, largest = pool.limit_bytes, max((reads.cost(block.nbytes) for block in blocks), default=0)
        room = max(largest, min(LOADING_BYTES, limit))
        if in_place and not any(map(self._is_halved, names)):
            room = largest + LOADING_BYTES
        pool.resize(max(limit, room))
        ahead = Ahead(reads, ((block, 0) for block in blocks), room, self._told)
        try:
            while (taken := ahead.take()) is not None:
                key, buffer = taken
                name, first = key
                nbytes, kept = buffer.view.nbytes, False
                if len(members[name]) > 1 or is_vector(name):
                    self._take_together(members[name], buffer.view, reads.spans)
                elif self._is_halved(name):
                    self._take_rows(halves, name, first, self._checkpoint.view_rows(name, buffer.view))
                else:
                    self._put(name, self._rows(name, 0, buffer.view))
                    kept = in_place
                if kept:
                    buffer.keep()
                else:
                    buffer.release()
                ahead.done(key)
                self._told(nbytes)
        finally:
            ahead.close()
            pool.resize(limit)

    def _blocks(self, run: Sequence[str], reads: TrunkReads) -> Iterator[Block]:
        """What is read at once: a run of tensors, one tensor, or, where int8 is made of it, some of its rows."""
        name = run[0]
        if len(run) == 1 and self._is_halved(name):
            yield from row_blocks(name, reads.spans[name], self._ops)
        else:
            yield Block(name, 0, 0, sum(reads.spans[member].nbytes for member in run))

    def _take_rows(self, halves: dict[str, Int8Matrix], name: str, first: int, bits: npt.NDArray[np.uint16]) -> None:
        """Rows of a matrix that becomes int8."""
        rows, columns = self._checkpoint.span(name).shape
        if not first:
            halves[name] = empty(rows, columns)
        whole = halves[name]
        _take(bits, whole, name, first)
        if first + len(bits) == rows:
            self._put(name, self._ops.int8_matrix(halves.pop(name)))

    def _take_together(self, run: Sequence[str], data: memoryview, spans: Mapping[str, TensorSpan]) -> None:
        """Tensors that lie one behind the other, copied."""
        start = 0
        for name in run:
            own = memoryview(bytearray(data[start : start + spans[name].nbytes]))
            vector = is_vector(name)
            self._put(name, self._ops.vector(self._checkpoint.view(name, own)) if vector else self._rows(name, 0, own))
            start += len(own)

    def _rows(self, name: str, first: int, data: memoryview) -> Weight:
        """Rows of a matrix as one of their own, of their bytes as they were read, which it may take over."""
        if self._converted is not None and name in self._converted.matrices:
            _, columns = self._converted.matrices[name].shape
            values = np.frombuffer(data, np.int8).reshape(-1, columns)
            if self._check is not None:
                self._check(name, first, data)
            return self._ops.int8_matrix(Int8Matrix(values, self._converted.scales[name][first : first + len(values)]))
        bits = self._checkpoint.view_rows(name, data)
        if not self._is_halved(name):
            return self._ops.matrix(bits)
        made = empty(*bits.shape)
        quantize(bits, made, name, first)
        return self._ops.int8_matrix(made)


def kept_nbytes(checkpoint: Checkpoint, name: str, ops: type[Ops], precision: Precision) -> int:
    """Bytes that the backend keeps of a trunk tensor."""
    span = checkpoint.span(name)
    if precision == "int8" and is_int8(name):
        rows, columns = span.shape
        return ops.int8_nbytes(rows, columns)
    return span.nbytes * (4 if ops.name == "reference" else 1)  # float64 of bf16


def trunk_nbytes(checkpoint: Checkpoint, ops: type[Ops], precision: Precision) -> int:
    """Bytes that the backend keeps of the trunk."""
    return sum(kept_nbytes(checkpoint, name, ops, precision) for name in checkpoint.trunk_names())


def _runs(spans: Mapping[str, TensorSpan], names: Sequence[str]) -> Iterator[list[str]]:
    """The tensors in the order they have on disk; small ones that lie next to each other together."""
    run: list[str] = []
    end, place = 0, None
    nbytes = 0
    for name in sorted(names, key=lambda name: (spans[name].path, spans[name].offset)):
        span = spans[name]
        joins = span.path == place and span.offset == end and span.nbytes < NEIGHBOUR_BYTES and nbytes + span.nbytes
        if run and not (joins and joins <= TOGETHER_BYTES):
            yield run
            run, nbytes = [], 0
        run.append(name)
        nbytes += span.nbytes if span.nbytes < NEIGHBOUR_BYTES else TOGETHER_BYTES
        end, place = span.offset + span.nbytes, span.path
    if run:
        yield run


def _take(bits: npt.NDArray[np.uint16], whole: Int8Matrix, name: str, first: int) -> None:
    """Make rows `first` on of `whole` of these."""
    part = slice(first, first + len(bits))
    quantize(bits, Int8Matrix(whole.values[part], whole.scales[part]), name, first)
