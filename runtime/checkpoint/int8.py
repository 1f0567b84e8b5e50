"""The int8 form of a trunk matrix: not in a checkpoint, made of its bf16 where `--trunk int8` asks for it.

Per output row: s = largest magnitude / 127 in float32, 1 for a row of zeros; value = weight / s, rounded half to even,
within ±127. s is kept as float16, and a weight then counts as int8 · float16, which float32 holds exactly. These are
the numbers of the int8 trunks that are in use elsewhere. The weights are no longer the released ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.errors import CheckpointError


class Int8Matrix(NamedTuple):
    """values int8 [out, in], scales float16 [out]."""

    values: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]


def quantize(bits: npt.NDArray[np.uint16], out: Int8Matrix, name: str, first: int = 0) -> None:
    """Write bf16 rows [n, in] into the n rows of `out`. Takes 8 bytes an element meanwhile.

    Raises CheckpointError, naming the tensor and its row (`first` is that of the first one), for what int8 cannot hold:
    a weight that is no number, or a scale past float16.
    """
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
