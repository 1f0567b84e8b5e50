"""Matrix times rows: the trunk's `linear` and `embed`, and the routed expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.ops.kernels.elementary import situ
from runtime.ops.kernels.formats import BF16, F32, MXFP4, MXFP4_EDGE, SPLIT
from runtime.ops.kernels.jit import inline, kernel
from runtime.ops.kernels.lanes import address, hold, load, store
from runtime.ops.kernels.tiles import dot_tile, largest_byte_less_two, unpack_row

FEW = 4
"""Up to so many rows each weight is decoded in registers per row tile; above, once into a buffer."""


@inline
def padded(columns: int) -> int:
    """Columns of a row in split layout."""
    return (columns + 31) // 32 * 32


@inline
def split_rows(x: int, rows: int, columns: int, out: int) -> None:
    """Put float32 rows into split layout."""
    for r in range(rows):
        unpack_row(F32, x + 4 * r * columns, 0, columns, out + 4 * r * padded(columns))


def _dots(form: int, n: int) -> Any:
    """dots(...): n weight rows times any number of activation rows, in tiles of 4, 2 and 1."""

    @inline
    def dots(weight: int, stride: int, scale: int, columns: int, x: int, rows: int, out: int, step: int) -> None:
        row_bytes = 4 * padded(columns)
        r = 0
        while r + 4 <= rows:
            dot_tile(form, n, 4, weight, stride, scale, columns, x + r * row_bytes, out + r * step, step)
            r += 4
        while r + 2 <= rows:
            dot_tile(form, n, 2, weight, stride, scale, columns, x + r * row_bytes, out + r * step, step)
            r += 2
        if r < rows:
            dot_tile(form, n, 1, weight, stride, scale, columns, x + r * row_bytes, out + r * step, step)

    return dots


split_dots4 = _dots(SPLIT, 4)
split_dots1 = _dots(SPLIT, 1)


@inline
def split_matrix(weight: int, count: int, columns: int, x: int, rows: int, out: int, step: int) -> None:
    """`count` rows in split layout times `rows` rows: out[r, n]."""
    stride = 4 * padded(columns)
    n = 0
    while n + 4 <= count:
        split_dots4(weight + n * stride, stride, 0, columns, x, rows, out + 4 * n, step)
        n += 4
    while n < count:
        split_dots1(weight + n * stride, stride, 0, columns, x, rows, out + 4 * n, step)
        n += 1


def _matrix(form: int) -> Any:
    """matrix(...): `count` weight rows of a format times any number of rows in split layout."""
    dots4, dots1 = _dots(form, 4), _dots(form, 1)

    @inline
    def matrix(
        weight: int, stride: int, scale: int, count: int, columns: int, x: int, rows: int, out: int, step: int
    ) -> None:
        groups = columns // 32
        n = 0
        if rows > FEW:
            width = padded(columns)
            buffer = np.empty(4 * width, np.float32)
            decoded = address(buffer)
            while n < count:
                here = min(4, count - n)
                for i in range(here):
                    unpack_row(
                        form, weight + (n + i) * stride, scale + (n + i) * groups, columns, decoded + 4 * i * width
                    )
                split_matrix(decoded, here, width, x, rows, out + 4 * n, step)
                n += here
            hold(buffer)
            return
        if rows == 1:
            while n + 8 <= count:
                dot_tile(form, 8, 1, weight + n * stride, stride, scale + n * groups, columns, x, out + 4 * n, step)
                n += 8
        while n + 4 <= count:
            dots4(weight + n * stride, stride, scale + n * groups, columns, x, rows, out + 4 * n, step)
            n += 4
        while n < count:
            dots1(weight + n * stride, stride, scale + n * groups, columns, x, rows, out + 4 * n, step)
            n += 1

    return matrix


bf16_matrix = _matrix(BF16)
f32_matrix = _matrix(F32)
mxfp4_matrix = _matrix(MXFP4)


@kernel("void(float32[:,::1], intp, float32[:,::1], intp, intp)")
def linear_bf16(x: Any, weight: int, out: Any, first: int, last: int) -> None:
    """out[:, first:last] = x · weightᵀ for a bf16 matrix at an address."""
    rows, columns = x.shape
    split = np.empty(rows * padded(columns), np.float32)
    split_rows(address(x), rows, columns, address(split))
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    bf16_matrix(weight + 2 * first * columns, 2 * columns, 0, last - first, columns, address(split), rows, start, step)
    hold(split)


@kernel("void(float32[:,::1], intp, float32[:,::1], intp, intp)")
def linear_f32(x: Any, weight: int, out: Any, first: int, last: int) -> None:
    """The same for a float32 matrix; a matrix of bf16 values gives the same bits in both forms."""
    rows, columns = x.shape
    split = np.empty(rows * padded(columns), np.float32)
    split_rows(address(x), rows, columns, address(split))
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    f32_matrix(weight + 4 * first * columns, 4 * columns, 0, last - first, columns, address(split), rows, start, step)
    hold(split)


@inline
def edge_matrix(weight: int, scale: int, count: int, columns: int, x: int, rows: int, out: int, step: int) -> None:
    """MXFP4 with scales outside 2 to 252: one row at a time."""
    for r in range(rows):
        for n in range(count):
            at = weight + n * columns // 2
            dot_tile(
                MXFP4_EDGE, 1, 1, at, 0, scale + n * (columns // 32), columns,
                x + 4 * r * columns, out + r * step + 4 * n, step,
            )  # fmt: skip


@inline
def expert_matrix(
    weight: int, scale: int, edge: bool, count: int, columns: int, x: int, rows: int, out: int, step: int
) -> None:
    """`count` MXFP4 rows times rows in split layout."""
    if edge:
        edge_matrix(weight, scale, count, columns, x, rows, out, step)
    else:
        mxfp4_matrix(weight, columns // 2, scale, count, columns, x, rows, out, step)


@kernel("void(float32[:,::1], intp[::1], boolean, float64, float64, float32[:,::1], intp, intp)")
def expert_up(
    z: Any, places: Any, edge: bool, beta: float, linear_beta: float, hidden: Any, first: int, last: int
) -> None:
    """hidden[:, first:last] = SiTU(z · w1ᵀ, z · w3ᵀ); places: addresses of w1, its scales, w3, its scales."""
    rows, columns = z.shape
    count = last - first
    split = np.empty(rows * columns, np.float32)
    split_rows(address(z), rows, columns, address(split))
    both = np.empty((2, rows, count), np.float32)
    for i in range(2):
        weight = places[2 * i] + first * columns // 2
        scale = places[2 * i + 1] + first * (columns // 32)
        out = address(both) + 4 * i * rows * count
        expert_matrix(weight, scale, edge, count, columns, address(split), rows, out, 4 * count)
    hold(split)
    for r in range(rows):
        g = address(both) + 4 * r * count
        u = g + 4 * rows * count
        out = address(hidden) + 4 * (r * hidden.shape[1] + first)
        for i in range(0, count, 16):
            n = count - i
            store(out + 4 * i, n, situ(load(g + 4 * i, n), load(u + 4 * i, n), beta, linear_beta))
    hold(both)


@kernel("void(float32[:,::1], intp, intp, boolean, float32[:,::1], intp, intp)")
def expert_down(hidden: Any, weight: int, scale: int, edge: bool, out: Any, first: int, last: int) -> None:
    """out[:, first:last] = hidden · w2ᵀ."""
    rows, columns = hidden.shape
    split = np.empty(rows * columns, np.float32)
    split_rows(address(hidden), rows, columns, address(split))
    weight, scale = weight + first * columns // 2, scale + first * (columns // 32)
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    expert_matrix(weight, scale, edge, last - first, columns, address(split), rows, start, step)
    hold(split)


@kernel("boolean(intp[::1])")
def has_edge_scales(spans: Any) -> bool:
    """Is any scale byte 0, 1, 253, 254 or 255? spans: address and length, pair after pair."""
    largest = 0
    for i in range(0, spans.size, 2):
        largest = max(largest, largest_byte_less_two(spans[i], spans[i + 1]))
    return largest > 250
