"""Sixteen lanes: the vector type that kernels are written in.

A kernel holds `f32x16`, `i32x16` and mask values in variables and writes `fma(a, b, c)`, `a * b`, `where(a < b, a, b)`.
Each is one LLVM operation on a vector of 16, which becomes one AVX-512 instruction, two of AVX2, four of NEON or
SSE, or sixteen exact calls of `fmaf` where the CPU has no fused multiply-add: the same bits everywhere.
Nothing is contracted or reassociated. A scalar beside a vector is taken in every lane.

Memory is reached by a `pointer` and offsets in bytes, so weights may lie anywhere, aligned or not, writable or not.
Pointers are pointers in LLVM too, all the way from the kernel's arguments: sums of integers that end as an address
were seen to be miscompiled when Numba optimises a helper a second time inside its caller.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import lower_builtin, models, register_model

LANES = 16
Vector: TypeAlias = Any
Address: TypeAlias = Any
"""What mypy sees of 16 lanes, and of a pointer, inside a kernel."""

_ELEMENTS = {"f32x16": ir.FloatType(), "i32x16": ir.IntType(32), "mask16": ir.IntType(1)}


class Lanes(types.Type):
    """The Numba type of a vector; `name` says which."""


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, ir.VectorType(_ELEMENTS[lanes.name], LANES))


class Pointer(types.Type):
    """The Numba type of an address; pointer + bytes is a pointer."""


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Pointer) -> None:
        super().__init__(manager, kind, BYTES)


BYTES = ir.IntType(8).as_pointer()
pointer_type = Pointer("pointer")
f32x16, i32x16, mask16 = (Lanes(name) for name in _ELEMENTS)
F32X16, I32X16 = (ir.VectorType(_ELEMENTS[name], LANES) for name in ("f32x16", "i32x16"))
_SCALARS = {"f32x16": types.float32, "i32x16": types.int32}


def intrinsic(function: Callable[..., Any]) -> Any:
    """Numba's intrinsic, for functions that mypy may look into."""
    return numba_intrinsic(function)


# -- building blocks in LLVM, also used by `tiles` -----------------------------------------------------------------


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def constant(element: ir.Type, value: float) -> ir.Constant:
    """The number in every lane."""
    return ir.Constant(ir.VectorType(element, LANES), [value] * LANES)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a·b + c, rounded once."""
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def tree_sum(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of the lanes in one fixed order: lane i + lane i+8, then +4, +2, +1."""
    for half in (8, 4, 2, 1):
        mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [(i + half) % LANES for i in range(LANES)])
        vector = builder.fadd(vector, builder.shuffle_vector(vector, vector, mask))
    return builder.extract_element(vector, ir.IntType(32)(0))


def offset(builder: ir.IRBuilder, base: ir.Value, count: ir.Value | int, size: ir.Value | int = 1) -> ir.Value:
    """The pointer count · size bytes behind another one."""
    count, size = (value if isinstance(value, ir.Value) else ir.IntType(64)(value) for value in (count, size))
    return builder.gep(base, [builder.mul(count, size)])


def read(builder: ir.IRBuilder, at: ir.Value, kind: ir.Type) -> ir.Value:
    """Load a value, aligned or not."""
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=1)


def write(builder: ir.IRBuilder, value: ir.Value, at: ir.Value) -> None:
    """Store a value, aligned or not."""
    builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=1)


def another(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """The same pointer, unknown to the compiler: what is loaded by it is not held for what is loaded by the first."""
    return builder.asm(ir.FunctionType(BYTES, [BYTES]), "", "=r,0", [pointer], False)


def prefetch(builder: ir.IRBuilder, at: ir.Value, nearest: bool = False) -> None:
    """Ask for the line of memory at an address, which may be no memory at all, into the second cache or the nearest."""
    number = ir.IntType(32)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), at, number(0), number(3 if nearest else 2), number(1))


def read_some(builder: ir.IRBuilder, at: ir.Value, kind: ir.Type, n_bytes: ir.Value) -> ir.Value:
    """Load the first bytes of a value and zeros behind them; nothing past `n_bytes` is touched."""
    buffer = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), buffer)
    cgutils.raw_memcpy(builder, builder.bitcast(buffer, BYTES), at, n_bytes, 1)
    return builder.load(buffer)


def _lift(context: Any, builder: ir.IRBuilder, lanes: Lanes, kind: types.Type, value: ir.Value) -> ir.Value:
    if isinstance(kind, Lanes):
        return value
    return splat(builder, context.cast(builder, value, kind, _SCALARS[lanes.name]))


def _vector_of(*kinds: types.Type) -> Lanes | None:
    """The one vector type among the operands when the others are the same or numbers."""
    lanes = {kind for kind in kinds if isinstance(kind, Lanes)}
    rest = [kind for kind in kinds if not isinstance(kind, Lanes)]
    return lanes.pop() if len(lanes) == 1 and all(isinstance(kind, types.Number) for kind in rest) else None


# -- operators -------------------------------------------------------------------------------------------------------


def _operator(symbol: Any, result: Callable[[Lanes], Lanes], emit: dict[str, Callable[..., ir.Value]]) -> None:
    @infer_global(symbol)
    class Template(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            lanes = _vector_of(*args)
            return signature(result(lanes), *args) if lanes and lanes.name in emit else None

    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        lanes = _vector_of(*sig.args)
        assert lanes is not None
        return emit[lanes.name](
            builder, *(_lift(context, builder, lanes, *pair) for pair in zip(sig.args, args, strict=True))
        )

    for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
        lower_builtin(symbol, *kinds)(lower)


_B = ir.IRBuilder
for _symbol, _float, _integer in (
    (operator.add, _B.fadd, _B.add),
    (operator.sub, _B.fsub, _B.sub),
    (operator.mul, _B.fmul, _B.mul),
):
    _operator(_symbol, lambda lanes: lanes, {"f32x16": _float, "i32x16": _integer})
_operator(operator.truediv, lambda lanes: lanes, {"f32x16": _B.fdiv})
for _symbol, _integer in (
    (operator.and_, _B.and_),
    (operator.or_, _B.or_),
    (operator.xor, _B.xor),
    (operator.lshift, _B.shl),
    (operator.rshift, _B.ashr),
):
    _operator(_symbol, lambda lanes: lanes, {"i32x16": _integer})
for _symbol, _word in ((operator.lt, "<"), (operator.gt, ">"), (operator.ge, ">=")):
    _operator(
        _symbol,
        lambda lanes: mask16,
        {
            "f32x16": lambda builder, a, b, word=_word: builder.fcmp_ordered(word, a, b),
            "i32x16": lambda builder, a, b, word=_word: builder.icmp_signed(word, a, b),
        },
    )


# -- functions -------------------------------------------------------------------------------------------------------


def _vector_function(emit: Callable[..., ir.Value]) -> Any:
    """An intrinsic over one or more f32x16, numbers lifted."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return emit(builder, *(_lift(context, builder, f32x16, *pair) for pair in zip(sig.args, args, strict=True)))

    return codegen


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c in every lane, rounded once."""
    return signature(f32x16, a, b, c), _vector_function(fused)


@intrinsic
def sqrt(typing: Any, a: Any) -> Any:
    """√a, correctly rounded."""
    return signature(f32x16, a), _vector_function(lambda builder, x: call(builder, "llvm.sqrt.v16f32", F32X16, x))


@intrinsic
def where(typing: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is set, else b."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        lifted = (_lift(context, builder, f32x16, *pair) for pair in zip(sig.args[1:], args[1:], strict=True))
        return builder.select(args[0], *lifted)

    return signature(f32x16, mask, a, b), codegen


@intrinsic
def lanes(typing: Any, scalar: Any) -> Any:
    """The number, as float32, in every lane."""
    return signature(f32x16, scalar), _vector_function(lambda builder, x: x)


@intrinsic
def lane0(typing: Any, vector: Any) -> Any:
    """The first lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.extract_element(args[0], ir.IntType(32)(0))

    return signature(types.float32, vector), codegen


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of the lanes, by `tree_sum`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return tree_sum(builder, args[0])

    return signature(types.float32, vector), codegen


@intrinsic
def bits(typing: Any, vector: Any) -> Any:
    """The bits of the floats."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], I32X16)

    return signature(i32x16, vector), codegen


@intrinsic
def floats(typing: Any, vector: Any) -> Any:
    """The floats of the bits."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], F32X16)

    return signature(f32x16, vector), codegen


# -- memory ----------------------------------------------------------------------------------------------------------


@infer_global(operator.add)
class _PointerAdd(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        fits = len(args) == 2 and isinstance(args[0], Pointer) and isinstance(args[1], types.Integer)
        return signature(pointer_type, pointer_type, types.intp) if fits else None


def _pointer_add(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    return builder.gep(args[0], [args[1]])


lower_builtin(operator.add, Pointer, types.Integer)(_pointer_add)


@intrinsic
def pointer(typing: Any, number: Any) -> Any:
    """The address given as an integer from Python."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], BYTES)

    return signature(pointer_type, types.intp), codegen


@intrinsic
def address(typing: Any, array: Any) -> Any:
    """Where the array's first element lies."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.bitcast(context.make_array(sig.args[0])(context, builder, args[0]).data, BYTES)

    return signature(pointer_type, array), codegen


@intrinsic
def hold(typing: Any, array: Any) -> Any:
    """Keep a buffer alive up to here. Numba frees an array after its last use and does not see uses by address."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return context.get_dummy_value()

    return signature(types.void, array), codegen


@intrinsic
def load(typing: Any, at: Any, n: Any) -> Any:
    """Sixteen floats at a pointer, or the first n < 16 and zeros behind."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        at, n = args
        result = cgutils.alloca_once(builder, F32X16)
        with builder.if_else(builder.icmp_signed(">=", n, n.type(LANES)), likely=True) as (whole, part):
            with whole:
                builder.store(read(builder, at, F32X16), result)
            with part:
                builder.store(read_some(builder, at, F32X16, builder.mul(n, n.type(4))), result)
        return builder.load(result)

    return signature(f32x16, pointer_type, types.intp), codegen


@intrinsic
def store(typing: Any, at: Any, n: Any, vector: Any) -> Any:
    """Write sixteen floats to a pointer, or only the first n < 16."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        at, n, vector = args
        with builder.if_else(builder.icmp_signed(">=", n, n.type(LANES)), likely=True) as (whole, part):
            with whole:
                write(builder, vector, at)
            with part:
                buffer = cgutils.alloca_once(builder, F32X16)
                builder.store(vector, buffer)
                n_bytes = builder.mul(n, n.type(4))
                cgutils.raw_memcpy(builder, at, builder.bitcast(buffer, BYTES), n_bytes, 1)
        return context.get_dummy_value()

    return signature(types.void, pointer_type, types.intp, f32x16), codegen


@intrinsic
def get(typing: Any, at: Any) -> Any:
    """The float at a pointer."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return read(builder, args[0], ir.FloatType())

    return signature(types.float32, pointer_type), codegen
