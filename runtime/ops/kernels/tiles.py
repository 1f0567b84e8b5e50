"""The two inner loops of all matrix work, written out for a tile of rows: dot products and weighted sums of rows.

Every result has its own chain of fused multiply-adds in one order, so the size of the tile it was computed in, and
with it the number of rows and threads, cannot change its bits.

* dot: 16 lanes; per block of 32 columns the even columns, then the odd ones; then a fixed tree over the lanes.
* mix: per column one chain over the rows, first row first, then added to what was there.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import signature
from numba.extending import intrinsic as numba_intrinsic

from runtime.ops.kernels.formats import (
    BF16,
    BLOCK,
    FORMATS,
    SCALE_BYTES,
    Format,
    Pair,
    PairedFormat,
    RaggedFormat,
    RaggedPairedFormat,
    widen,
)
from runtime.ops.kernels.lanes import (
    BYTES,
    F32X16,
    I32X16,
    another,
    call,
    constant,
    fused,
    offset,
    pointer_type,
    prefetch,
    read,
    read_some,
    splat,
    tree_sum,
    write,
)
from runtime.ops.kernels.shapes import SHAPES

_INT = ir.IntType(64)
_SPLIT_BLOCK_BYTES = 4 * BLOCK


def _intrinsic(function: Any) -> Any:
    return numba_intrinsic(prefer_literal=True)(function)


def _signature(*arguments: Any) -> Any:
    """void(arguments ...); the last one spells the rest: p for a pointer, n for an integer."""
    rest = [{"p": pointer_type, "n": types.intp}[letter] for letter in arguments[-1]]
    return signature(types.void, *arguments[:-1], *rest)


def _literals(*kinds: Any) -> bool:
    return all(isinstance(kind, types.IntegerLiteral) for kind in kinds)


def _zeros(builder: ir.IRBuilder, count: int) -> list[ir.Value]:
    """Accumulators, which LLVM keeps in registers."""
    sums = [cgutils.alloca_once(builder, F32X16) for _ in range(count)]
    for place_of_sum in sums:
        builder.store(ir.Constant(F32X16, None), place_of_sum)
    return sums


def _accumulate(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> None:
    builder.store(fused(builder, a, b, builder.load(total)), total)


@contextmanager
def _blocks(builder: ir.IRBuilder, count: ir.Value) -> Iterator[ir.Value]:
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


@_intrinsic
def dot_tile(
    typing: Any, form: Any, n: Any, r: Any, weight: Any, stride: Any, scale: Any, columns: Any, x: Any, x_step: Any,
    out: Any, step: Any,
) -> Any:  # fmt: skip
    """n weight rows times r activation rows: out[r, n].

    weight: the first row, the next one `stride` bytes behind; scale: its scales, as the format has them.
    x: the first block of each of the r rows in split layout; `x_step` bytes behind, their second blocks; and so on.
    out: the next row of results `step` bytes behind.
    """
    if not _literals(form, n, r):
        return None
    decoder = FORMATS[form.literal_value]
    rows, activations = n.literal_value, r.literal_value
    reload = form.literal_value == BF16 and SHAPES.lanes < 16

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        weight, stride, scale, columns, x, x_step, out, step = args[3:]
        blocks = builder.sdiv(columns, _INT(BLOCK))
        rest = builder.srem(columns, _INT(BLOCK))
        w_rows = [offset(builder, weight, i, stride) for i in range(rows)]
        once, each = (_INT(n) for n in SCALE_BYTES.get(form.literal_value, (0, 0)))
        scale_bytes = builder.add(once, builder.mul(each, blocks))
        scales = [offset(builder, scale, i, scale_bytes) for i in range(rows)]
        x_rows = [offset(builder, x, j, _SPLIT_BLOCK_BYTES) for j in range(activations)]
        sums = _zeros(builder, rows * activations)

        again = [another(builder, row) for row in w_rows] if reload else w_rows

        def multiply(decode: Callable[[ir.Value, ir.Value], Pair], block: ir.Value) -> None:
            factors = _factors(builder, decoder, scales, block)
            pairs = [decode(*row) for row in zip(w_rows, scales, strict=True)]
            for parity in (0, 1):
                if parity and reload:
                    pairs = [decode(*row) for row in zip(again, scales, strict=True)]
                for j, x_row in enumerate(x_rows):
                    value = read(builder, offset(builder, offset(builder, x_row, block, x_step), parity, 64), F32X16)
                    for i, pair in enumerate(pairs):
                        scaled = builder.fmul(value, factors[i]) if factors else value
                        _accumulate(builder, sums[j * rows + i], pair[parity], scaled)

        with _blocks(builder, blocks) as block:
            for row in w_rows:  # the same block of the next tile: rows are too short for the CPU to foresee them
                prefetch(builder, offset(builder, offset(builder, row, block, decoder.block_bytes), stride, rows))
            multiply(lambda row, scale: decoder.block(builder, row, scale, block), block)
        if isinstance(decoder, RaggedFormat):
            with builder.if_then(builder.icmp_signed(">", rest, _INT(0)), likely=False):
                multiply(lambda row, scale: decoder.tail(builder, row, scale, blocks, rest), blocks)
        for j in range(activations):
            for i in range(rows):
                result = tree_sum(builder, builder.load(sums[j * rows + i]))
                write(builder, result, offset(builder, offset(builder, out, j, step), i, 4))
        return context.get_dummy_value()

    return _signature(form, n, r, "pnpnpnpn"), codegen


def _factors(builder: ir.IRBuilder, decoder: Format, scales: list[ir.Value], block: ir.Value) -> list[ir.Value]:
    factor = getattr(decoder, "activation_factor", None)
    return [factor(builder, scale, block) for scale in scales] if factor else []


@_intrinsic
def stage_tile(
    typing: Any, form: Any, n: Any, r: Any, weight: Any, w_step: Any, blocks: Any, x: Any, sums: Any, step: Any,
    soon: Any, coming: Any, coming_row: Any, coming_step: Any,
) -> Any:  # fmt: skip
    """Take the chains of n weight rows times a panel of r activation rows on, over some blocks: sums[r, n, 16 lanes].

    weight: the first block of each row, in BF16 or SPLIT; `w_step` bytes behind, the second blocks.
    x: the first block of each row, in split layout; behind these r, the second blocks.
    sums: the next activation row's `step` bytes behind. Beside each block and part, a line of the panel `soon` is
    fetched, and what lies at `coming`: each part has a row, each block `coming_step` bytes of it.
    The lanes of one register go through all blocks, then those of the next: so more rows have room in the registers.
    """
    if not _literals(form, n, r):
        return None
    rows, activations = n.literal_value, r.literal_value
    paired, block_bytes = form.literal_value == BF16, FORMATS[form.literal_value].block_bytes
    part_bytes = 4 * SHAPES.lanes

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        weight, w_step, blocks, x, sums, step, soon, coming, coming_row, coming_step = args[3:]
        register, pairs = (ir.VectorType(kind, SHAPES.lanes) for kind in (ir.FloatType(), ir.IntType(32)))
        weights = weight, another(builder, weight) if paired else weight  # no register has room for both columns
        x_step = activations * _SPLIT_BLOCK_BYTES

        def weight_at(block: ir.Value, i: int, at: int, parity: int) -> ir.Value:
            first = offset(builder, offset(builder, weights[parity], block, w_step), i * block_bytes + at)
            if paired:
                return widen(builder, read(builder, first, pairs), parity)
            return read(builder, offset(builder, first, 64 * parity), register)

        def given_at(block: ir.Value, j: int, at: int, parity: int) -> ir.Value:
            first = offset(builder, x, block, x_step)
            return read(builder, offset(builder, first, j * _SPLIT_BLOCK_BYTES + 64 * parity + at), register)

        for part in range(64 // part_bytes):
            places = [
                offset(builder, offset(builder, sums, j, step), 64 * i + part * part_bytes)
                for j in range(activations)
                for i in range(rows)
            ]
            chains = [cgutils.alloca_once_value(builder, read(builder, place, register)) for place in places]
            with _blocks(builder, blocks) as block:
                prefetch(builder, offset(builder, offset(builder, soon, block, x_step), 64 * part), True)
                prefetch(builder, offset(builder, offset(builder, coming, block, coming_step), part, coming_row), True)
                for parity in (0, 1):
                    here = part * part_bytes, parity
                    if rows <= activations:  # the fewer are held, the others pass by
                        held = [weight_at(block, i, *here) for i in range(rows)]
                        for j in range(activations):
                            value = given_at(block, j, *here)
                            for i in range(rows):
                                _accumulate(builder, chains[j * rows + i], held[i], value)
                    else:
                        held = [given_at(block, j, *here) for j in range(activations)]
                        for i in range(rows):
                            value = weight_at(block, i, *here)
                            for j in range(activations):
                                _accumulate(builder, chains[j * rows + i], value, held[j])
            for place, chain in zip(places, chains, strict=True):
                write(builder, builder.load(chain), place)
        return context.get_dummy_value()

    return _signature(form, n, r, "pnnppnppnn"), codegen


@_intrinsic
def unpack_row(typing: Any, form: Any, weight: Any, scale: Any, columns: Any, out: Any, step: Any) -> Any:
    """Write one row in split layout, zeros up to a multiple of 32 columns, a block every `step` bytes.

    scale: of its first block, where the format has them.
    """
    if not _literals(form):
        return None
    decoder = FORMATS[form.literal_value]

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        weight, scale, columns, out, step = args[1:]
        blocks = builder.sdiv(columns, _INT(BLOCK))
        rest = builder.srem(columns, _INT(BLOCK))

        def put(pair: Any, block: ir.Value) -> None:
            for parity in (0, 1):
                write(builder, pair[parity], offset(builder, offset(builder, out, block, step), parity, 64))

        with _blocks(builder, blocks) as block:
            put(decoder.block(builder, weight, scale, block), block)
        if isinstance(decoder, RaggedFormat):
            with builder.if_then(builder.icmp_signed(">", rest, _INT(0)), likely=False):
                put(decoder.tail(builder, weight, scale, blocks, rest), blocks)
        return context.get_dummy_value()

    return _signature(form, "ppnpn"), codegen


@_intrinsic
def pair_row(typing: Any, form: Any, weight: Any, scale: Any, columns: Any, out: Any, step: Any) -> Any:
    """The same in BF16, for formats whose values are bf16."""
    if not _literals(form):
        return None
    decoder = FORMATS[form.literal_value]
    assert isinstance(decoder, PairedFormat)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        weight, scale, columns, out, step = args[1:]
        blocks = builder.sdiv(columns, _INT(BLOCK))
        rest = builder.srem(columns, _INT(BLOCK))
        with _blocks(builder, blocks) as block:
            write(builder, decoder.pairs(builder, weight, scale, block), offset(builder, out, block, step))
        if isinstance(decoder, RaggedPairedFormat):
            with builder.if_then(builder.icmp_signed(">", rest, _INT(0)), likely=False):
                last = decoder.pairs_tail(builder, weight, scale, blocks, rest)
                write(builder, last, offset(builder, out, blocks, step))
        return context.get_dummy_value()

    return _signature(form, "ppnpn"), codegen


@_intrinsic
def mix_tile(
    typing: Any, form: Any, m: Any, weight: Any, stride: Any, scale: Any, columns: Any, count: Any, a: Any, step: Any,
    sums: Any, sums_step: Any, coming: Any, coming_step: Any,
) -> Any:  # fmt: skip
    """sums[m, :32] += (Σ_p a[m, p] · row_p, row after row) for one block of columns, in split layout.

    weight: address of the block in the first row, the next row `stride` bytes behind; `columns` of it are there, 32 or
    fewer. scale: address of a float32 for each row, where the format has them. a: address of float32, the next m `step`
    bytes behind, p adjacent. sums: address, the next m `sums_step` bytes behind. coming: address of what is fetched
    beside the first row, `coming_step` bytes behind it what is beside the second one.
    """
    if not _literals(form, m):
        return None
    decoder = FORMATS[form.literal_value]

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        weight, stride, scale, columns, count, a, step, out, out_step, coming, coming_step = args[2:]
        both = 2 * m.literal_value * (16 // SHAPES.lanes) <= SHAPES.accumulators
        for parities in ((0, 1),) if both else ((0,), (1,)):
            targets = [
                offset(builder, offset(builder, out, i, out_step), 64 * parity)
                for i in range(m.literal_value)
                for parity in parities
            ]
            sums = _zeros(builder, len(targets))

            def mix(whole: bool, parities: tuple[int, ...] = parities, sums: list[ir.Value] = sums) -> None:
                with _blocks(builder, count) as p:
                    prefetch(builder, offset(builder, coming, p, coming_step), True)
                    row = offset(builder, weight, p, stride), offset(builder, scale, p, 4)
                    if isinstance(decoder, RaggedFormat) and not whole:
                        pair = decoder.tail(builder, *row, _INT(0), columns)
                    else:
                        pair = decoder.block(builder, *row, _INT(0))
                    for i in range(m.literal_value):
                        factor = read(builder, offset(builder, offset(builder, a, i, step), p, 4), ir.FloatType())
                        for k, parity in enumerate(parities):
                            _accumulate(builder, sums[i * len(parities) + k], splat(builder, factor), pair[parity])

            if not isinstance(decoder, RaggedFormat):
                mix(True)
            else:
                with builder.if_else(builder.icmp_signed(">=", columns, _INT(BLOCK))) as (whole, part):
                    with whole:
                        mix(True)
                    with part:
                        mix(False)
            for target, total in zip(targets, sums, strict=True):
                write(builder, builder.fadd(read(builder, target, F32X16), builder.load(total)), target)
        return context.get_dummy_value()

    return _signature(form, m, "pnpnnpnpnpn"), codegen


@_intrinsic
def widen_scales(typing: Any, start: Any, count: Any, out: Any) -> Any:
    """Write 2^(byte − 127) for `count` bytes from 1 to 254 as float32, and rubbish up to a multiple of 16."""
    sixteen = ir.VectorType(ir.IntType(8), 16)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        start, count, out = args

        def widen(scales: ir.Value, block: ir.Value) -> None:
            bits = builder.shl(builder.zext(scales, I32X16), constant(ir.IntType(32), 23))
            write(builder, bits, offset(builder, out, block, 64))

        blocks = builder.sdiv(count, _INT(16))
        with _blocks(builder, blocks) as block:
            widen(read(builder, offset(builder, start, block, 16), sixteen), block)
        rest = builder.srem(count, _INT(16))
        with builder.if_then(builder.icmp_signed(">", rest, _INT(0))):
            widen(read_some(builder, offset(builder, start, blocks, 16), sixteen, rest), blocks)
        return context.get_dummy_value()

    return signature(types.void, pointer_type, types.intp, pointer_type), codegen


@_intrinsic
def largest_byte_less_two(typing: Any, start: Any, length: Any) -> Any:
    """The largest (byte − 2) mod 256 in a span: above 250 when there is a scale byte outside 2 to 252."""
    byte, wide = ir.IntType(8), ir.VectorType(ir.IntType(8), 64)

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        start, length = args
        largest = cgutils.alloca_once_value(builder, ir.Constant(wide, None))

        def look(at: ir.Value) -> None:
            bytes_less_two = builder.sub(read(builder, at, wide), ir.Constant(wide, [2] * 64))
            known = builder.load(largest)
            more = builder.icmp_unsigned(">", bytes_less_two, known)
            builder.store(builder.select(more, bytes_less_two, known), largest)

        with _blocks(builder, builder.sdiv(length, _INT(64))) as block:
            look(offset(builder, start, block, 64))
        with builder.if_then(builder.icmp_signed(">", builder.srem(length, _INT(64)), _INT(0))):
            rest = builder.srem(length, _INT(64))
            buffer = cgutils.alloca_once(builder, wide)
            builder.store(ir.Constant(wide, [2] * 64), buffer)
            at = builder.bitcast(buffer, BYTES)
            cgutils.raw_memcpy(builder, at, offset(builder, start, builder.sub(length, rest)), rest, 1)
            look(at)
        result = call(builder, "llvm.vector.reduce.umax.v64i8", byte, builder.load(largest))
        return builder.zext(result, _INT)

    return signature(types.intp, pointer_type, types.intp), codegen
