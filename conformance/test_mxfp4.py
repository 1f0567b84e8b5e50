"""MXFP4 as in the specification, against a table that is written out here and shared with nothing."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from runtime.checkpoint.mxfp4 import check_scales, decode
from runtime.errors import CheckpointError

MAGNITUDES = ["0", "1/2", "1", "3/2", "2", "3", "4", "6"]
TABLE = [Fraction(m) for m in MAGNITUDES] + [-Fraction(m) for m in MAGNITUDES]


def one_group(code: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of 32 times the same code."""
    return np.full((1, 16), code | code << 4, np.uint8), np.array([[scale]], np.uint8)


@pytest.mark.parametrize("scale", range(255))
def test_every_code_at_every_scale(scale: int) -> None:
    for code, value in enumerate(TABLE):
        decoded = decode(*one_group(code, scale))
        assert decoded.shape == (1, 32)
        assert {Fraction(v) for v in decoded[0].tolist()} == {value * Fraction(2) ** (scale - 127)}
        assert np.signbit(decoded).all() == (code >= 8)  # code 8 is −0


@pytest.mark.parametrize("scale", range(1, 253))
def test_float32_is_exact_where_promised(scale: int) -> None:
    for code in range(16):
        packed = one_group(code, scale)
        assert np.array_equal(decode(*packed, np.float32).astype(np.float64), decode(*packed))


def test_the_low_nibble_is_the_even_column() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, 0] = 0x72  # columns 0 and 1
    packed[0, 15] = 0x1F  # columns 30 and 31
    decoded = decode(packed, np.array([[127]], np.uint8))[0]
    assert [decoded[i] for i in (0, 1, 2, 29, 30, 31)] == [1.0, 6.0, 0.0, 0.0, -6.0, 0.5]


def test_a_scale_covers_32_columns_of_one_row() -> None:
    packed = np.full((2, 32), 0x22, np.uint8)
    decoded = decode(packed, np.array([[127, 128], [126, 130]], np.uint8))
    assert decoded.shape == (2, 64)
    assert [set(part.tolist()) for row in decoded for part in (row[:32], row[32:])] == [{1.0}, {2.0}, {0.5}, {8.0}]


def test_scale_255_is_refused_by_name() -> None:
    scale = np.full((3, 5), 254, np.uint8)
    check_scales(scale, "w2.weight_scale")
    scale[2, 4] = 255
    with pytest.raises(CheckpointError, match=r"w2\.weight_scale: scale byte 255 .* row 2, group 4"):
        check_scales(scale, "w2.weight_scale")
    with pytest.raises(CheckpointError):
        decode(np.zeros((3, 80), np.uint8), scale)
