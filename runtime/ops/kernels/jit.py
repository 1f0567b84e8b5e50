"""How a kernel is compiled, kept on disk, and told which CPU it is for.

This file knows about Numba and the CPU, never about arithmetic. A kernel has one declared signature; `build()`
compiles them all or, from the second process on, loads them (`nogil`, no fast-math).

Numba's own disk cache keeps one index per function and looks only at that function's file: after a change in a
helper it would still find old code, and two processes for different CPUs that write at once can leave the code
of one under the key of the other. Here every compiled kernel has a file of its own, named by all it depends on:
signature, CPU, features, bytecode, the sources of this package, and the versions. It is written whole or not at all,
into the first directory that can be written: NUMBA_CACHE_DIR where it is set, else `__pycache__` beside this file,
else the user's cache directory. To load a kernel it is enough that a directory can be read.
"""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba.core.caching import (
    FunctionCache,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

from runtime.errors import UsageError
from runtime.progress import Progress

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
_CONFIG: Any = numba.config
_VERSIONS = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
_UNFINISHED = ".kernel-unfinished"
"""Ending of a file's name while it is written."""
_KERNELS: list[tuple[Any, str]] = []
_UNKEPT: list[str] = []
"""Names of the kernels this process compiled and could keep nowhere."""


def _places() -> list[Path]:
    """The directories of compiled kernels, by Numba's rules for a function of this file; they need not exist."""
    own: list[Any] = [InTreeCacheLocator, UserWideCacheLocator]
    locators = [UserProvidedCacheLocator] if _CONFIG.CACHE_DIR else own
    return [Path(locator(_places, __file__).get_cache_path()) for locator in locators]


class _KernelFiles:
    """One file per compiled kernel, `SOURCES-KEY.kernel`; takes the place of Numba's index and data files."""

    def __init__(self, directories: Sequence[Path], name: str) -> None:
        self._directories, self._name = directories, name

    def _file(self, key: object) -> str:
        digest = hashlib.sha256(repr((self._name, key, _VERSIONS)).encode()).hexdigest()
        return f"{_SOURCES[:12]}-{digest[:24]}.kernel"

    def has(self, key: object) -> bool:
        """Whether any directory has a file for `key`; nothing is read."""
        return any(os.path.isfile(directory / self._file(key)) for directory in self._directories)

    def load(self, key: object) -> Any:
        """What `save` kept under `key` in any directory, or None; a damaged file counts as none."""
        for directory in self._directories:
            with contextlib.suppress(OSError):
                data = (directory / self._file(key)).read_bytes()
                if hashlib.sha256(data[32:]).digest() == data[:32]:
                    return pickle.loads(data[32:])
        return None

    def save(self, key: object, data: object) -> None:
        """Keep `data` under `key` in the first directory that takes it. Where none does, every process compiles."""
        content = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
        for directory in self._directories:
            with contextlib.suppress(OSError):
                _write(directory / self._file(key), hashlib.sha256(content).digest() + content)
                return
        _UNKEPT.append(self._name)


def _write(path: Path, content: bytes) -> None:
    """Write a kernel whole, or raise OSError; drop what nobody will read. Others may read it, as they may the code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    temporary = path.with_name(secrets.token_hex(8) + _UNFINISHED)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _sweep(directory: Path) -> None:
    """Remove kernels of older sources, and what processes that were killed left unfinished."""
    old = [kept for kept in directory.glob("*-*.kernel") if not kept.name.startswith(_SOURCES[:12])]
    for left in [*old, *directory.glob(f"*{_UNFINISHED}")]:
        with contextlib.suppress(OSError):  # just finished by another process, or not ours to remove
            if left.suffix == ".kernel" or time.time() - left.stat().st_mtime > 3600:
                left.unlink()


class _KernelCache(FunctionCache):
    """Numba's cache of one function, of which only the key remains: no index, no one directory."""

    def __init__(self, function: Callable[..., Any]) -> None:
        places = _places()
        self._name = f"{function.__module__}.{function.__qualname__}"
        self._py_func, self._cache_path = function, str(places[0])
        self._files = _KernelFiles(places, self._name)

    def keeps(self, sig: Any) -> bool:
        """Whether the function is kept for this CPU."""
        return self._files.has(self._index_key(sig, cpu_target.target_context.codegen()))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        found = self._files.load(self._index_key(sig, target_context.codegen()))
        return None if found is None else CompileResult._rebuild(target_context, *found)

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.library.has_dynamic_globals:  # addresses of this process
            raise TypeError(f"{self._py_func.__qualname__} cannot be kept: it holds an address")
        self._files.save(self._index_key(sig, data.codegen), data._reduce())


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a compiled function with this one signature (Numba's notation)."""

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
        dispatcher._cache = _KernelCache(function)
        _KERNELS.append((dispatcher, signature))
        return dispatcher

    return declare


def inline(function: Callable[..., Any]) -> Any:
    """A helper of kernels, compiled into each of them."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def shared(function: Callable[..., Any]) -> Any:
    """A helper of kernels, compiled once and called by each of them."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def build(report: Progress | None = None) -> None:
    """Compile every declared kernel, which takes some ten seconds, or load it, which takes a fraction of one.

    Raises UsageError where Numba is told not to compile.
    """
    require_compiler()
    for done, (dispatcher, signature) in enumerate(_KERNELS, 1):
        if not dispatcher.signatures:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        if report:
            report(done, len(_KERNELS))


def require_compiler() -> None:
    """Raise UsageError where Numba is told not to compile."""
    if _CONFIG.DISABLE_JIT:
        raise UsageError(
            "the cpu backend needs Numba's compiler, which NUMBA_DISABLE_JIT turns off: "
            "unset NUMBA_DISABLE_JIT or use --backend reference"
        )


def uncompiled() -> int:
    """How many kernels no earlier process has left for this one."""
    return sum(not dispatcher._cache.keeps(signature) for dispatcher, signature in _KERNELS)


def keeps() -> bool:
    """Whether the kernels compiled so far were kept, so that the next process loads them."""
    return not _UNKEPT


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
