"""The int8 form of a trunk matrix: not in a checkpoint, made of its bf16 where `--trunk int8` asks for it.

Per output row: s = largest magnitude / 127 in float32, 1 for a row of zeros; value = weight / s, rounded half to even,
within ±127. s is kept as float16, and a weight then counts as int8 · float16, which float32 holds exactly. These are
the numbers of the int8 trunks that are in use elsewhere. The weights are no longer the released ones.

What is no matrix stays as released, as it does there, and two matrices more:

* the router's: near a tie its rounding sends a token to another expert, an error that no later layer makes good, and
  it is one part in a hundred of the trunk;
* the embedding: of it one row a token is used, so halving it saves no time, and its error would be in every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.inventory import VECTORS
from runtime.errors import CheckpointError

EXACT = (*VECTORS, "embed_tokens", "block_sparse_moe.gate")
"""Endings of names that `int8` leaves as released."""

BLOCK_BYTES = 1 << 20
"""The most bf16 bytes that are made int8 at once, but for a row that is longer."""


class Int8Matrix(NamedTuple):
    """values int8 [out, in], scales float16 [out]."""

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]


def is_int8(name: str) -> bool:
    """Whether `int8` changes the trunk tensor of this released name."""
    return not name.removesuffix(".weight").endswith(EXACT)


def rows_at_once(columns: int) -> int:
    """How many rows are made int8 at once."""
    return max(1, BLOCK_BYTES // (2 * columns))


def empty(rows: int, columns: int) -> Int8Matrix:
    """Room for a matrix."""
    return Int8Matrix(np.empty((rows, columns), np.int8), np.empty(rows, np.float16))


def quantize(bits: npt.NDArray[np.uint16], out: Int8Matrix, name: str, first: int = 0) -> None:
    """Write bf16 rows [n, in] into the n rows of `out`. Takes 4 · BLOCK_BYTES meanwhile, or four times a longer row.

    Raises CheckpointError, naming the tensor and its row (`first` is that of the first one), for what int8 cannot hold:
    a weight that is no number, or a scale past float16.
    """
    step = rows_at_once(bits.shape[1])
    for row in range(0, len(bits), step):
        part = slice(row, row + step)
        _quantize(bits[part], Int8Matrix(out.values[part], out.scales[part]), name, first + row)


def _quantize(bits: npt.NDArray[np.uint16], out: Int8Matrix, name: str, first: int = 0) -> None:
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    weights = wide.view(np.float32)
    scales = np.maximum(weights.max(axis=1), -weights.min(axis=1)) / np.float32(127)
    scales[scales == 0] = 1
    with np.errstate(over="ignore"):
        out.scales[:] = scales
    bad = np.flatnonzero(~np.isfinite(out.scales))
    if bad.size:
        raise CheckpointError(
            f"{name}: row {first + bad[0]:,} has weights up to {scales[bad[0]] * 127:.3g}, which int8 cannot hold: "
            "use --trunk bf16"
        )
    weights /= scales[:, None]
    np.rint(weights, out=weights)
    np.clip(weights, -127, 127, out=weights)
    out.values[:] = weights
