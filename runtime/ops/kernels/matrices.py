"""Matrix times rows: the trunk's `linear` and `embed`, and the routed expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.ops.kernels.elementary import situ
from runtime.ops.kernels.formats import BF16, F32, MXFP4, MXFP4_EDGE, SPLIT
from runtime.ops.kernels.jit import VECTORS, inline, kernel
from runtime.ops.kernels.lanes import Address, address, hold, load, pointer, store
from runtime.ops.kernels.tiles import dot_tile, largest_byte_less_two, unpack_row

_TILES: dict[str, dict[int, tuple[int, int, int, int]]] = {
    "avx512": {
        BF16: (3, 4, 8, 8),
        F32: (3, 4, 8, 8),
        SPLIT: (3, 6, 8, 8),
        MXFP4: (2, 4, 8, 4),
        MXFP4_EDGE: (1, 1, 1, 1),
    },
    "narrow": dict.fromkeys((BF16, F32, SPLIT, MXFP4, MXFP4_EDGE), (1, 1, 2, 4)),
}
"""Weight rows in a tile beside 8, 4, 2 and 1 activation rows; measured. What more registers would help has them."""
WEIGHT_ROWS = _TILES["avx512" if VECTORS == "avx512" else "narrow"]
WIDEST = 8 if VECTORS == "avx512" else 4
"""Activation rows in the widest panel."""
BAND = 24
"""Weight rows that all panels take before the next ones, so that they stay in the cache nearest to the core."""


@inline
def padded(columns: int) -> int:
    """Columns of a row in split layout."""
    return (columns + 31) // 32 * 32


@inline
def panel_rows(left: int) -> int:
    """Rows of the next panel when `left` rows are left."""
    if left >= WIDEST:
        return WIDEST
    return 4 if left >= 4 else 2 if left >= 2 else 1


@inline
def pack(x: Address, rows: int, columns: int, out: Address) -> None:
    """Put float32 rows into panels: of its rows one block each, then the next block of each, in split layout."""
    r = 0
    while r < rows:
        wide = panel_rows(rows - r)
        for i in range(wide):
            to = out + 4 * r * padded(columns) + 128 * i
            unpack_row(F32, x + 4 * (r + i) * columns, columns, to, 128 * wide)
        r += wide


def _panel(form: int, r: int) -> Any:
    """panel(...): `count` weight rows times a panel of r rows."""
    n = WEIGHT_ROWS[form][(8, 4, 2, 1).index(r)]

    @inline
    def panel(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, out: Address, step: int
    ) -> None:
        groups = columns // 32
        i = 0
        while i + n <= count:
            dot_tile(form, n, r, weight + i * stride, stride, scale + i * groups, columns, x, out + 4 * i, step)
            i += n
        while i < count:
            dot_tile(form, 1, r, weight + i * stride, stride, scale + i * groups, columns, x, out + 4 * i, step)
            i += 1

    return panel


def _matrix(form: int) -> Any:
    """matrix(...): `count` weight rows of a format times any number of rows in panels: out[r, n]."""
    widest, panel4, panel2, panel1 = _panel(form, WIDEST), _panel(form, 4), _panel(form, 2), _panel(form, 1)

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
        for first in range(0, count, BAND):
            here = min(BAND, count - first)
            w, s, to = weight + first * stride, scale + first * (columns // 32), out + 4 * first
            r = 0
            while r < rows:
                wide = panel_rows(rows - r)
                at, result = x + 4 * r * padded(columns), to + r * step
                if wide == WIDEST:
                    widest(w, stride, s, here, columns, at, result, step)
                elif WIDEST > 4 and wide == 4:
                    panel4(w, stride, s, here, columns, at, result, step)
                elif wide == 2:
                    panel2(w, stride, s, here, columns, at, result, step)
                else:
                    panel1(w, stride, s, here, columns, at, result, step)
                r += wide

    return matrix


bf16_matrix = _matrix(BF16)
f32_matrix = _matrix(F32)
split_matrix = _matrix(SPLIT)
mxfp4_matrix = _matrix(MXFP4)
bf16_panel, f32_panel, edge_panel = _panel(BF16, 1), _panel(F32, 1), _panel(MXFP4_EDGE, 1)


@kernel("void(float32[:,::1], intp, float32[:,::1], intp, intp)")
def linear_bf16(x: Any, weight: int, out: Any, first: int, last: int) -> None:
    """out[:, first:last] = x · weightᵀ for a bf16 matrix at an address."""
    rows, columns = x.shape
    split = np.empty(rows * padded(columns), np.float32)
    pack(address(x), rows, columns, address(split))
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    w = pointer(weight) + 2 * first * columns
    bf16_matrix(w, 2 * columns, w, last - first, columns, address(split), rows, start, step)
    hold(split)


@kernel("void(float32[:,::1], intp, float32[:,::1], intp, intp)")
def linear_f32(x: Any, weight: int, out: Any, first: int, last: int) -> None:
    """The same for a float32 matrix; a matrix of bf16 values gives the same bits in both forms."""
    rows, columns = x.shape
    split = np.empty(rows * padded(columns), np.float32)
    pack(address(x), rows, columns, address(split))
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    w = pointer(weight) + 4 * first * columns
    f32_matrix(w, 4 * columns, w, last - first, columns, address(split), rows, start, step)
    hold(split)


@inline
def expert_matrix(
    weight: Address,
    scale: Address,
    edge: bool,
    count: int,
    columns: int,
    x: Address,
    rows: int,
    out: Address,
    step: int,
) -> None:
    """`count` MXFP4 rows times rows in panels; one row at a time where scales lie outside 2 to 252."""
    if edge:
        edge_panel(weight, columns // 2, scale, count, columns, x, out, step)
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
    pack(address(z), rows, columns, address(split))
    both = np.empty((2, rows, count), np.float32)
    for i in range(2):
        weight = pointer(places[2 * i]) + first * columns // 2
        scale = pointer(places[2 * i + 1]) + first * (columns // 32)
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
    pack(address(hidden), rows, columns, address(split))
    w, s = pointer(weight) + first * columns // 2, pointer(scale) + first * (columns // 32)
    start, step = address(out) + 4 * first, 4 * out.shape[1]
    expert_matrix(w, s, edge, last - first, columns, address(split), rows, start, step)
    hold(split)


@kernel("boolean(intp[::1])")
def has_edge_scales(spans: Any) -> bool:
    """Is any scale byte 0, 1, 253, 254 or 255? spans: address and length, pair after pair."""
    largest = 0
    for i in range(0, spans.size, 2):
        largest = max(largest, largest_byte_less_two(pointer(spans[i]), spans[i + 1]))
    return largest > 250
