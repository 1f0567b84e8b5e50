"""Matrix times rows: the trunk's `linear` and the routed expert. The rows are put into panels once per call."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.ops.kernels.formats import BF16, F32, INT8, MXFP4, MXFP4_EDGE, SCALE_BYTES, SPLIT
from runtime.ops.kernels.jit import VECTORS, inline, kernel
from runtime.ops.kernels.lanes import Address, address, hold, pointer
from runtime.ops.kernels.tiles import dot_tile, largest_byte_less_two, unpack_row, widen_scales

PANELS = (8, 4, 2, 1)
"""Activation rows that are multiplied together: as many panels of eight as there are, then smaller ones."""

_WIDE = {BF16: (3, 4, 8, 8), F32: (3, 4, 8, 8), SPLIT: (3, 6, 8, 8), INT8: (3, 4, 8, 8), MXFP4: (2, 4, 4, 4)}
_NARROW = {BF16: (3, 4, 4, 8), F32: (3, 4, 4, 8), SPLIT: (3, 4, 4, 8), INT8: (3, 4, 4, 8), MXFP4: (1, 1, 2, 4)}
WEIGHT_ROWS = {**(_WIDE if VECTORS == "avx512" else _NARROW), MXFP4_EDGE: (1, 1, 1, 1)}
"""Weight rows in a tile beside each panel: the fastest of those measured. They cannot change a result."""
BAND = 24
"""Weight rows that all panels take before the next ones, so that they stay in the cache nearest to the core."""


@inline
def padded(columns: int) -> int:
    """Columns of a row in split layout."""
    return (columns + 31) // 32 * 32


@inline
def panel_rows(left: int) -> int:
    """Rows of the next panel when `left` rows are left."""
    return 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


def _scale_bytes(form: int) -> Any:
    """scale_bytes(columns): of the scales of one row."""
    once, each = SCALE_BYTES.get(form, (0, 0))

    @inline
    def scale_bytes(columns: int) -> int:
        return once + each * (columns // 32)

    return scale_bytes


def _tiles(form: int, r: int) -> Any:
    """tiles(...): weight rows times a panel of r rows, as many as make whole tiles; returns how many those are."""
    n, scale_bytes = WEIGHT_ROWS[form][PANELS.index(r)], _scale_bytes(form)

    @inline
    def tiles(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, out: Address, step: int
    ) -> int:
        i = 0
        while i + n <= count:
            w, s = weight + i * stride, scale + i * scale_bytes(columns)
            dot_tile(form, n, r, w, stride, s, columns, x, 128 * r, out + 4 * i, step)
            i += n
        return i

    return tiles


def _matrix(form: int) -> Any:
    """matrix(...): `count` weight rows of a format times any number of rows in panels: out[r, n]."""
    tiles8, tiles4, tiles2, tiles1 = (_tiles(form, r) for r in PANELS)
    scale_bytes = _scale_bytes(form)

    @inline
    def matrix(
        weight: Address,
        stride: int,
        scale: Address,
        count: int,
        columns: int,
        x: Address,
        rows: int,
        out: Address,
        step: int,
    ) -> None:
        row_scales = scale_bytes(columns)
        for first in range(0, count, BAND):
            here = min(BAND, count - first)
            w, s, to = weight + first * stride, scale + first * row_scales, out + 4 * first
            r = 0
            while r < rows:
                wide = panel_rows(rows - r)
                panel, result = x + 4 * r * padded(columns), to + r * step
                if wide == 8:
                    done = tiles8(w, stride, s, here, columns, panel, result, step)
                elif wide == 4:
                    done = tiles4(w, stride, s, here, columns, panel, result, step)
                elif wide == 2:
                    done = tiles2(w, stride, s, here, columns, panel, result, step)
                else:
                    done = tiles1(w, stride, s, here, columns, panel, result, step)
                for i in range(done, here):
                    for j in range(wide):
                        at, cell = panel + 128 * j, result + j * step + 4 * i
                        dot_tile(form, 1, 1, w + i * stride, 0, s + i * row_scales, columns, at, 128 * wide, cell, 0)
                r += wide

    return matrix


def _row(form: int) -> Any:
    """row(...): `count` weight rows of a format times one row in split layout."""
    tiles1, scale_bytes = _tiles(form, 1), _scale_bytes(form)

    @inline
    def row(weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, out: Address) -> None:
        done = tiles1(weight, stride, scale, count, columns, x, out, 0)
        for i in range(done, count):
            w, s = weight + i * stride, scale + i * scale_bytes(columns)
            dot_tile(form, 1, 1, w, stride, s, columns, x, 128, out + 4 * i, 0)

    return row


bf16_matrix = _matrix(BF16)
f32_matrix = _matrix(F32)
split_matrix = _matrix(SPLIT)
int8_matrix = _matrix(INT8)
mxfp4_matrix = _matrix(MXFP4)
bf16_row, f32_row, int8_row, edge_row = (_row(form) for form in (BF16, F32, INT8, MXFP4_EDGE))


@kernel("void(float32[:,::1], float32[:,::1])")
def pack(x: Any, panels: Any) -> None:
    """Put rows into panels: of a panel's rows one block each, then the next block of each, in split layout.

    panels [rows, padded(columns)] holds them one after the other; only as a whole does its shape mean anything.
    """
    rows, columns = x.shape
    r = 0
    while r < rows:
        wide = panel_rows(rows - r)
        for i in range(wide):
            to = address(panels) + 4 * r * padded(columns) + 128 * i
            unpack_row(F32, address(x) + 4 * (r + i) * columns, columns, to, 128 * wide)
        r += wide


@kernel("void(float32[:,::1], intp, intp, float32[:,::1], intp, intp)")
def linear_bf16(panels: Any, columns: int, weight: int, out: Any, first: int, last: int) -> None:
    """out[:, first:last] = x · weightᵀ for x in panels and a bf16 matrix of so many columns at an address."""
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    w = pointer(weight) + 2 * first * columns
    bf16_matrix(w, 2 * columns, w, last - first, columns, address(panels), panels.shape[0], start, step)


@kernel("void(float32[:,::1], intp, intp, float32[:,::1], intp, intp)")
def linear_f32(panels: Any, columns: int, weight: int, out: Any, first: int, last: int) -> None:
    """The same for a float32 matrix; a matrix of bf16 values gives the same bits in both forms."""
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    w = pointer(weight) + 4 * first * columns
    f32_matrix(w, 4 * columns, w, last - first, columns, address(panels), panels.shape[0], start, step)


@kernel("void(float32[:,::1], intp, intp, intp, float32[:,::1], intp, intp)")
def linear_int8(panels: Any, columns: int, weight: int, scale: int, out: Any, first: int, last: int) -> None:
    """The same for an int8 matrix and the float32 scales of its rows: the bits of the float32 matrix int8 · scale."""
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    w, s = pointer(weight) + first * columns, pointer(scale) + 4 * first
    int8_matrix(w, columns, s, last - first, columns, address(panels), panels.shape[0], start, step)


@kernel("void(float32[:,::1], intp, intp, boolean, float32[:,::1], intp, intp)")
def linear_mxfp4(panels: Any, weight: int, scale: int, edge: bool, out: Any, first: int, last: int) -> None:
    """The same for an MXFP4 matrix; `edge`: with scale bytes outside 2 to 252, then x has one row.

    Scales are widened a band at a time: that pays from the first row on, and a band's stay in the nearest cache.
    """
    rows, columns = panels.shape
    w, s, groups = pointer(weight), pointer(scale), columns // 32
    start, step, stride = address(out), 4 * out.shape[1], columns // 2
    if edge:
        w, s, to = w + first * stride, s + first * groups, start + 4 * first
        edge_row(w, stride, s, last - first, columns, address(panels), to)
        return
    scales = np.empty(BAND * groups + 15, np.float32)
    for i in range(first, last, BAND):
        here = min(BAND, last - i)
        widen_scales(s + i * groups, here * groups, address(scales))
        to = start + 4 * i
        mxfp4_matrix(w + i * stride, stride, address(scales), here, columns, address(panels), rows, to, step)
    hold(scales)


@kernel("boolean(intp, intp, intp, intp, intp, intp)")
def has_edge_scales(a: int, a_bytes: int, b: int, b_bytes: int, c: int, c_bytes: int) -> bool:
    """Is any scale byte in these three spans 0, 1, 253, 254 or 255?"""
    largest = 0
    for place, n_bytes in ((a, a_bytes), (b, b_bytes), (c, c_bytes)):
        largest = max(largest, largest_byte_less_two(pointer(place), n_bytes))
    return largest > 250
