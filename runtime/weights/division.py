"""Which trunk tensors stay in memory, and which are read again in every pass.

A byte that stays saves a byte of every pass, whichever it is, so what counts is how many fit. What is used otherwise
than by `linear`, or guesses of the next layer are made with, always stays: vectors, routers, `kv_b_proj`. Then small
matrices, of which a read takes longer than its bytes do; then the others in turn, one of each layer, so that between
any two layers' experts about as much is left to be read. The head is not wanted by every pass and stays last of them.
Of the embedding a pass uses a row a token: it stays where nothing else wants the memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import trunk_spans
from runtime.checkpoint.int8 import is_int8
from runtime.checkpoint.inventory import LAYERS, PREFIX
from runtime.drives.buffers import BufferPool
from runtime.ops import Ops
from runtime.weights.ahead import row_blocks
from runtime.weights.stream import HEAD, ROWS_AT_ONCE
from runtime.weights.trunk import Precision, kept_nbytes

EMBEDDING = PREFIX + "model.embed_tokens.weight"

IN_A_PASS = (
    *(f"self_attn.{name}_proj" for name in ("q_a", "q_b", "q", "k", "v", "f_a", "f_b", "b")),
    *(f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "g_a_proj", "g_b_proj", "g_proj", "o_proj")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "block_sparse_moe.routed_expert_down_proj",
    *(f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up", "down")),
    "block_sparse_moe.routed_expert_up_proj",
)
"""The matrices of a layer that can be streamed, in the order in which `model/k3.py` multiplies with them."""

RESIDENT_FIRST_BYTES = 4 << 20
"""A matrix below this stays before larger ones."""

LEAST_BLOCKS, MOST_BLOCKS = 2, 24
"""Buffers of a stream: one is computed with while the next ones are read."""

_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)\.(.*)\.weight")


@dataclass(frozen=True)
class Division:
    """streamed: released names in the order of a pass, the embedding first if it is one of them.

    resident_bytes: kept. read_bytes: read in a pass of one token. staging_bytes: all that streaming takes, of which
    `buffer_bytes` are buffers, and of these `room_bytes` for matrices, in blocks of up to `block_bytes`.
    """

    streamed: tuple[str, ...] = ()
    resident_bytes: int = 0
    read_bytes: int = 0
    staging_bytes: int = 0
    buffer_bytes: int = 0
    room_bytes: int = 0
    block_bytes: int = 0
    whole_bytes: int = 0
    """What would be kept if everything were."""


class Divider:
    """Divides one checkpoint's trunk for a backend and a precision."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: type[Ops],
        precision: Precision,
        alignment: int = 1,
        hedges: int = 0,
        converted: bool = False,
    ) -> None:
        """alignment: of buffers; hedges: how many more of them there may be for reads that are late; converted: int8
        is not made of what is read, but read."""
        self._checkpoint, self._ops, self._precision, self._hedges = checkpoint, ops, precision, hedges
        self._converted, self._spans = converted, trunk_spans(checkpoint, converted)
        self._pool = BufferPool(0, alignment)
        self.order = sorted((n for n in checkpoint.trunk_names() if _place(n) is not None), key=_order)
        blocks = {name: [b.nbytes for b in row_blocks(name, self._spans[name], ops)] for name in self.order}
        self._largest = {name: max(sizes) for name, sizes in blocks.items()}
        self._blocks = sum(map(len, blocks.values()))
        self.everything = sum(map(self._kept, checkpoint.trunk_names()))
        self.embedding = self._kept(EMBEDDING)

    def divide(self, room_bytes: int) -> Division:
        """As much as fits in so much, staging included; at least what always stays.

        The embedding never does, unless its rows would need more buffers than it has bytes.
        """
        stays = self.everything - self.embedding - sum(map(self._kept, self.order))
        rows = self._rows_bytes()
        if self.embedding <= rows and self.everything <= room_bytes:
            return self.whole()
        if self.everything - self.embedding + rows <= room_bytes:
            return self.streaming([EMBEDDING], 0)
        room, unit = room_bytes - stays - rows, self._unit(self.order)
        # a quarter of what is left, for buffers, and no more than all blocks together need
        count = max(LEAST_BLOCKS, min(MOST_BLOCKS, self._blocks, room // (4 * unit)))
        room -= (count + self._hedges) * unit + self._form_bytes(self.order)
        kept = set()
        for name in sorted(self.order, key=self._worth):
            if (nbytes := self._kept(name)) <= room:
                kept.add(name)
                room -= nbytes
        return self.streaming([EMBEDDING, *(n for n in self.order if n not in kept)], count)

    def whole(self) -> Division:
        """Everything stays."""
        return self.streaming([], 0)

    def streaming(self, streamed: list[str], count: int) -> Division:
        """The division that streams these, in the order of a pass, through so many buffers."""
        matrices = [name for name in streamed if name != EMBEDDING]
        unit = self._unit(matrices)
        read = sum(self._spans[name].nbytes for name in matrices)
        rows = self._spans[EMBEDDING]
        buffers = count * unit + self._rows_bytes() * (EMBEDDING in streamed)
        return Division(
            tuple(streamed),
            self.everything - sum(map(self._kept, streamed)),
            read + (rows.nbytes // rows.shape[0] if EMBEDDING in streamed else 0),
            buffers + self._hedges * unit + self._form_bytes(matrices),
            buffers,
            count * unit,
            max((self._largest[name] for name in matrices), default=0),
            self.everything,
        )

    def _kept(self, name: str) -> int:
        return kept_nbytes(self._checkpoint, name, self._ops, self._precision)

    def _unit(self, matrices: Sequence[str]) -> int:
        """What the buffer of any of their blocks counts."""
        return self._pool.cost(max(self._largest[name] for name in matrices)) if matrices else 0

    def _form_bytes(self, matrices: Sequence[str]) -> int:
        """What blocks take in the backend's form, beside their buffers, while they are computed with, at most."""
        unit, on_mlx = self._unit(matrices), self._ops.name == "mlx"
        if self._ops.name == "reference":
            return (9 if self._converted else 5) * unit
        if self._precision == "bf16":
            return unit * on_mlx
        whole = max((self._kept(name) for name in matrices if is_int8(name)), default=0)
        return (on_mlx if self._converted else 2) * unit + 2 * whole * on_mlx

    def _rows_bytes(self) -> int:
        """Buffers of the rows of the embedding that are under way at once."""
        _, columns = self._spans[EMBEDDING].shape
        return ROWS_AT_ONCE * self._pool.cost(2 * columns)

    def _worth(self, name: str) -> tuple[bool, bool, int, int]:
        """Lower stays sooner."""
        layer, at = _order(name)
        return name == HEAD, self._spans[name].nbytes >= RESIDENT_FIRST_BYTES, at, layer


def _place(name: str) -> tuple[int, int] | None:
    """(layer, place in it) of a matrix that can be streamed, the head in a layer after the last; None for others."""
    if name == HEAD:
        return 1 << 30, 0
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in IN_A_PASS:
        return None
    return int(found[1]), IN_A_PASS.index(found[2])


def _order(name: str) -> tuple[int, int]:
    place = _place(name)
    assert place is not None
    return place
