"""How a kernel is compiled, kept on disk, and told which CPU it is for.

This file knows about Numba and the CPU, never about arithmetic. A kernel has one declared signature; `build()`
compiles them all or, from the second process on, loads them (`nogil`, no fast-math).

Numba's own disk cache keeps one index per function and looks only at that function's file: after a change in a
helper it would still find old code, and two processes for different CPUs that write at once can leave the code
of one under the key of the other. Here every compiled kernel has a file of its own, named by all it depends on:
signature, CPU, features, bytecode, the sources of this package, and the versions. It is written whole or not at all.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core.caching import FunctionCache
from numba.core.registry import cpu_target

Report = Callable[[int, int], None]
"""Called as report(kernels ready, kernels in all)."""

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
_UNFINISHED = ".kernel-unfinished"
"""Ending of a file's name while it is written."""
_KERNELS: list[tuple[Any, str]] = []


class _KernelFiles:
    """One file per compiled kernel, `SOURCES-KEY.kernel`; takes the place of Numba's index and data files."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory, self._name = Path(directory), name

    def _path(self, key: object) -> Path:
        digest = hashlib.sha256(repr((self._name, key, _VERSIONS)).encode()).hexdigest()
        return self._directory / f"{_SOURCES[:12]}-{digest[:24]}.kernel"

    def load(self, key: object) -> Any:
        """What `save` kept under `key`, or None; a damaged file counts as none."""
        with contextlib.suppress(OSError):
            data = self._path(key).read_bytes()
            if hashlib.sha256(data[32:]).digest() == data[:32]:
                return pickle.loads(data[32:])
        return None

    def save(self, key: object, data: object) -> None:
        """Keep `data` under `key`, drop what nobody will read. A full disk costs the next process time, no more."""
        content = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(OSError):
            self._sweep()
            handle, temporary = tempfile.mkstemp(_UNFINISHED, dir=self._directory)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(content).digest() + content)
                os.replace(temporary, self._path(key))
            except OSError:
                os.unlink(temporary)

    def _sweep(self) -> None:
        """Remove kernels of older sources, and what processes that were killed left unfinished."""
        for kept in self._directory.glob("*-*.kernel"):
            if not kept.name.startswith(_SOURCES[:12]):
                kept.unlink(missing_ok=True)
        for left in self._directory.glob(f"*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):  # just finished by another process
                if time.time() - left.stat().st_mtime > 3600:
                    left.unlink()


class _KernelCache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file: Any = _KernelFiles(self.cache_path, f"{function.__module__}.{function.__qualname__}")


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a compiled function with this one signature (Numba's notation)."""

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
        with contextlib.suppress(RuntimeError):  # no directory that can be written: compile in every process
            dispatcher._cache = _KernelCache(function)
        _KERNELS.append((dispatcher, signature))
        return dispatcher

    return declare


def inline(function: Callable[..., Any]) -> Any:
    """A helper of kernels, compiled into each of them."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def build(report: Report | None = None) -> None:
    """Compile every declared kernel, which takes some ten seconds, or load it, which takes a fraction of one."""
    for done, (dispatcher, signature) in enumerate(_KERNELS, 1):
        if not dispatcher.signatures:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        if report:
            report(done, len(_KERNELS))


def _probe() -> str:
    """The assembly LLVM writes for a 16-lane fused multiply-add and integer add, for the CPU Numba compiles for."""
    floats, integers = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.IntType(32), 16)
    module = ir.Module()
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()] * 4), "probe")
    builder = ir.IRBuilder(function.append_basic_block())
    fused = ir.Function(module, ir.FunctionType(floats, [floats] * 3), "llvm.fma.v16f32")
    places = [builder.bitcast(argument, floats.as_pointer()) for argument in function.args]
    a, b, c, d = (builder.load(place) for place in places)
    builder.store(builder.call(fused, [a, b, c]), places[0])
    sum_of_bits = builder.add(builder.bitcast(c, integers), builder.bitcast(d, integers))
    builder.store(builder.bitcast(sum_of_bits, floats), places[1])
    builder.ret_void()
    _, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu=cpu or "", features=features, opt=2)
    return str(machine.emit_assembly(llvm.parse_assembly(str(module))))


def _vectors() -> str:
    """What decodes MXFP4 best: "avx512", "avx2", or "portable". NUMBA_CPU_NAME and _FEATURES can lower it."""
    lines = _probe().splitlines()
    for name, register in (("avx512", "%zmm"), ("avx2", "%ymm")):
        if all(any(op in line and register in line for line in lines) for op in ("vfmadd", "vpaddd")):
            return name
    return "portable"


VECTORS = _vectors()
