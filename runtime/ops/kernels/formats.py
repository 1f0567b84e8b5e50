"""How 32 columns of a weight row become two vectors: the 16 even columns and the 16 odd ones.

One order serves every matrix. Columns come in blocks of 32; lane l of a block holds column 2l in the even vector and
2l + 1 in the odd one. That is how MXFP4 nibbles and pairs of bf16 lie in memory, so decoding needs no shuffle. A row
decoded so, block after block and zeros behind its end, is in *split layout*; activations are put into it once per call.

This file knows formats, never sums.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from runtime.ops.kernels.jit import VECTORS
from runtime.ops.kernels.lanes import BYTES, F32X16, I32X16, call, constant, offset, read, read_some, splat

BF16, F32, SPLIT, INT8, MXFP4, MXFP4_EDGE = range(6)
"""bf16 and float32 as released; float32 in split layout; int8 with a float32 scale for each row; MXFP4 with scale bytes
2 to 252, widened to float32; MXFP4 with any, as released."""

SCALE_BYTES = {INT8: (4, 0), MXFP4: (0, 4), MXFP4_EDGE: (0, 1)}
"""Of the scales of a weight row: (once, for each block of 32 columns). The others have none."""

BLOCK = 32
_BYTES = ir.VectorType(ir.IntType(8), 16)
_FLOATS32 = ir.VectorType(ir.FloatType(), BLOCK)
_BIT = ir.IntType(32)

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

Pair = tuple[ir.Value, ir.Value]


class Format(Protocol):
    """Decode one block of `block_bytes`. `row` and `scale` point to a row and to its scales; `block` counts blocks."""

    block_bytes: int

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair: ...


@runtime_checkable
class RaggedFormat(Format, Protocol):
    """A format whose rows need not be whole blocks."""

    def tail(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value) -> Pair:
        """The last `columns` < 32 columns, zeros behind."""
        ...


@runtime_checkable
class PairedFormat(Format, Protocol):
    """A format whose values are bf16: a block is 16 pairs too, an even column below an odd one, as bf16 lies itself."""

    def pairs(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> ir.Value: ...


@runtime_checkable
class RaggedPairedFormat(PairedFormat, Protocol):
    """Both."""

    def pairs_tail(
        self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value
    ) -> ir.Value:
        """The last `columns` < 32 columns, zeros behind."""
        ...


def _floats(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(bits, F32X16)


def widen(builder: ir.IRBuilder, pairs: ir.Value, parity: int) -> ir.Value:
    """The even columns of pairs of bf16, or the odd ones, of any number of lanes."""
    many = pairs.type.count
    if parity:
        bits = builder.and_(pairs, ir.Constant(pairs.type, [0xFFFF0000] * many))
    else:
        bits = builder.shl(pairs, ir.Constant(pairs.type, [16] * many))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), many))


def _both(builder: ir.IRBuilder, pairs: ir.Value) -> Pair:
    return widen(builder, pairs, 0), widen(builder, pairs, 1)


class _Bf16:
    block_bytes = 64

    def pairs(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> ir.Value:
        return read(builder, offset(builder, row, block, self.block_bytes), I32X16)

    def pairs_tail(
        self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value
    ) -> ir.Value:
        n_bytes = builder.mul(columns, columns.type(2))
        return read_some(builder, offset(builder, row, block, self.block_bytes), I32X16, n_bytes)

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        return _both(builder, self.pairs(builder, row, scale, block))

    def tail(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value) -> Pair:
        return _both(builder, self.pairs_tail(builder, row, scale, block, columns))


class _F32:
    block_bytes = 128

    def _split(self, builder: ir.IRBuilder, both: ir.Value) -> Pair:
        even, odd = (
            builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(_BIT, 16), list(range(first, BLOCK, 2))))
            for first in (0, 1)
        )
        return even, odd

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        return self._split(builder, read(builder, offset(builder, row, block, self.block_bytes), _FLOATS32))

    def tail(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value) -> Pair:
        n_bytes = builder.mul(columns, columns.type(4))
        return self._split(
            builder, read_some(builder, offset(builder, row, block, self.block_bytes), _FLOATS32, n_bytes)
        )


class _Split:
    block_bytes = 128

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        at = offset(builder, row, block, self.block_bytes)
        return read(builder, at, F32X16), read(builder, offset(builder, at, 64), F32X16)


class _Int8:
    """Two columns are one number of 16 bits. Each is taken as a multiple of 2^24 or 2^8, which the scale makes good:
    int8 · scale has no more than 18 bits when the scale has the 11 of a float16, so every value is exact."""

    block_bytes = BLOCK
    _PAIRS = ir.VectorType(ir.IntType(16), 16)

    def _values(self, builder: ir.IRBuilder, pairs: ir.Value, scale: ir.Value) -> Pair:
        pairs, unit = builder.sext(pairs, I32X16), read(builder, scale, ir.FloatType())
        even, odd = builder.shl(pairs, constant(_BIT, 24)), builder.and_(pairs, constant(_BIT, -256))
        return self._scaled(builder, even, unit, 2.0**-24), self._scaled(builder, odd, unit, 2.0**-8)

    def _scaled(self, builder: ir.IRBuilder, values: ir.Value, unit: ir.Value, power: float) -> ir.Value:
        factor = splat(builder, builder.fmul(unit, ir.FloatType()(power)))
        return builder.fmul(builder.sitofp(values, F32X16), factor)

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        return self._values(builder, read(builder, offset(builder, row, block, self.block_bytes), self._PAIRS), scale)

    def tail(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value, columns: ir.Value) -> Pair:
        return self._values(
            builder, read_some(builder, offset(builder, row, block, self.block_bytes), self._PAIRS, columns), scale
        )


def _codes(builder: ir.IRBuilder, row: ir.Value, block: ir.Value) -> Pair:
    """The even codes and the odd codes of a block, in the low four bits; the even ones with rubbish above."""
    codes = builder.zext(read(builder, offset(builder, row, block, 16), _BYTES), I32X16)
    return codes, builder.lshr(codes, constant(_BIT, 4))


def _scale_byte(builder: ir.IRBuilder, scale: ir.Value, block: ir.Value) -> ir.Value:
    return builder.zext(read(builder, offset(builder, scale, block), ir.IntType(8)), _BIT)


def _scale(builder: ir.IRBuilder, scale: ir.Value, block: ir.Value) -> ir.Value:
    """A widened scale. Alone in memory it reaches all lanes by one load, while a byte takes three steps."""
    return read(builder, offset(builder, scale, block, 4), ir.FloatType())


def _power_of_two(builder: ir.IRBuilder, byte: ir.Value) -> ir.Value:
    """2^(byte − 127) in every lane, for bytes 1 to 254."""
    return _floats(builder, splat(builder, builder.shl(byte, _BIT(23))))


def _sign(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    return builder.shl(builder.and_(codes, constant(_BIT, 8)), constant(_BIT, 28))


def _select(builder: ir.IRBuilder, codes: ir.Value, half_scale: ir.Value) -> ir.Value:
    """E2M1 by arithmetic on the bits; `half_scale` is the bits of scale / 2.

    Exponent and mantissa of a code, at their place in a float, add to those bits; 0.5 and 0 are the exceptions.
    """
    number = builder.shl(builder.and_(codes, constant(_BIT, 7)), constant(_BIT, 22))
    value = builder.add(number, half_scale)
    value = builder.select(builder.icmp_unsigned("==", number, constant(_BIT, 1 << 22)), half_scale, value)
    value = builder.select(builder.icmp_unsigned("==", number, constant(_BIT, 0)), number, value)
    return _floats(builder, builder.or_(value, _sign(builder, codes)))


class _Mxfp4Portable:
    block_bytes = 16

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        bits = builder.bitcast(_scale(builder, scale, block), _BIT)
        half_scale = splat(builder, builder.sub(bits, _BIT(1 << 23)))
        even, odd = _codes(builder, row, block)
        return _select(builder, even, half_scale), _select(builder, odd, half_scale)


class _Mxfp4Avx512:
    """`vpermps` looks all 16 values up; the product with a power of two is exact."""

    block_bytes = 16

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        table = builder.fmul(ir.Constant(F32X16, list(_E2M1)), splat(builder, _scale(builder, scale, block)))
        even, odd = (
            call(builder, "llvm.x86.avx512.permvar.sf.512", F32X16, table, codes)
            for codes in _codes(builder, row, block)
        )
        return even, odd


class _Mxfp4Avx2:
    """A value is known by the two upper bytes of its float32, a bf16: `vpshufb` looks up each of them for all 32 codes,
    in a table for the scale, and an interleaving makes pairs of them."""

    block_bytes = 16
    _CODES = ir.VectorType(ir.IntType(8), 32)

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        return _both(builder, self.pairs(builder, row, scale, block))

    def pairs(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> ir.Value:
        bits = builder.lshr(read(builder, offset(builder, scale, block, 4), _BIT), _BIT(23))
        tables = cgutils.global_constant(builder, "mxfp4", self._tables())
        table = offset(builder, builder.bitcast(tables, BYTES), builder.zext(bits, ir.IntType(64)), 32)
        codes = self._codes(builder, read(builder, offset(builder, row, block, 16), ir.VectorType(_BIT, 4)))
        upper, second = (self._look_up(builder, offset(builder, table, first), codes) for first in (0, 16))
        low, high = (self._interleave(builder, second, upper, first) for first in (0, 8))
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_BIT, 16), [*range(16)]))

    def _codes(self, builder: ir.IRBuilder, four: ir.Value) -> ir.Value:
        """Of bytes 0-3, 8-11 | 4-7, 12-15 of a block, the low four bits and the high ones by turns."""
        quarters = builder.shuffle_vector(four, four, ir.Constant(ir.VectorType(_BIT, 4), [0, 2, 1, 3]))
        wide = builder.zext(builder.bitcast(quarters, _BYTES), ir.VectorType(ir.IntType(16), 16))
        both = builder.or_(wide, builder.shl(wide, ir.Constant(wide.type, [4] * 16)))
        return builder.and_(builder.bitcast(both, self._CODES), ir.Constant(self._CODES, [15] * 32))

    def _look_up(self, builder: ir.IRBuilder, table: ir.Value, codes: ir.Value) -> ir.Value:
        entries = read(builder, table, _BYTES)
        both = builder.shuffle_vector(entries, entries, ir.Constant(ir.VectorType(_BIT, 32), [*range(16)] * 2))
        return call(builder, "llvm.x86.avx2.pshuf.b", self._CODES, both, codes)

    def _interleave(self, builder: ir.IRBuilder, low: ir.Value, high: ir.Value, first: int) -> ir.Value:
        """Of both halves the eight bytes from `first` on, one of each vector by turns: 0-7 or 8-15 of the pairs."""
        order = [source + at + i for at in (first, first + 16) for i in range(8) for source in (0, 32)]
        bytes_of = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_BIT, 32), order))
        return builder.bitcast(bytes_of, ir.VectorType(_BIT, 8))

    @staticmethod
    def _tables() -> ir.Constant:
        """Of every scale byte 2 to 252, the first and the second byte of the 16 values."""
        codes = np.array(_E2M1, np.float32).view(np.uint32).astype(np.int64)
        exponents = (np.arange(256)[:, None] - 127) << 23
        values = np.where(codes & 0x7FFFFFFF, codes + exponents, codes)
        bytes_of = np.stack([values >> 24, values >> 16], 1) & 0xFF
        return ir.Constant(ir.ArrayType(ir.IntType(8), bytes_of.size), bytearray(bytes_of.astype(np.uint8).tobytes()))


class _Mxfp4Edge:
    """Every scale byte but 255, exactly. Scale 0 is a subnormal; scales 253 and 254 would overflow with large codes,
    so they are taken as 252 and the rest, 2 or 4, goes to the activation: see `activation_factor`."""

    block_bytes = 16

    def block(self, builder: ir.IRBuilder, row: ir.Value, scale: ir.Value, block: ir.Value) -> Pair:
        byte = _scale_byte(builder, scale, block)
        byte = builder.select(builder.icmp_unsigned(">", byte, _BIT(252)), _BIT(252), byte)
        smallest = builder.icmp_unsigned("==", byte, _BIT(0))
        scale_bits = builder.select(smallest, _BIT(1 << 22), builder.shl(byte, _BIT(23)))
        unit = _floats(builder, splat(builder, scale_bits))
        half_of_one = constant(_BIT, 126 << 23)
        even, odd = (builder.fmul(_select(builder, codes, half_of_one), unit) for codes in _codes(builder, row, block))
        return even, odd

    def activation_factor(self, builder: ir.IRBuilder, scale: ir.Value, block: ir.Value) -> ir.Value:
        """1, or 2 and 4 for scale bytes 253 and 254."""
        byte = _scale_byte(builder, scale, block)
        excess = builder.select(builder.icmp_unsigned(">", byte, _BIT(252)), builder.sub(byte, _BIT(252)), _BIT(0))
        return _power_of_two(builder, builder.add(excess, _BIT(127)))


_MXFP4: dict[str, Any] = {"avx512": _Mxfp4Avx512, "avx2": _Mxfp4Avx2, "portable": _Mxfp4Portable}
FORMATS: tuple[Format, ...] = (_Bf16(), _F32(), _Split(), _Int8(), _MXFP4[VECTORS](), _Mxfp4Edge())
"""Indexed by the constants above."""
