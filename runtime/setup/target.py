"""The directory that `replicate` writes to: a copy gets its name when it has been read back and found right.

Every copy is written under a name of its own, synced, read back past the page cache, compared, renamed. A process
that is killed in the middle leaves one such file, which the next one removes; one process at a time has the directory.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import expert_file
from runtime.checkpoint.manifest import COPY_NAME, Digest, Manifest, digest
from runtime.drives.buffers import aligned
from runtime.drives.device import DeviceError
from runtime.drives.real import Descriptors, RealDevice
from runtime.errors import StorageError, UsageError
from runtime.home import sync_folder
from runtime.setup.writing import hold, sync, uncached
from runtime.units import size
from runtime.weights.placement import FOLDERS, ExpertFiles

TARGET = "target"
PART = ".part"

_UNFINISHED = re.compile(rf"\.L[0-9]+-E[0-9]+\.bin{re.escape(PART)}|\.{re.escape(COPY_NAME)}\.[0-9a-f]{{8}}")


class Target:
    """A directory, held by this process from `open` to `close`. `files`: the copies that were there at the start.

    Raises UsageError when it is no directory or in use, StorageError when it cannot be written to.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path, floor_bytes: int) -> None:
        if not path.is_dir():
            raise UsageError(f"--to {path}: there is no such directory; make it, on the drive that is to have copies")
        self.path, self.floor_bytes = path, floor_bytes
        self.folder = path / FOLDERS[1] if (path / FOLDERS[1]).is_dir() else path
        self._nbytes = checkpoint.expert_nbytes
        self._device: RealDevice | None = None
        self._back: memoryview | None = None
        self._lock = self._hold()
        try:
            self._sweep()
            self.files = ExpertFiles(TARGET, path, checkpoint)
        except BaseException:
            self.close()
            raise

    def _hold(self) -> int:
        """Keep others out, as long as the descriptor is open."""
        try:
            return hold(self.path)
        except BlockingIOError:
            raise UsageError(f"--to {self.path}: another replicate is writing there; wait for it to end") from None
        except OSError as error:
            raise self._trouble("open", error) from None

    def _sweep(self) -> None:
        """Remove what earlier runs left unfinished; find out whether anything can be written."""
        try:
            for folder in {self.path, self.folder}:
                for name in os.listdir(folder):
                    if _UNFINISHED.fullmatch(name) and (folder / name).is_file():
                        (folder / name).unlink()
            probe = self.folder / f".{expert_file(0, 0)}{PART}"
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            raise self._trouble("write to", error) from None

    @property
    def mode(self) -> str:
        """How copies were read back; "" when none was."""
        return "" if self._device is None else self._device.mode

    @property
    def free_bytes(self) -> int:
        """On its file system, for everybody."""
        return shutil.disk_usage(self.folder).free

    def put(self, layer: int, expert: int, data: memoryview, wanted: Digest) -> None:
        """Write a copy. Raises StorageError, and then there is nothing new: no room, or not what was written."""
        free = self.free_bytes
        if free - len(data) < self.floor_bytes:
            raise StorageError(
                f"{self.path}: {size(free)} are free, and {size(self.floor_bytes)} are to stay free: no room for the "
                "next copy; those that are there stay. Make room, or give a smaller --budget or --floor"
            )
        final = self._place(layer, expert)
        unfinished = final.with_name(f".{final.name}{PART}")
        try:
            _write(unfinished, data)
            self._read_back(unfinished, wanted)
            os.replace(unfinished, final)
            sync_folder(final.parent)
        except OSError as error:
            raise self._trouble(f"write {final.name} to", error) from None
        finally:
            with suppress(OSError):
                unfinished.unlink()

    def _place(self, layer: int, expert: int) -> Path:
        """Where a copy is, or is to be."""
        name = expert_file(layer, expert)
        there = os.path.lexists(self.path / name)
        return (self.path if there else self.folder) / name

    def _read_back(self, path: Path, wanted: Digest) -> None:
        try:
            if self._device is None:
                self._device = RealDevice(TARGET, self.folder, probe=path, descriptors=Descriptors(1))
            if self._back is None:
                self._back = aligned(self._nbytes, self._device.alignment)
            self._device.read(path.name, 0, self._back)
        except DeviceError as error:
            raise StorageError(f"a copy that was just written cannot be read back: {error}") from None
        found = digest(self._back)
        if found.sha256 != wanted.sha256:
            wrong = np.flatnonzero(found.blocks != wanted.blocks)
            raise StorageError(
                f"{path}: what was written is not what is read back, in MiB {wrong[0] + 1}: "
                "this drive, or its cable, cannot be trusted"
            )

    def save(self, manifest: Manifest) -> None:
        """Put the manifest beside the copies. Raises StorageError."""
        try:
            manifest.save(self.path / COPY_NAME)
        except OSError as error:
            raise self._trouble(f"write {COPY_NAME} to", error) from None

    def _trouble(self, doing: str, error: OSError) -> StorageError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "; the copies that are there stay. Make room, or give a smaller --budget" if full else ""
        return StorageError(f"cannot {doing} {self.path}: {error.strerror or error}{advice}")

    def close(self) -> None:
        """Let others in."""
        if self._device is not None:
            self._device.close()
        os.close(self._lock)


def _write(path: Path, data: memoryview) -> None:
    """A new file, on the drive when this returns and not in memory. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        uncached(fd)
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:])
        sync(fd)
    finally:
        os.close(fd)
