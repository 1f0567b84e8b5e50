"""Memory that drives read into: page-aligned, pooled, bounded, at an address that fits the place in the file.

A direct read moves whole blocks to addresses that are congruent to their place in the file, modulo the alignment.
Byte 0 of a buffer therefore lies at an address congruent to a given *phase*: then every block of the span can land
where it belongs, and no byte of an expert is copied.

A buffer that is given back is used again: its memory is mapped, and touched, once. The reader decides when to ask
for one and how many (`reader.py`); the pool only counts.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

GRAIN = 64 << 10
"""Capacities are multiples of this, so that buffers of nearly one size serve each other."""


def address(view: memoryview) -> int:
    """Where the first byte of a writable, contiguous, non-empty view lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def aligned(nbytes: int, alignment: int, phase: int = 0) -> memoryview:
    """Fresh memory of `nbytes` whose first address is congruent to `phase` modulo `alignment`, a power of two."""
    spare = max(alignment - mmap.PAGESIZE, 0)
    return _shifted(memoryview(mmap.mmap(-1, nbytes + phase % alignment + spare)), nbytes, alignment, phase)


def _shifted(memory: memoryview, nbytes: int, alignment: int, phase: int) -> memoryview:
    shift = (phase - address(memory)) % alignment
    return memory[shift : shift + nbytes]


def _nothing() -> None:
    """Nobody waits for room."""


class Buffer:
    """`view` is the bytes that were asked for. `release` gives the memory back: nothing may look at it after that."""

    __slots__ = ("_memory", "_pool", "view")

    def __init__(self, pool: BufferPool, memory: memoryview, view: memoryview) -> None:
        self._pool, self._memory = pool, memory
        self.view = view

    @property
    def capacity(self) -> int:
        """What it counts in the pool."""
        return self._memory.nbytes

    def release(self) -> None:
        """Only once; whoever holds a part of `view` must have let go of it."""
        self._pool.give(self)
        self._pool.after_release()


class BufferPool:
    """Buffers in use and spare ones, together never above `limit_bytes` as long as `fits` is asked first.

    Safe to call from several threads at once; nothing here waits.
    """

    def __init__(self, limit_bytes: int, alignment: int = mmap.PAGESIZE) -> None:
        self.limit_bytes, self.alignment = limit_bytes, alignment
        self.after_release: Callable[[], None] = _nothing
        """Called when somebody has released a buffer: there is room."""
        self.in_use = 0
        self.peak_bytes = 0
        self.made = 0
        self._spare: dict[int, list[memoryview]] = {}
        self._spare_bytes = 0
        self._out: set[Buffer] = set()
        self._lock = threading.Lock()

    def cost(self, nbytes: int) -> int:
        """The capacity of a buffer of `nbytes` at any phase: what it counts against the limit."""
        spare = self.alignment + max(self.alignment - mmap.PAGESIZE, 0)
        return -(-(nbytes + spare) // GRAIN) * GRAIN

    @property
    def held_bytes(self) -> int:
        """Memory mapped now, in use or spare."""
        return self.in_use + self._spare_bytes

    def take(self, nbytes: int, phase: int = 0) -> Buffer:
        """A buffer of `nbytes` at `phase`. Its bytes may be anything. Never refused: the limit is the caller's to keep.

        Beyond the limit nothing is kept when it is given back.
        """
        capacity = self.cost(nbytes)
        with self._lock:
            same = self._spare.get(capacity)
            if same:
                memory = same.pop()
                self._spare_bytes -= capacity
            else:
                self._drop_spares(self.limit_bytes - self.in_use - capacity)
                memory = memoryview(mmap.mmap(-1, capacity))
                self.made += 1
            buffer = Buffer(self, memory, _shifted(memory, nbytes, self.alignment, phase))
            self._out.add(buffer)
            self.in_use += capacity
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Raises ValueError for one that is not out: it was given back before."""
        with self._lock:
            if buffer not in self._out:
                raise ValueError("this buffer was given back before")
            self._out.remove(buffer)
            capacity = buffer.capacity
            self.in_use -= capacity
            if self.held_bytes + capacity <= self.limit_bytes:
                self._spare.setdefault(capacity, []).append(buffer._memory)
                self._spare_bytes += capacity

    def warm(self, nbytes: int, count: int) -> None:
        """Map and touch memory for `count` buffers of `nbytes`, as far as the limit goes, before reads need it."""
        count = min(count, (self.limit_bytes - self.in_use) // self.cost(nbytes))
        buffers = [self.take(nbytes) for _ in range(count)]
        for buffer in buffers:
            ctypes.memset(address(buffer._memory), 0, buffer.capacity)
            self.give(buffer)

    def _drop_spares(self, until: int) -> None:
        """Unmap spare memory, whatever its size, until no more than `until` bytes of it are left."""
        while self._spare_bytes > max(until, 0):
            capacity = next(c for c, spares in self._spare.items() if spares)
            self._spare[capacity].pop()
            self._spare_bytes -= capacity
