"""The drives of a run: named by the user, opened, looked through, made into what the expert store reads from."""

from __future__ import annotations

import mmap
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.drives.buffers import BufferPool
from runtime.drives.crew import Counts
from runtime.drives.device import Device, DeviceError
from runtime.drives.identity import identify, same_device
from runtime.drives.jobs import MIB, DriveSpec, Policy
from runtime.drives.reader import Reader
from runtime.drives.real import BOUNCE_BYTES, RealDevice
from runtime.drives.throttled import Limit, ThrottledDevice
from runtime.errors import StorageError, UsageError
from runtime.weights.placement import MODEL, ExpertFiles, Gathering, Holder, Placement, Shards
from runtime.weights.reads import DriveReads

SMALL_BYTES = MIB
"""Below this, experts in the model directory alone are read plainly."""

DEPTH = 4
"""Reads in flight on a drive."""

POLICY = Policy(max_hedge_leases=4)
SPOILED = 8
"""Buffers set aside for reads that nobody waits for any more and that have not ended."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Layout:
    """Where experts may be, beside the model directory or, with `limits`, behind limits instead of it.

    directories: (name, path). Raises UsageError for names that are used twice or taken, and paths that are none.
    """

    directories: tuple[tuple[str, Path], ...] = ()
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        names = [MODEL, *(name for name, _ in self.directories), *(limit.name for limit in self.limits)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise UsageError(f"the drive name {name!r} has other signs than letters, digits, '.', '_' and '-'")
            if names.count(name) > 1:
                taken = "the model directory's" if name == MODEL else "given twice"
                raise UsageError(f"the drive name {name!r} is {taken}: give every drive a name of its own")
        for name, path in self.directories:
            if not path.is_dir():
                raise UsageError(f"--drive {name}={path}: there is no such directory")

    @property
    def is_plain(self) -> bool:
        """Nothing was asked for: the model directory is the only drive."""
        return not self.directories and not self.limits


class Drives:
    """The drives of a run: opened and looked through, ready to be read from.

    `settings`, by drive, for the record; `notes`, what a person should know. Raises CheckpointError when an expert has
    no holder, StorageError when a drive cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, layout: Layout) -> None:
        self._checkpoint = checkpoint
        holders: list[Holder] = [Shards(limit.name, checkpoint) for limit in layout.limits]
        holders = holders or [Shards(MODEL, checkpoint)]
        holders += [ExpertFiles(name, path, checkpoint) for name, path in layout.directories]
        self.placement = Placement(checkpoint, holders)
        paths = {holder.name: checkpoint.path for holder in holders} | dict(layout.directories)
        limits = {limit.name: limit for limit in layout.limits}
        self._devices: list[Device] = []
        self.reader: Reader | None = None
        self.settings: dict[str, dict[str, object]] = {}
        try:
            for holder in self.placement.holders:
                limit = limits.get(holder.name)
                self._devices.append(self._open(holder, paths[holder.name], limit))
                self.settings[holder.name] = {
                    "path": str(paths[holder.name]),
                    "experts": int(np.count_nonzero(holder.here)),
                    "limit_bytes_per_s": limit and limit.rate,
                    "limit_latency_s": limit and limit.latency_s,
                }
        except BaseException:
            self.close()
            raise
        self.alignment = max(mmap.PAGESIZE, *(device.alignment for device in self._devices))
        self.unit_bytes = BufferPool(0, self.alignment).cost(checkpoint.expert_nbytes)
        self.notes = self.placement.notes + self._shared(paths, limits)

    def _open(self, holder: Holder, path: Path, limit: Limit | None) -> Device:
        try:
            device: Device = RealDevice(holder.name, path)
        except DeviceError as error:
            raise StorageError(f"drive {holder.name}: {path} cannot be read: {error}") from None
        if isinstance(holder, Shards) and self._checkpoint.scattered:
            device = Gathering(device, self._checkpoint)
        return device if limit is None else ThrottledDevice(device, limit)

    def _shared(self, paths: dict[str, Path], limits: dict[str, Limit]) -> list[str]:
        """Real drives that are one device. Simulated ones are one on purpose."""
        real = [device.name for device in self._devices if device.name not in limits]
        with suppress(OSError):
            groups = same_device({name: identify(paths[name]) for name in real})
            return [f"drives {' and '.join(g)} are one device, and give no more than one" for g in groups]
        return []

    @property
    def extra_bytes(self) -> int:
        """Memory that reading takes beside the buffers of the budget, at most."""
        direct = sum(device.alignment > 1 for device in self._devices)
        bounces = direct * DEPTH if self._checkpoint.scattered else min(direct * DEPTH, POLICY.max_bounces)
        checks = len(self._devices) * min(POLICY.check_bytes, self._checkpoint.expert_nbytes)
        hedges = POLICY.max_hedge_leases * (len(self._devices) > 1)
        return (SPOILED + hedges) * self.unit_bytes + bounces * BOUNCE_BYTES + checks

    def lines(self) -> list[str]:
        """Each drive with its mode and what it holds, for people."""
        total = self._checkpoint.experts_here.size
        said = []
        for device in self._devices:
            facts = self.settings[device.name]
            limit = facts["limit_bytes_per_s"]
            behind = f", behind a limit of {limit / 1e6:g} MB/s" if isinstance(limit, float) else ""
            said.append(f"{device.name}: {facts['experts']:,} of {total:,} experts, {device.mode}{behind}")
        return said + self.notes

    def start(self, budget_bytes: int) -> DriveReads:
        """Begin: the buffers under way and kept never take more than `budget_bytes`, which is the store's to see to."""
        pool = BufferPool(budget_bytes + SPOILED * self.unit_bytes, self.alignment)
        specs = [(device, DriveSpec(device.name, DEPTH, None, 0.0, device.alignment)) for device in self._devices]
        self.reader = Reader(specs, pool, policy=POLICY)
        return DriveReads(
            self._checkpoint, self.placement, self.reader, self.unit_bytes, budget_bytes // self.unit_bytes
        )

    def counts(self) -> tuple[dict[str, Counts], dict[str, Counts], dict[str, str]]:
        """By drive, by kind, and the mode of each drive."""
        assert self.reader is not None
        return *self.reader.counts(), self.reader.modes()

    def close(self) -> None:
        """Stop reading. Reads that hang are left behind."""
        if self.reader is not None:
            self.reader.close()
        else:
            for device in self._devices:
                device.close()


def open_drives(checkpoint: Checkpoint, layout: Layout) -> Drives | None:
    """The drives of a run, or None where one plain directory of small experts needs none of it."""
    if layout.is_plain and checkpoint.expert_nbytes < SMALL_BYTES:
        return None
    return Drives(checkpoint, layout)
