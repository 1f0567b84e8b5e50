"""Snapshots on disk: what memory lets go, and what is left when the program ends.

One file each, in a directory that the user names, of at most so many bytes together; the one used longest ago goes
first, whichever engine's it is: what an older release has left there counts, and would else never go. A file says which
engine it is of and carries the digest of its bytes: what is another engine's is never gone on from, nor is what is
damaged, which is removed. Files of other names are never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

import runtime
from runtime.checkpoint.arrays import Unreadable, pack_arrays, read_arrays, words_in
from runtime.checkpoint.headers import scan
from runtime.errors import CheckpointError, StorageError
from runtime.generate.engine import Engine
from runtime.generate.record import versions
from runtime.generate.snapshots import Snapshot
from runtime.home import write_whole
from runtime.model.state import arrays_of_state, state_of_arrays

SUFFIX = ".snapshot.safetensors"
IDS, LOGITS, ENGINE = "ids", "logits", "engine"


class Spill:
    """The snapshots of one engine in a directory. `tell` hears, once, why one could not be written."""

    def __init__(self, directory: Path, budget_bytes: int, engine: Engine, tell: Callable[[str], None]) -> None:
        self._directory, self._budget_bytes, self._engine, self._tell = directory, budget_bytes, engine, tell
        self._told = False
        self._identity = identity(engine)
        self._ids: dict[Path, tuple[int, ...]] = {}
        for path in directory.glob(f"*{SUFFIX}"):
            if (ids := self._ids_in(path)) is not None:
                self._ids[path] = ids

    def __len__(self) -> int:
        return len(self._ids)

    def longest(self, prompt: Sequence[int], beyond: int) -> Snapshot | None:
        """The longest of more than `beyond` tokens that the prompt extends, or equals when the logits are there."""
        ids = tuple(prompt)
        fitting = [path for path, kept in self._ids.items() if len(kept) > beyond and ids[: len(kept)] == kept]
        for path in sorted(fitting, key=lambda path: len(self._ids[path]), reverse=True):
            snapshot = self._read(path)
            if snapshot is not None and (len(snapshot.ids) < len(ids) or snapshot.logits is not None):
                return snapshot
        return None

    def write(self, snapshot: Snapshot) -> None:
        """Keep it, unless it is there; what cannot be written is let go."""
        name = hashlib.sha256((self._identity + json.dumps(snapshot.ids)).encode()).hexdigest()[:32]
        path = self._directory / f"{name}{SUFFIX}"
        if path in self._ids or snapshot.nbytes > self._budget_bytes:
            return
        arrays = arrays_of_state(snapshot.state, self._engine.ops) | {IDS: np.array(snapshot.ids, np.int64)}
        if snapshot.logits is not None:
            arrays[LOGITS] = snapshot.logits
        data = pack_arrays(arrays, {ENGINE: self._identity})
        if len(data) > self._budget_bytes:
            return
        try:
            self._make_room(len(data))
            write_whole(path, data)
        except OSError as error:
            if not self._told:
                self._told = True
                self._tell(f"cannot keep a conversation in {self._directory}: {error.strerror or error}")
            return
        self._ids[path] = snapshot.ids
        _mark_used(path)

    def _make_room(self, nbytes: int) -> None:
        """Remove the files used longest ago, whichever engine's they are."""
        files = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            with suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime_ns, found.st_size, path))
        held = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if held + nbytes <= self._budget_bytes:
                return
            self._remove(path)
            held -= size

    def _read(self, path: Path) -> Snapshot | None:
        """The snapshot, marked as used. None where it cannot be read now; and the file is gone, where it is damaged."""
        engine = self._engine
        try:
            arrays, _ = read_arrays(path)
            ids = tuple(arrays.pop(IDS).tolist())
            logits = arrays.pop(LOGITS, None)
            state = state_of_arrays(engine.config, engine.ops, engine.context, len(ids), arrays)
        except Unreadable:
            return None
        except (CheckpointError, KeyError, ValueError):
            self._remove(path)
            return None
        _mark_used(path)
        return Snapshot(ids, state, logits, engine.snapshot_nbytes(len(ids)))

    def _ids_in(self, path: Path) -> tuple[int, ...] | None:
        """The tokens of a file of this engine."""
        try:
            header = scan(path)
            if words_in(header.raw).get(ENGINE) == self._identity:
                ids = next(span for span in header.spans if span.name == IDS)
                with path.open("rb") as file:
                    file.seek(ids.offset)
                    return tuple(np.frombuffer(file.read(ids.nbytes), np.int64).tolist())
        except (OSError, CheckpointError, StorageError, ValueError, StopIteration):
            pass
        return None

    def _remove(self, path: Path) -> None:
        self._ids.pop(path, None)
        with suppress(OSError):
            path.unlink()


def _mark_used(path: Path) -> None:
    """Note the time, finer than a file system does by itself, so that the order of use is known."""
    now = time.time_ns()
    with suppress(OSError):
        os.utime(path, ns=(now, now))


def identity(engine: Engine) -> str:
    """What a state depends on beside its tokens: weights, arithmetic, build and machine.

    By design the bits of `cpu` are the same on every processor, whatever its vectors; but NumPy's and MLX's are not,
    and what a compiler has made of the design elsewhere nobody compares when a conversation goes on. So a state is
    used where it was made: by the same sources, libraries and processor. Elsewhere it is computed anew.
    """
    parts = (
        engine.checkpoint.fingerprint,
        engine.ops.name,
        engine.model.trunk.precision,
        *(f"{name}-{version}" for name, version in versions().items()),
        sources(),
        platform.machine(),
        processor(),
    )
    return " ".join(parts)


def sources() -> str:
    """A digest of this program's arithmetic, which may change between two releases."""
    here = Path(runtime.__file__).parent
    files = sorted(path for room in ("model", "ops") for path in (here / room).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def processor() -> str:
    """The name of its kind, and a digest of what it can do, as the compiler sees it."""
    import llvmlite.binding as llvm

    features = ""
    with suppress(RuntimeError):  # not told of every system
        features = llvm.get_host_cpu_features().flatten()
    return f"{llvm.get_host_cpu_name()}-{hashlib.sha256(features.encode()).hexdigest()[:16]}"
