"""The trunk: every weight that is not a routed expert, in the backend's own form, resident as far as it fits.

`bf16` is the released weights. `int8` halves most of them, each output row with one scale (`checkpoint.int8`), and is
then not weight-exact. It leaves as released what is no matrix, as the int8 trunks that are in use elsewhere do, and
two matrices more:

* the router's: near a tie its rounding sends a token to another expert, an error that no later layer makes good, and
  it is one part in a hundred of the trunk;
* the embedding: of it one row a token is used, so halving it saves no time, and its error would be in every layer.

What does not fit is read again in every pass (`stream.py`); which that is, `division.py` decides. Where there are no
drives, everything is read plainly and stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.int8 import Int8Matrix, quantize
from runtime.checkpoint.inventory import PREFIX
from runtime.ops import Array, Ops, Weight
from runtime.progress import Progress, Pulse
from runtime.weights.ahead import Ahead, Block, TrunkReads, row_blocks
from runtime.weights.stream import Stream, Streamed

LayerWeights: TypeAlias = Mapping[str, Weight | Streamed]
"""Weights of one layer by released name, less the layer's prefix and the ending `.weight`."""

Precision = Literal["bf16", "int8"]

VECTORS = ("norm", "layernorm", "res_proj", "conv1d", "A_log", "dt_bias", "e_score_correction_bias")
"""Endings of names that are not matrices, whatever their shape: the rest of the trunk is."""

EMBEDDING = "embed_tokens"

EXACT = (*VECTORS, EMBEDDING, "block_sparse_moe.gate")
"""Endings of names that `int8` leaves as released."""

IN_PLACE = ("cpu",)
"""Backends whose bf16 matrices stay in the memory they were read into."""

BLOCK_BYTES = 1 << 20
"""The most bf16 bytes that are made int8 at once, but for a row that is longer."""

SMALL_BYTES = 1 << 20
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
        self.stream: Stream | None = None
        names = [name for name in checkpoint.trunk_names() if name not in streamed]
        self._total, self._done = sum(checkpoint.span(name).nbytes for name in names), 0
        self._progress = progress
        if reads is None:
            self._read_plainly(names)
        else:
            self._read(names, reads)
        if streamed:
            assert reads is not None, "there is nothing to stream from"
            matrices = [name for name in streamed if not name.endswith(f"{EMBEDDING}.weight")]
            self.stream = Stream(reads, ops, self._converted, matrices, room_bytes, block_bytes)
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

    def _resident(self, name: str, values: npt.NDArray[Any]) -> Weight:
        """The weight of these values, which may be taken over."""
        return self._ops.vector(values) if is_vector(name) else self._ops.matrix(values)

    def _is_halved(self, name: str) -> bool:
        return self.precision == "int8" and is_int8(name)

    def _read_plainly(self, names: Sequence[str]) -> None:
        for name in names:
            if self._is_halved(name):
                rows, columns = self._checkpoint.span(name).shape
                whole, step = _empty(rows, columns), max(1, BLOCK_BYTES // (2 * columns))
                for first in range(0, rows, step):
                    bits = self._checkpoint.read_rows(name, first, min(first + step, rows))
                    _halve(bits, whole, name, first)
                    self._told(bits.nbytes)
                self._put(name, self._ops.int8_matrix(whole))
                continue
            weight = self._checkpoint.read(name)
            self._put(name, self._resident(name, weight))
            self._told(weight.nbytes)

    def _read(self, names: Sequence[str], reads: TrunkReads) -> None:
        """From the drives, block by block, as many under way as memory that will be used anyway has room for."""
        checkpoint, pool = self._checkpoint, reads.reader.pool
        runs = list(_runs(checkpoint, names))
        blocks = [block for run in runs for block in self._blocks(run)]
        members = {run[0]: run for run in runs}
        halves: dict[str, Int8Matrix] = {}
        limit, largest = pool.limit_bytes, max((reads.cost(block.nbytes) for block in blocks), default=0)
        room = max(largest, min(LOADING_BYTES, limit))
        if self._ops.name in IN_PLACE and self.precision == "bf16":
            room = largest + LOADING_BYTES
        pool.resize(max(limit, room))
        ahead = Ahead(reads, ((block, 0) for block in blocks), room, self._told)
        try:
            while (taken := ahead.take()) is not None:
                key, buffer = taken
                name, first = key
                nbytes, kept = buffer.view.nbytes, False
                if self._is_halved(name) and len(members[name]) == 1:
                    self._take_rows(halves, name, first, checkpoint.view_rows(name, buffer.view))
                elif len(members[name]) == 1 and not is_vector(name) and self._ops.name in IN_PLACE:
                    values, kept = checkpoint.view(name, buffer.view), True
                    self._put(name, self._resident(name, values))
                    del values
                else:
                    self._take_together(members[name], buffer.view)
                if kept:
                    buffer.keep()
                else:
                    buffer.release()
                ahead.done(key)
                self._told(nbytes)
        finally:
            ahead.close()
            pool.resize(limit)

    def _blocks(self, run: Sequence[str]) -> Iterator[Block]:
        """What is read at once: a run of tensors, one tensor, or, where int8 is made of it, some of its rows."""
        spans = [self._checkpoint.span(name) for name in run]
        name, nbytes = run[0], sum(span.nbytes for span in spans)
        if len(run) == 1 and self._is_halved(name):
            yield from row_blocks(self._checkpoint, name, self._ops)
        else:
            yield Block(name, 0, 0, nbytes)

    def _take_rows(self, halves: dict[str, Int8Matrix], name: str, first: int, bits: npt.NDArray[np.uint16]) -> None:
        """Rows of a matrix that becomes int8."""
        rows, columns = self._checkpoint.span(name).shape
        if not first:
            halves[name] = _empty(rows, columns)
        whole = halves[name]
        _halve(bits, whole, name, first)
        if first + len(bits) == rows:
            self._put(name, self._ops.int8_matrix(halves.pop(name)))

    def _take_together(self, run: Sequence[str], data: memoryview) -> None:
        """Tensors that lie one behind the other, copied."""
        start = 0
        for name in run:
            nbytes = self._checkpoint.span(name).nbytes
            values = self._checkpoint.view(name, data[start : start + nbytes])
            self._put(name, self._converted(name, 0, values) if self._is_halved(name) else self._copied(name, values))
            start += nbytes

    def _copied(self, name: str, values: npt.NDArray[Any]) -> Weight:
        return self._resident(name, values.copy() if self._ops.name in IN_PLACE else values)

    def _converted(self, name: str, first: int, bits: npt.NDArray[np.uint16]) -> Weight:
        """Rows of a matrix as one of their own; on some backends only as long as the bits are there."""
        if not self._is_halved(name):
            return self._ops.matrix(bits)
        some = _empty(*bits.shape)
        _halve(bits, some, name, 0, first)
        return self._ops.int8_matrix(some)


def is_vector(name: str) -> bool:
    """Whether the trunk tensor of this released name is no matrix."""
    return name.removesuffix(".weight").endswith(VECTORS)


def is_int8(name: str) -> bool:
    """Whether `int8` changes the trunk tensor of this released name."""
    return not name.removesuffix(".weight").endswith(EXACT)


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


def _runs(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[list[str]]:
    """The tensors in the order they have on disk; small ones that lie next to each other together."""
    run: list[str] = []
    end, place = 0, None
    nbytes = 0
    for span in sorted((checkpoint.span(name) for name in names), key=lambda span: (span.path, span.offset)):
        joins = span.path == place and span.offset == end and span.nbytes < SMALL_BYTES and nbytes + span.nbytes
        if run and not (joins and joins <= TOGETHER_BYTES):
            yield run
            run, nbytes = [], 0
        run.append(span.name)
        nbytes += span.nbytes if span.nbytes < SMALL_BYTES else TOGETHER_BYTES
        end, place = span.offset + span.nbytes, span.path
    if run:
        yield run


def _empty(rows: int, columns: int) -> Int8Matrix:
    return Int8Matrix(np.empty((rows, columns), np.int8), np.empty(rows, np.float16))


def _halve(bits: npt.NDArray[np.uint16], whole: Int8Matrix, name: str, first: int, named: int | None = None) -> None:
    """Make rows `first` on of `whole` of these, part by part; a message calls the first one `named`."""
    step = max(1, BLOCK_BYTES // (2 * bits.shape[1]))
    for row in range(0, len(bits), step):
        part = slice(first + row, first + min(row + step, len(bits)))
        said = (first if named is None else named) + row
        quantize(bits[row : row + step], Int8Matrix(whole.values[part], whole.scales[part]), name, said)
