"""Drives behind the operating system: `preadv` past its cache, wherever that can be had, and the truth about it.

A direct read moves whole blocks to addresses that fit. A span that begins or ends inside a block is read through an
aligned window, in one call with up to three parts: its first block and its last go to scratch memory of two blocks,
of which the wanted bytes are copied out; everything between lands where it is wanted. So a read moves at most two
blocks more than it was asked for, touches nothing outside, and copies less than two blocks. Where the address does
not fit the place in the file everything goes through a bounce buffer.

"Direct" is believed only after a read: file systems in memory take O_DIRECT and read from memory. The kernel counts
per thread what came from storage; a second direct read of the same block that it does not count was no direct read.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from heapq import nlargest
from itertools import islice
from pathlib import Path

from runtime.drives.buffers import address, aligned
from runtime.drives.device import DeviceError
from runtime.drives.jobs import MIB, Fault
from runtime.drives.kernel import device_bytes_read
from runtime.errors import StorageError

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
F_RDAHEAD, F_NOCACHE = 45, 48  # macOS <sys/fcntl.h>
BLOCKS = (4096, 16384, 65536)
"""Alignments tried for direct reads, smallest first. Devices with blocks of 512 bytes take 4096, too."""
BOUNCE_BYTES = 4 * MIB
CALL_BYTES = 1 << 30
"""The most one call is asked for; above 2^31 some systems refuse."""
PROBE_LOOK = 4096
"""Directory entries looked at for a file to probe with."""
PROBE_TRIES = 8
"""Files tried: one bad file is no bad drive."""

_FILE_GONE = ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EACCES", "EPERM")
_DRIVE_GONE = ("ENODEV", "ENXIO", "ENOMEDIUM", "ESTALE", "ENOTCONN", "ESHUTDOWN")
GONE = frozenset(getattr(errno, name) for name in _FILE_GONE + _DRIVE_GONE if hasattr(errno, name))
"""System errors that say the drive or the file is not there (any more)."""


# --- descriptors ---


@dataclass(slots=True, eq=False)
class _Open:
    fd: int
    users: int = 1
    stale: bool = False


class Descriptors:
    """Open files, shared by all drives. At most `budget` stay open; the one unused for longest is closed first.

    Files being read are never closed; when they alone exceed the budget they are still opened, and when the system
    has no descriptor left, opening waits for another read to end. Opening and closing happen outside the lock: a
    drive that hangs holds up nobody else.
    """

    def __init__(self, budget: int | None = None) -> None:
        """`budget`: default a quarter of the process's soft limit, at most 1024; the rest is for everybody else."""
        self.budget = max(1, budget if budget is not None else min(1024, _soft_limit() // 4))
        self._files: OrderedDict[tuple[object, str], _Open] = OrderedDict()
        self._change = threading.Condition()
        self.opens = 0

    @property
    def held(self) -> int:
        return len(self._files)

    @contextmanager
    def borrow(self, owner: object, path: str, opener: Callable[[str], int]) -> Iterator[int]:
        """The descriptor of a file, open for as long as the block lasts. Raises OSError."""
        key = (owner, path)
        with self._change:
            file = self._files.get(key)
            if file is not None:
                file.users += 1
                self._files.move_to_end(key)
        if file is None:
            file = self._open(key, opener)
        try:
            yield file.fd
        finally:
            with self._change:
                file.users -= 1
                done = [file.fd] if file.stale and not file.users else []
                done += self._surplus(self.budget)
                self._change.notify_all()
            _close(done)

    def _open(self, key: tuple[object, str], opener: Callable[[str], int]) -> _Open:
        with self._change:
            done = self._surplus(self.budget - 1)
        _close(done)
        fd = self._open_when_possible(key[1], opener)
        with self._change:
            self.opens += 1
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = _Open(fd)
                return file
            file.users += 1  # another thread was quicker
        os.close(fd)
        return file

    def _open_when_possible(self, path: str, opener: Callable[[str], int]) -> int:
        for patience in (1.0, 4.0, None):
            try:
                return opener(path)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or patience is None:
                    raise
            with self._change:
                done = self._surplus(0)
                if not done:
                    self._change.wait(patience)
                    done = self._surplus(0)
            _close(done)
        raise AssertionError

    def _surplus(self, budget: int) -> list[int]:
        """Take unused files out until `budget` are left; the caller closes them once it has left the lock."""
        done = []
        for key in [k for k, f in self._files.items() if not f.users] if len(self._files) > budget else []:
            done.append(self._files.pop(key).fd)
            if len(self._files) <= budget:
                break
        return done

    def forget(self, owner: object, path: str | None = None) -> None:
        """Close a drive's files, or one of them; those being read once that has ended."""
        with self._change:
            done = []
            for key in [k for k in self._files if k[0] == owner and path in (None, k[1])]:
                file = self._files.pop(key)
                file.stale = True
                if not file.users:
                    done.append(file.fd)
        _close(done)


@cache
def shared_descriptors() -> Descriptors:
    """Those of the process: drives share one budget."""
    return Descriptors()


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _soft_limit() -> int:
    try:
        import resource
    except ImportError:
        return 256
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if soft == resource.RLIM_INFINITY else soft


# --- the device ---


class _EndOfFile(Exception):
    def __init__(self, at: int) -> None:
        self.at = at


class RealDevice:
    """One drive: everything below `root`. Files are named relative to it, or absolutely.

    alignment: 1 when the mode is `buffered`; then reads go straight to any address.
    """

    def __init__(
        self, name: str, root: str | Path, *, probe: str | Path | None = None, descriptors: Descriptors | None = None
    ) -> None:
        """`probe`: path of the file to find the mode out with; without it, the largest of the first ones below `root`
        that can be read.

        Raises DeviceError when the root is not there or no file to probe with can be read.
        """
        self._name, self.root = name, Path(root)
        self._descriptors = descriptors if descriptors is not None else shared_descriptors()
        self._local = threading.local()
        self._bounces: list[memoryview] = []
        self._plain: set[str] = set()
        if not self.root.exists():
            raise DeviceError(Fault.GONE, f"drive {name}: {self.root} is not there")
        candidates = _some_files(self.root) if probe is None else [str(probe)]
        self.probe_file = candidates[0] if candidates else None
        self._way, self._alignment, self._mode = "buffered", 1, "buffered: no file to probe with"
        for number, self.probe_file in enumerate(candidates, 1):
            try:
                self._find_mode(self.probe_file)
                break
            except DeviceError:
                if number == len(candidates):
                    raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def alignment(self) -> int:
        return self._alignment

    @property
    def mode(self) -> str:
        return self._mode

    def read(self, file: str, offset: int, into: memoryview) -> int:
        path, moved, done = self._path(file), 0, 0
        while done < len(into):
            size = min(len(into) - done, CALL_BYTES - (offset + done) % self._alignment)
            moved += self._read(path, offset + done, into[done : done + size], offset, len(into), done)
            done += size
        return moved

    def close(self) -> None:
        self._descriptors.forget(self)

    def _path(self, file: str) -> str:
        return os.path.join(self.root, file)

    def _read(self, path: str, at: int, into: memoryview, offset: int, wanted: int, done: int) -> int:
        """One call's worth. `offset`, `wanted` and `done` belong to the whole read and go into the message."""
        where, plain = f"{path} at {offset}: wanted {wanted} bytes", path in self._plain
        try:
            with self._descriptors.borrow(self, path, self._open) as fd:
                return self._fill(fd, path, at, into)
        except _EndOfFile as end:
            self._descriptors.forget(self, path)  # it may be replaced by a whole one
            got = max(end.at - offset, 0)
            raise DeviceError(Fault.SHORT, f"{where}, got {got}: the file ends there") from None
        except OSError as error:
            if error.errno == errno.EINVAL and self._way == "direct" and not plain:  # another may find out meanwhile
                self._go_plain(path, "does not allow direct reads")
                return self._read(path, at, into, offset, wanted, done)
            self._descriptors.forget(self)  # of a drive that comes back, every descriptor is dead
            fault = Fault.GONE if error.errno in GONE else Fault.IO
            raise DeviceError(fault, f"{where}, got {done}: {error.strerror or error}") from error

    # --- how it is opened ---

    def _open(self, path: str) -> int:
        if self._way == "direct" and path not in self._plain:
            try:
                return _open_regular(path, O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._go_plain(path, "does not allow direct reads")
        fd = _open_regular(path, 0)
        if self._way == "nocache":
            _no_cache(fd)
        return fd

    def _go_plain(self, path: str, reason: str) -> None:
        """This file, unlike the one probed, is read through the cache from now on; say so."""
        self._plain.add(path)
        self._descriptors.forget(self, path)
        self._mode = f"buffered: {path} {reason}"

    def _find_mode(self, path: str) -> None:
        reason = "this system has no direct reads"
        try:
            if sys.platform == "darwin":
                reason = self._try_nocache(path)
            elif O_DIRECT:
                reason = self._try_direct(path)
            if reason:
                self._way, self._alignment, self._mode = "buffered", 1, f"buffered: {reason}"
                self._try(path, 0, 1)
        except OSError as error:
            fault = Fault.GONE if error.errno in GONE else Fault.IO
            raise DeviceError(fault, f"drive {self._name}: {path}: {error.strerror or error}") from error

    def _try_direct(self, path: str) -> str:
        """Set the mode to direct, with the smallest alignment that works, or say why that cannot be."""
        reason = ""
        for block in BLOCKS:
            try:
                self._try(path, O_DIRECT, block)
                got, counted = self._try(path, O_DIRECT, block)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                reason = f"{path}: O_DIRECT: {error.strerror}"
                continue
            if counted is not None and counted < got:
                return f"{path}: a direct read fetched {counted} of {got} bytes from a device, the rest from memory"
            self._way, self._alignment, self._mode = "direct", block, "direct"
            return ""
        return reason

    def _try_nocache(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY)
        try:
            _no_cache(fd)
        except OSError as error:
            return f"{path}: F_NOCACHE: {error.strerror}"
        finally:
            os.close(fd)
        self._try(path, 0, mmap.PAGESIZE)
        self._way, self._alignment, self._mode = "nocache", mmap.PAGESIZE, "nocache"
        return ""

    def _try(self, path: str, flags: int, block: int) -> tuple[int, int | None]:
        """Read the first block that is not a hole: its bytes, and how many of them the kernel fetched from a device."""
        fd = _open_regular(path, flags)
        try:
            at = _first_data(fd)
            scratch = aligned(max(block, mmap.PAGESIZE), block)
            before = device_bytes_read(this_thread=True)
            got = os.preadv(fd, [scratch], at - at % block)
            after = device_bytes_read(this_thread=True)
        finally:
            os.close(fd)
        return got, None if before is None or after is None else after - before

    # --- how it is read ---

    def _fill(self, fd: int, path: str, offset: int, into: memoryview) -> int:
        block, wanted = self._alignment, len(into)
        if block == 1 or path in self._plain:
            moved = _pull(fd, [into], offset, offset + wanted, 1)
            _drop_cached(fd, offset, wanted)
            return moved
        if (address(into) - offset) % block:
            return self._bounce(fd, offset, into)
        head, tail = offset % block, (offset + wanted) % block
        first = (block - head) % block
        if not head and not tail:
            return _pull(fd, [into], offset, offset + wanted, block)
        scratch = self._scratch()
        if wanted <= first + tail:  # no whole block of the window is wanted: one block, or two
            window = -(-(head + wanted) // block) * block
            moved = _pull(fd, [scratch[:window]], offset - head, offset + wanted, block)
            into[:] = scratch[head : head + wanted]
            return moved
        views = [into[first : wanted - tail]]
        if head:
            views.insert(0, scratch[:block])
        if tail:
            views.append(scratch[block:])
        moved = _pull(fd, views, offset - head, offset + wanted, block)
        if head:
            into[:first] = scratch[head:block]
        if tail:
            into[wanted - tail :] = scratch[block : block + tail]
        return moved

    def _bounce(self, fd: int, offset: int, into: memoryview) -> int:
        """Read to an address that does not fit: through a buffer that does, part by part, and copy."""
        block, end, at, moved = self._alignment, offset + len(into), offset, 0
        try:
            buffer = self._bounces.pop()
        except IndexError:
            buffer = aligned(BOUNCE_BYTES, block)
        try:
            while at < end:
                low = at - at % block
                high = min(low + BOUNCE_BYTES, end)
                window = -(-(high - low) // block) * block
                moved += _pull(fd, [buffer[:window]], low, high, block)
                into[at - offset : high - offset] = buffer[at - low : high - low]
                at = high
        finally:
            self._bounces.append(buffer)
        return moved

    def _scratch(self) -> memoryview:
        """Two blocks of this thread's own."""
        scratch: memoryview | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = aligned(2 * self._alignment, self._alignment)
        return scratch


def _pull(fd: int, views: list[memoryview], at: int, end: int, block: int) -> int:
    """Read from `at` into the views, one after the other, until `end`; partial reads are continued.

    The views may reach beyond `end`, to the end of its block. Returns the bytes the device moved: whole blocks.
    Raises _EndOfFile where the file ends before `end`; OSError.
    """
    moved = 0
    while True:
        got = os.preadv(fd, views, at)
        moved += -(-got // block) * block
        if at + got >= end:
            return moved
        whole = got - got % block  # a direct read can only go on at a block
        if not got or at + got >= os.fstat(fd).st_size:
            raise _EndOfFile(at + got)
        if not whole:
            raise OSError(errno.EIO, f"a read gives {got} bytes, less than a block, before the file ends")
        at += whole
        views = _after(views, whole)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """The views without their first `nbytes`."""
    for i, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[i + 1 :]]
        nbytes -= len(view)
    return []


def _open_regular(path: str, flags: int) -> int:
    """Open for reading. Looks at the live descriptor: what is not a regular file is as good as not there."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)  # a named pipe must not hold us up
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENOENT, "not a regular file")
    return fd


def _first_data(fd: int) -> int:
    """Where a sparse file begins to have bytes of its own; 0 where that is not known."""
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except (OSError, AttributeError):
        return 0


def _no_cache(fd: int) -> None:
    fcntl.fcntl(fd, F_NOCACHE, 1)
    fcntl.fcntl(fd, F_RDAHEAD, 0)


def _drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """A buffered read leaves nothing behind: what the cache holds is not in anybody's memory plan."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _some_files(root: Path) -> list[str]:
    """The largest regular files among the first ones found below `root`, or `root` itself; those on its drive first.

    Directories on other drives are not looked into.
    """
    if root.is_file():
        return [str(root)]
    device = os.stat(root).st_dev
    found = (
        (facts.st_dev == device, facts.st_size, path)
        for path, facts in islice(entries_below(root), PROBE_LOOK)
        if stat.S_ISREG(facts.st_mode) and facts.st_size
    )
    return [path for *_, path in nlargest(PROBE_TRIES, found)]


def entries_below(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """What is in `root` and the directories below it that lie on its device, in the order of names; no directories.

    What cannot be looked at is passed over. Raises OSError when the root cannot be.
    """
    device = os.stat(root).st_dev
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if device_of(os.path.join(folder, f)) == device)
        for name in sorted(names):
            path = os.path.join(folder, name)
            try:
                facts = os.stat(path)
            except OSError:
                continue
            yield path, facts


def open_drive(name: str, path: Path, probe: Path | None = None) -> RealDevice:
    """The drive of a directory. Raises StorageError, for people, where `RealDevice` raises DeviceError."""
    try:
        return RealDevice(name, path, probe=probe)
    except DeviceError as error:
        why = str(error).removeprefix(f"drive {name}: ")
        where = "" if str(path) in why else f"{path} cannot be read: "
        raise StorageError(f"drive {name}: {where}{why}") from None


def device_of(path: str) -> int | None:
    """The number of the device that a directory entry lies on; None where it cannot be looked at."""
    try:
        return os.lstat(path).st_dev
    except OSError:
        return None
