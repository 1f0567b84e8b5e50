"""The trunk: every weight that is not a routed expert, resident in memory in the backend's own form.

`bf16` is the released weights. `int8` halves most of them, each output row with one scale (`checkpoint.int8`), and is
then not weight-exact. It leaves as released what is no matrix, as the int8 trunks that are in use elsewhere do, and
two matrices more:

* the router's: near a tie its rounding sends a token to another expert, an error that no later layer makes good, and
  it is one part in a hundred of the trunk;
* the embedding: of it one row a token is used, so halving it saves no time, and its error would be in every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.int8 import Int8Matrix, quantize
from runtime.checkpoint.inventory import PREFIX
from runtime.ops import Ops, Weight
from runtime.progress import Progress

LayerWeights: TypeAlias = Mapping[str, Weight]
"""Weights of one layer by released name, less the layer's prefix and the ending `.weight`."""

Precision = Literal["bf16", "int8"]

VECTORS = ("norm", "layernorm", "res_proj", "conv1d", "A_log", "dt_bias", "e_score_correction_bias")
"""Endings of names that are not matrices, whatever their shape: the rest of the trunk is."""

EXACT = (*VECTORS, "embed_tokens", "block_sparse_moe.gate")
"""Endings of names that `int8` leaves as released."""

BLOCK_BYTES = 1 << 20
"""The most bf16 bytes that wait to become int8, but for a row that is longer."""


class Trunk:
    """All trunk weights of a checkpoint, read once."""

    def __init__(
        self, checkpoint: Checkpoint, ops: Ops, precision: Precision = "bf16", progress: Progress | None = None
    ) -> None:
        """Raises CheckpointError for weights that int8 cannot hold, StorageError for what cannot be read."""
        config = checkpoint.config
        self.precision: Precision = precision
        self._layers: list[dict[str, Weight]] = [{} for _ in range(config.num_hidden_layers)]
        self.top: dict[str, Weight] = {}
        done = 0

        def advanced(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, checkpoint.trunk_nbytes)

        for name in checkpoint.trunk_names():
            home, short = self._place(name)
            if precision == "int8" and is_int8(name):
                home[short] = ops.int8_matrix(_read_int8(checkpoint, name, advanced))
                continue
            weight = checkpoint.read(name)
            home[short] = ops.vector(weight) if short.endswith(VECTORS) else ops.matrix(weight)
            advanced(weight.nbytes)
        self.embed_tokens: Weight = self.top["embed_tokens"]
        self.lm_head: Weight = self.top["lm_head"]

    def layer(self, layer: int) -> LayerWeights:
        """The weights of 0-based layer `layer`."""
        return self._layers[layer]

    def _place(self, name: str) -> tuple[dict[str, Weight], str]:
        """Where a released name belongs, and its short form there."""
        short = name.removeprefix(PREFIX).removeprefix("model.").removesuffix(".weight")
        if not short.startswith("layers."):
            return self.top, short
        _, layer, short = short.split(".", 2)
        return self._layers[int(layer)], short


def is_int8(name: str) -> bool:
    """Whether `int8` changes the trunk tensor of this released name."""
    return not name.removesuffix(".weight").endswith(EXACT)


def trunk_nbytes(checkpoint: Checkpoint, ops: type[Ops], precision: Precision) -> int:
    """Bytes that the backend keeps of the trunk."""
    widening = 4 if ops.name == "reference" else 1  # float64 of bf16
    total = 0
    for name in checkpoint.trunk_names():
        span = checkpoint.span(name)
        if precision == "int8" and is_int8(name):
            rows, columns = span.shape
            total += ops.int8_nbytes(rows, columns)
        else:
            total += span.nbytes * widening
    return total


def _read_int8(checkpoint: Checkpoint, name: str, advanced: Callable[[int], None]) -> Int8Matrix:
    """The matrix in int8, made row by row as it is read: the bf16 is never there as a whole."""
    rows, columns = checkpoint.span(name).shape
    whole = Int8Matrix(np.empty((rows, columns), np.int8), np.empty(rows, np.float16))
    step = max(1, BLOCK_BYTES // (2 * columns))
    for first in range(0, rows, step):
        bits = checkpoint.read_rows(name, first, min(first + step, rows))
        part = slice(first, first + step)
        quantize(bits, Int8Matrix(whole.values[part], whole.scales[part]), name, first)
        advanced(bits.nbytes)
    return whole
