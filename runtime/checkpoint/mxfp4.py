"""MXFP4, the released format of the routed experts: 4-bit E2M1 codes with one E8M0 scale per 32 columns.

Element (row o, column i) of a matrix [out, in]: the byte is packed[o, i // 2], the code its low nibble when i is
even and its high nibble when i is odd; value = E2M1[code] · 2^(scale[o, i // 32] − 127). There is no zero point
and no global scale. (Kimi K3 specification 2.5; OCP Microscaling Formats 1.0.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.config import MXFP4_GROUP
from runtime.errors import CheckpointError

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
"""The value of each code; bit 3 is the sign."""

SCALE_NAN = 255
"""The scale byte that stands for NaN in the OCP format. It must not occur in weights."""

Bytes = npt.NDArray[np.uint8]


class PackedExpert(NamedTuple):
    """One routed expert as released, in the order its tensors have on disk. Latent width Z, expert width I.

    w1 (gate) and w3 (up) are [I, Z/2] codes and [I, Z/32] scales, w2 (down) is [Z, I/2] and [Z, I/32].
    """

    w1_packed: Bytes
    w1_scale: Bytes
    w2_packed: Bytes
    w2_scale: Bytes
    w3_packed: Bytes
    w3_scale: Bytes


def decode(packed: Bytes, scale: Bytes, dtype: Any = np.float64) -> npt.NDArray[Any]:
    """The matrix [out, in] of packed [out, in/2] and scale [out, in/32].

    Exact in float64 for every code and scale, and in float32 for scales 1 to 252.
    Raises CheckpointError for scale 255 (NaN).
    """
    check_scales(scale)
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    values = E2M1[codes].reshape(codes.shape[0], -1, MXFP4_GROUP)
    exponents = scale.astype(np.int32) - 127
    return np.ldexp(values, exponents[:, :, None]).reshape(codes.shape).astype(dtype, copy=False)


def check_scales(scale: Bytes, name: str = "MXFP4 scale") -> None:
    """Raise CheckpointError when a scale byte is 255, naming the tensor and the place."""
    if scale.size and int(scale.max()) == SCALE_NAN:
        row, group = (int(i) for i in np.argwhere(scale == SCALE_NAN)[0])
        raise CheckpointError(
            f"{name}: scale byte 255 (NaN) at row {row}, group {group}; no released weight has it, "
            "so this file is damaged: fetch it again"
        )
