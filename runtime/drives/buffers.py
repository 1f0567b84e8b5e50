"""Memory that drives read into: page-aligned, pooled, bounded, at an address that fits the place in the file.

A direct read moves whole blocks to addresses that are congruent to their place in the file, modulo the alignment.
Byte 0 of a buffer therefore lies at an address congruent to a given *phase*: then every block of the span can land
where it belongs, and no byte of an expert is copied.

A buffer that is given back is used again: its memory is mapped, and touched, once. The reader decides when to ask
for one and how many (`reader.py`); the pool only counts.

On Linux buffers lie in huge pages, several side by side, so that few are left over at their ends. A request to a disk
may name only so many places in memory, and scattered small pages cut a read into short requests: on a virtual disk the
same reads came at 1.1 to 1.9 GB/s, depending on where the pages happened to lie, and at 2.7 GB/s into huge ones.
Whoever computes with the bytes where they land may make the memory himself; then each buffer has its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress

from runtime.errors import memory_refused
from runtime.units import size

HUGE = 2 << 20
"""The size of a huge page."""
HAS_HUGE = hasattr(mmap, "MADV_HUGEPAGE")
SLAB_BYTES = 256 << 20
"""Buffers are cut from stretches of about this size where there are huge pages; else each has its own."""
Make = Callable[[int], memoryview]
"""Makes writable memory of so many bytes, at any address."""
GRAIN = 64 << 10
"""Capacities are multiples of this, so that buffers of nearly one size serve each other."""


def address(view: memoryview) -> int:
    """Where the first byte of a writable, contiguous, non-empty view lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def aligned(nbytes: int, alignment: int, phase: int = 0) -> memoryview:
    """Fresh memory of `nbytes` whose first address is congruent to `phase` modulo `alignment`, a power of two."""
    spare = max(alignment - mmap.PAGESIZE, 0)
    return _shifted(fresh(nbytes + phase % alignment + spare), nbytes, alignment, phase)


def fresh(nbytes: int) -> memoryview:
    """Memory nobody has touched, at a page's address; what is never touched takes none. The kernel gives huge pages
    where it can, and only for whole ones, so that no more is taken than was asked for. Raises DoesNotFitError."""
    whole = nbytes // HUGE * HUGE if HAS_HUGE else 0
    # Python's own default would be shared memory, of which there are no huge pages.
    try:
        area = mmap.mmap(-1, nbytes + (HUGE if whole else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise memory_refused(f"{size(nbytes)} of memory to read into") from None
    memory = memoryview(area)
    start = -address(memory) % HUGE if whole else 0
    if whole:
        with suppress(OSError):  # a kernel built without them
            area.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory[start : start + nbytes]


def _shifted(memory: memoryview, nbytes: int, alignment: int, phase: int) -> memoryview:
    shift = (phase - address(memory)) % alignment
    return memory[shift : shift + nbytes]


def nothing() -> None:
    """Where nothing is to be done."""


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

    def keep(self) -> memoryview:
        """Instead of `release`: the bytes are the caller's for good, and count in the pool no more."""
        self._pool.part_with(self)
        self._pool.after_release()
        return self.view


class BufferPool:
    """Buffers in use and spare ones, together above `limit_bytes` only where more are taken than it has room for.

    Safe to call from several threads at once; nothing here waits.
    """

    def __init__(self, limit_bytes: int, alignment: int = mmap.PAGESIZE, make: Make | None = None) -> None:
        """make: where the memory of a buffer comes from; None: mapped afresh, in huge pages where there are some."""
        self.limit_bytes, self.alignment = limit_bytes, alignment
        self._own = make
        self.after_release: Callable[[], None] = nothing
        """Called when somebody has released a buffer: there is room."""
        self.in_use = 0
        self.peak_bytes = 0
        self.made = 0
        self._untouched: dict[int, list[memoryview]] = {}
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

    def take(self, nbytes: int, phase: int = 0, room: int = 0) -> Buffer:
        """A buffer of `nbytes` at `phase`. Its bytes may be anything. Never refused: the limit is the caller's to keep.

        room: what it could hold at least, so that buffers of several sizes serve each other. Beyond the limit nothing
        is kept when it is given back. Raises DoesNotFitError when the system has no memory left for one.
        """
        capacity = self.cost(max(nbytes, room))
        with self._lock:
            same = self._spare.get(capacity)
            if same:
                memory = same.pop()
                self._spare_bytes -= capacity
            else:
                self._drop_spares(self.limit_bytes - self.in_use - capacity)
                memory = self._make(capacity)
            buffer = Buffer(self, memory, _shifted(memory, nbytes, self.alignment, phase))
            self._out.add(buffer)
            self.in_use += capacity
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back. Raises ValueError for one that is not out: it was given back before."""
        with self._lock:
            self._leaves(buffer)
            capacity = buffer.capacity
            if self.held_bytes + capacity <= self.limit_bytes:
                self._spare.setdefault(capacity, []).append(buffer._memory)
                self._spare_bytes += capacity
            else:
                self._unmake(buffer._memory)

    def part_with(self, buffer: Buffer) -> None:
        """Somebody keeps a buffer. Raises ValueError for one that is not out."""
        with self._lock:
            self._leaves(buffer)

    def resize(self, limit_bytes: int) -> None:
        """Another limit from now on. What is in use stays."""
        with self._lock:
            self.limit_bytes = limit_bytes
            self._drop_spares(limit_bytes - self.in_use)
        self.after_release()

    def _leaves(self, buffer: Buffer) -> None:
        if buffer not in self._out:
            raise ValueError("this buffer was given back before")
        self._out.remove(buffer)
        self.in_use -= buffer.capacity

    def _make(self, capacity: int) -> memoryview:
        """Memory for one buffer, cut from a stretch that is mapped for several."""
        self.made += 1
        if self._own is not None:
            return self._own(capacity)
        untouched = self._untouched.setdefault(capacity, [])
        if not untouched:
            count = max(1, min(SLAB_BYTES, self.limit_bytes) // capacity) if HAS_HUGE else 1
            slab = fresh(count * capacity)
            untouched += [slab[n * capacity :][:capacity] for n in reversed(range(count))]
        return untouched.pop()

    def _unmake(self, memory: memoryview) -> None:
        """Let go of a buffer's memory: its pages go back to the system, its place can be used again."""
        area = memory.obj  # alone there, it goes with the last view of it
        if isinstance(area, mmap.mmap) and len(area) >= 2 * memory.nbytes:
            area.madvise(mmap.MADV_DONTNEED, address(memory) - address(memoryview(area)), memory.nbytes)
            self._untouched[memory.nbytes].append(memory)

    def _drop_spares(self, until: int) -> None:
        """Let go of spare memory, whatever its size, until no more than `until` bytes of it are left."""
        while self._spare_bytes > max(until, 0):
            capacity = next(c for c, spares in self._spare.items() if spares)
            self._unmake(self._spare[capacity].pop())
            self._spare_bytes -= capacity
