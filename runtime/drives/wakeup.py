"""Threads that have little to do whenever something happens, and are to do it at once.

A reader asks a drive for the next bytes in microseconds, when the last ones have landed, and the drive has nothing to
do until then. Where all processors compute, Linux may let a thread that wakes wait for the end of another's time slice.
Threads that ask for short slices go first. It needs no privilege and takes nothing from others: the share of each stays
what it is. On two processors that computed, the first read of a layer began 1.4 to 2 ms after it was asked for in 8 of
13 runs without it, and in none of 10 with it, where it was 0.7 ms at most.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

SLICE_NS = 100_000
"""The shortest that can be asked for."""

_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_SET, _GET = _CALLS.get(platform.machine(), (None, None)) if sys.platform == "linux" else (None, None)
"""Numbers of the system calls sched_setattr and sched_getattr."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period. See sched_setattr(2)."""
_RUNTIME = 5


def answer_at_once() -> None:
    """Ask for short time slices for the calling thread: on Linux 6.12 and later. Elsewhere nothing happens."""
    attributes = _get(0)
    if attributes is not None:
        attributes[_RUNTIME] = SLICE_NS
        ctypes.CDLL(None).syscall(_SET, 0, ctypes.c_char_p(_ATTRIBUTES.pack(*attributes)), 0)


def slice_ns(thread: int) -> int | None:
    """The time slice of a thread, by the system's number for it; None where there is none to be asked for.

    Zero before Linux 6.12.
    """
    attributes = _get(thread)
    return None if attributes is None else int(attributes[_RUNTIME])


def _get(thread: int) -> list[int] | None:
    if _GET is None:
        return None
    found = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if ctypes.CDLL(None).syscall(_GET, thread, found, _ATTRIBUTES.size, 0):
        return None
    return list(_ATTRIBUTES.unpack(found.raw))
