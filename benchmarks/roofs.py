"""What a machine could do at most: bytes read and multiply-adds, each second, by so many threads.

Both are measured with the threads and in the minute of what is held against them: on a shared machine yesterday's roof
is another one. Clocks are two: seconds that went by, and processor seconds of this process over its threads, which
leave out the time that others had the processors; what others take of memory bandwidth is in both.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from benchmarks import surroundings
from runtime.ops.kernels.jit import VECTORS
from runtime.ops.kernels.lanes import fma, lanes, total

READ_BYTES = 256 << 20
"""Bytes that each thread reads once: far more than a cache holds of them."""
CHAIN = 1 << 22
"""Multiply-adds in each chain of a thread."""
MOMENT = 1 << 16
"""Of them between two looks at whether to go on: a millisecond."""
CHAINS = 12 if VECTORS == "avx512" else 6
"""Chains side by side: enough to fill the pipelines, few enough for the registers."""


@dataclass(frozen=True)
class Lap:
    """How long something took: seconds by the clock, and processor seconds over the threads."""

    wall_s: float
    cpu_s: float


def lap(threads: int, work: Callable[[], object]) -> Lap:
    """Time it. `threads` are those that the work keeps busy."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Lap(time.perf_counter() - wall, (time.process_time() - cpu) / threads)


@numba.njit(nogil=True)
def _read(values: Any) -> Any:
    """Every byte is looked at; LLVM makes vectors of it."""
    seen = np.uint64(0)
    for value in values:
        seen ^= value
    return seen


@numba.njit(nogil=True, error_model="numpy")
def _multiply(n: int, one: Any) -> Any:
    """CHAINS chains of n fused multiply-adds of 16 lanes.

    `one` must not be known when this is compiled: 1 · 0.999 + 0.001 is 1 again, so a chain that is known to begin
    there is left out. Every chain begins elsewhere, or they would be one.
    """
    x, y = lanes(np.float32(0.999)), lanes(np.float32(0.001))
    a, b, c, d, e, f = lanes(one), lanes(one + 1), lanes(one + 2), lanes(one + 3), lanes(one + 4), lanes(one + 5)
    if CHAINS == 6:
        for _ in range(n):
            a, b, c, d, e, f = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y), fma(e, x, y), fma(f, x, y)
        return total(a + b + c + d + e + f)
    g, h, i, j, k, m = lanes(one + 6), lanes(one + 7), lanes(one + 8), lanes(one + 9), lanes(one + 10), lanes(one + 11)
    for _ in range(n):
        a, b, c, d, e, f = fma(a, x, y), fma(b, x, y), fma(c, x, y), fma(d, x, y), fma(e, x, y), fma(f, x, y)
        g, h, i, j, k, m = fma(g, x, y), fma(h, x, y), fma(i, x, y), fma(j, x, y), fma(k, x, y), fma(m, x, y)
    return total(a + b + c + d + e + f + g + h + i + j + k + m)


class Roofs:
    """The two roofs of so many threads, measured as often as asked; `reads` and `multiplies` keep what was found."""

    def __init__(self, threads: int, read_bytes: int = READ_BYTES, chain: int = CHAIN) -> None:
        self.threads, self._chain = threads, chain
        self._pool = ThreadPoolExecutor(threads)
        self._parts: list[npt.NDArray[np.uint64]] = [np.full(read_bytes // 8, 7, np.uint64) for _ in range(threads)]
        self.reads: list[tuple[int, Lap]] = []
        self.multiplies: list[tuple[int, Lap]] = []
        _read(self._parts[0][:8])
        self._multiply = partial(_multiply, one=np.float32(1.0))
        self._multiply(1)

    def read(self) -> tuple[int, Lap]:
        """(bytes, time): all threads reading, each its own memory, once from end to end."""
        took = lap(self.threads, lambda: list(self._pool.map(_read, self._parts)))
        self.reads.append((sum(part.nbytes for part in self._parts), took))
        return self.reads[-1]

    def multiply(self) -> tuple[int, Lap]:
        """(floating point operations, time): all threads multiplying and adding float32, two operations each."""
        took = lap(self.threads, lambda: list(self._pool.map(self._multiply, [self._chain] * self.threads)))
        self.multiplies.append((2 * 16 * CHAINS * self._chain * self.threads, took))
        return self.multiplies[-1]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Meanwhile all threads multiply, and touch no memory."""
        done = threading.Event()

        def multiply() -> None:
            while not done.is_set():
                self._multiply(MOMENT)

        threads = [self._pool.submit(multiply) for _ in range(self.threads)]
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.result()


def machine() -> dict[str, Any]:
    """What a number should be read with: the machine and how busy it is, its caches, vectors, and libraries."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = (index.joinpath(file).read_text().strip() for file in ("type", "level", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return surroundings.machine() | {"caches": caches, "vectors": VECTORS, "versions": surroundings.versions()}
