"""Matrix times rows: the trunk's `linear` and the routed expert. The rows are put into panels once per call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from runtime.ops.kernels.formats import BF16, F32, FORMATS, INT8, MXFP4, MXFP4_EDGE, SCALE_BYTES, SPLIT
from runtime.ops.kernels.jit import inline, kernel, shared
from runtime.ops.kernels.lanes import Address, address, hold, lanes, load, pointer, store, total
from runtime.ops.kernels.shapes import SHAPES
from runtime.ops.kernels.tiles import dot_tile, largest_byte_less_two, pair_row, stage_tile, unpack_row, widen_scales

BAND = 24
"""Weight rows that all panels take before the next ones, so that they stay in the cache nearest to the core."""
STAGE, CHUNK_BYTES = 12, 768
"""Weight rows, and bytes of each, that are decoded before they are used: 9 KiB, which that cache holds beside two
panels of 3 or 6 KiB and the weights that come."""
STAGED, STAGED_FROM = SHAPES.staged_from is not None, SHAPES.staged_from or 0
SPAN, AT_ONCE = (48, 64) if STAGED else (BAND, 0)
"""Weight rows and activation rows that are done with before others are begun: the lanes of their chains, 192 KiB, stay
in the second cache."""
PANELS_BYTES = 2 << 20
"""Of activation rows that are done with before others are begun, where weights are decoded as they are used: such rows
stay in the last cache, of which others have their share; 512 rows took a quarter longer without."""
WIDEST, SECOND = SHAPES.panels[:2]


def stage_nbytes(rows: int) -> int:
    """What a call takes in each thread beside its arguments: a stage, and the lanes of a span's chains."""
    return STAGE * CHUNK_BYTES + 64 * SPAN * min(rows, AT_ONCE) if STAGED else 0


@inline
def padded(columns: int) -> int:
    """Columns of a row in split layout."""
    return (columns + 31) // 32 * 32


@inline
def rows_at_once(columns: int) -> int:
    """Activation rows in PANELS_BYTES, and two panels at least."""
    panel_bytes: int = 4 * WIDEST * padded(columns)
    return max(2, PANELS_BYTES // panel_bytes) * WIDEST


@inline
def panel_rows(left: int, rows: int) -> int:
    """Rows of the next panel when `left` of `rows` rows are left."""
    if rows >= STAGED_FROM and left >= WIDEST:
        return WIDEST
    return SECOND if left >= SECOND else 2 if left >= 2 else 1


def _scale_bytes(form: int) -> Any:
    """scale_bytes(columns): of the scales of one row."""
    once, each = SCALE_BYTES.get(form, (0, 0))

    @inline
    def scale_bytes(columns: int) -> int:
        return once + each * (columns // 32)

    return scale_bytes


def _by_width(panels: tuple[int, ...], tiles: Callable[[int], Any]) -> Any:
    """call(wide, arguments): tiles(r)(arguments) of the panel width r, one of `panels`, that is asked for."""
    r, here = panels[0], tiles(panels[0])
    others = _by_width(panels[1:], tiles) if len(panels) > 1 else here

    @inline
    def last(wide: int, arguments: Any) -> Any:
        return here(arguments)

    @inline
    def either(wide: int, arguments: Any) -> Any:
        return here(arguments) if wide == r else others(wide, arguments)

    return either if len(panels) > 1 else last


def _tiles(form: int, r: int) -> Any:
    """tiles(...): weight rows times a panel of r rows, as many as make whole tiles; returns how many those are."""
    n, scale_bytes = SHAPES.weight_rows[form][SHAPES.panels[::-1].index(r)], _scale_bytes(form)

    @inline
    def tiles(arguments: Any) -> int:
        weight, stride, scale, count, columns, x, out, step = arguments
        i = 0
        while i + n <= count:
            w, s = weight + i * stride, scale + i * scale_bytes(columns)
            dot_tile(form, n, r, w, stride, s, columns, x, 128 * r, out + 4 * i, step)
            i += n
        return i

    return tiles


def _decoding(form: int) -> Any:
    """matrix(...): each weight is decoded where it is used, once for every panel."""
    tiles = _by_width(SHAPES.panels[STAGED:], partial(_tiles, form))
    scale_bytes = _scale_bytes(form)

    @inline
    def some(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, rows: int, out: Address,
        step: int,
    ) -> None:  # fmt: skip
        row_scales = scale_bytes(columns)
        for first in range(0, count, BAND):
            here = min(BAND, count - first)
            w, s, to = weight + first * stride, scale + first * row_scales, out + 4 * first
            r = 0
            while r < rows:
                wide = panel_rows(rows - r, rows)
                panel, result = x + 4 * r * padded(columns), to + r * step
                done = tiles(wide, (w, stride, s, here, columns, panel, result, step))
                for i in range(done, here):
                    for j in range(wide):
                        at, cell = panel + 128 * j, result + j * step + 4 * i
                        dot_tile(form, 1, 1, w + i * stride, 0, s + i * row_scales, columns, at, 128 * wide, cell, 0)
                r += wide

    @inline
    def decoding(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, rows: int, out: Address,
        step: int,
    ) -> None:  # fmt: skip
        many = rows_at_once(columns)
        for r in range(0, rows, many):
            panels = x + 4 * r * padded(columns)
            some(weight, stride, scale, count, columns, panels, min(many, rows - r), out + r * step, step)

    return decoding


def _stage_tiles(form: int, r: int) -> Any:
    """tiles(...): take the chains of a stage of a format and a panel of r rows on, over some blocks."""
    n, block_bytes = min(STAGE, SHAPES.accumulators // r), FORMATS[form].block_bytes
    parts = 16 // SHAPES.lanes

    @inline
    def tiles(arguments: Any) -> None:
        stage, blocks, x, sums, soon, coming, row, step = arguments
        for i in range(0, STAGE, n):
            w, to, before = stage + block_bytes * i, sums + 64 * i, i // n * parts
            a, b = soon + 64 * before, coming + before * row
            stage_tile(form, n, r, w, block_bytes * STAGE, blocks, x, to, 64 * SPAN, a, b, row, step)

    return tiles


def _take_on(form: int) -> Any:
    """take_on(...): for stages of a format."""
    stage_tiles = _by_width(SHAPES.panels, partial(_stage_tiles, form))

    @shared
    def take_on(
        stage: Address, blocks: int, x: Address, before: int, columns: int, rows: int, sums: Address, coming: Address,
        stride: int, coming_bytes: int,
    ) -> None:  # fmt: skip
        """Take the chains of a stage and all panels of rows on, over some blocks with `before` columns before them.

        coming: the weights of the stage after this one, `coming_bytes` of a row every `stride`. They are fetched
        meanwhile, two rows beside each activation row.
        """
        r, step = 0, coming_bytes // blocks
        while r < rows:
            wide = panel_rows(rows - r, STAGED_FROM)
            panel = x + (4 * r * padded(columns) + 4 * wide * before)
            soon, to, more = panel + 4 * wide * padded(columns), sums + 64 * SPAN * r, 2 * r < STAGE
            at = coming + 2 * r * stride if more else stage
            stage_tiles(wide, (stage, blocks, panel, to, soon, at, stride if more else 0, step))
            r += wide

    return take_on


_TAKE_ON = {form: _take_on(form) for form in sorted({SPLIT, *SHAPES.staged_as.values()})}


@shared
def begin_chains(sums: Address, rows: int) -> None:
    """Nothing yet, in the lanes of a span's chains with so many activation rows."""
    for i in range(rows * SPAN):
        store(sums + 64 * i, 16, lanes(np.float32(0.0)))


@shared
def end_chains(sums: Address, rows: int, count: int, out: Address, step: int) -> None:
    """out[r, i] = the lanes of each chain together."""
    for r in range(rows):
        for i in range(count):
            store(out + (r * step + 4 * i), 1, lanes(total(load(sums + 64 * (SPAN * r + i), 16))))


def _decode(form: int) -> Any:
    """decode(...): fill a stage with `blocks` blocks of weight rows; where there are fewer rows, the last one again."""
    scale_bytes, block_bytes = _scale_bytes(form), FORMATS[form].block_bytes
    _, block_scales = SCALE_BYTES.get(form, (0, 0))
    stage_form = SHAPES.staged_as.get(form, SPLIT)
    unpack, to_bytes = pair_row if stage_form == BF16 else unpack_row, FORMATS[stage_form].block_bytes

    @inline
    def decode(
        weight: Address, stride: int, scale: Address, count: int, columns: int, before: int, blocks: int, stage: Address
    ) -> None:
        here = min(32 * blocks, columns - 32 * before)
        for i in range(STAGE):
            row = min(i, count - 1)
            w = weight + (row * stride + before * block_bytes)
            s = scale + (row * scale_bytes(columns) + before * block_scales)
            unpack(form, w, s, here, stage + to_bytes * i, to_bytes * STAGE)

    return decode


def _staged(form: int) -> Any:
    """matrix(...): each weight is decoded once for up to `AT_ONCE` rows, a stage at a time.

    A chunk of columns of the activations goes on to every stage of a span; the chains wait in memory meanwhile.
    """
    decode, scale_bytes, block_bytes = _decode(form), _scale_bytes(form), FORMATS[form].block_bytes
    stage_form = SHAPES.staged_as.get(form, SPLIT)
    take_on, most = _TAKE_ON[stage_form], CHUNK_BYTES // FORMATS[stage_form].block_bytes

    @inline
    def staged(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, rows: int, out: Address,
        step: int,
    ) -> None:  # fmt: skip
        stages = np.empty((STAGE, CHUNK_BYTES), np.uint8)
        chains = np.empty((min(rows, AT_ONCE), SPAN, 16), np.float32)
        stage, sums = address(stages), address(chains)
        blocks = padded(columns) // 32
        chunks = (blocks + most - 1) // most
        chunk = (blocks + chunks - 1) // chunks
        for first in range(0, count, SPAN):
            last = min(first + SPAN, count)
            for r in range(0, rows, AT_ONCE):
                many, panels = min(AT_ONCE, rows - r), x + 4 * r * padded(columns)
                begin_chains(sums, many)
                for b in range(0, blocks, chunk):
                    n = min(chunk, blocks - b)
                    for i in range(first, last, STAGE):
                        w, s = weight + i * stride, scale + i * scale_bytes(columns)
                        decode(w, stride, s, last - i, columns, b, n, stage)
                        if i + STAGE < last:
                            coming = w + (STAGE * stride + b * block_bytes)
                        else:
                            coming = weight + (first * stride + (b + n) * block_bytes)
                        to = sums + 64 * (i - first)
                        take_on(stage, n, panels, 32 * b, columns, many, to, coming, stride, n * block_bytes)
                end_chains(sums, many, last - first, out + (r * step + 4 * first), step)
        hold(stages)
        hold(chains)

    return staged


def _matrix(form: int) -> Any:
    """matrix(...): `count` weight rows of a format times any number of rows in panels: out[r, n]."""
    decoding = _decoding(form)
    if not STAGED:
        return decoding
    staged = _staged(form)

    @inline
    def matrix(
        weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, rows: int, out: Address,
        step: int,
    ) -> None:  # fmt: skip
        if rows >= STAGED_FROM:
            staged(weight, stride, scale, count, columns, x, rows, out, step)
        else:
            decoding(weight, stride, scale, count, columns, x, rows, out, step)

    return matrix


def _row(form: int) -> Any:
    """row(...): `count` weight rows of a format times one row in split layout."""
    tiles1, scale_bytes = _tiles(form, 1), _scale_bytes(form)

    @inline
    def row(weight: Address, stride: int, scale: Address, count: int, columns: int, x: Address, out: Address) -> None:
        done = tiles1((weight, stride, scale, count, columns, x, out, 0))
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
        wide = panel_rows(rows - r, rows)
        for i in range(wide):
            to = address(panels) + 4 * r * padded(columns) + 128 * i
            row = address(x) + 4 * (r + i) * columns
            unpack_row(F32, row, row, columns, to, 128 * wide)
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

    Scales are widened a span at a time: that pays from the first row on, and a span's stay in the nearest cache.
    """
    rows, columns = panels.shape
    w, s, groups = pointer(weight), pointer(scale), columns // 32
    start, step, stride = address(out), 4 * out.shape[1], columns // 2
    if edge:
        w, s, to = w + first * stride, s + first * groups, start + 4 * first
        edge_row(w, stride, s, last - first, columns, address(panels), to)
        return
    scales = np.empty(SPAN * groups + 15, np.float32)
    for i in range(first, last, SPAN):
        here = min(SPAN, last - i)
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
