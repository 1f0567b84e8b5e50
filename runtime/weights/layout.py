"""The drives of a run: named by the user, opened, looked through, made into what the expert store reads from."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import FILE_NAME, ConvertedTrunk
from runtime.drives.buffers import BufferPool, Make
from runtime.drives.crew import ReadCounts, Verify
from runtime.drives.device import Device
from runtime.drives.figures import is_name
from runtime.drives.identity import Identity, identify
from runtime.drives.jobs import DEPTH, MIB, DriveSpec, Job, Policy, Slice
from runtime.drives.kernel import DiskCounts, Witness
from runtime.drives.reader import Reader
from runtime.drives.real import BOUNCE_BYTES
from runtime.drives.remembered import recall
from runtime.drives.throttled import Limit, ThrottledDevice
from runtime.drives.trace import TraceLog
from runtime.drives.waits import TRUNK
from runtime.errors import CheckpointError, StorageError, UsageError
from runtime.units import per_second
from runtime.weights.ahead import BlockKey, TrunkReads
from runtime.weights.checks import ScaleCheck, TrunkCheck, VerifyReads
from runtime.weights.placement import MODEL, ExpertFiles, Holder, Placement, Shards, open_holder
from runtime.weights.reads import DriveReads
from runtime.weights.trunk import Precision

PLAIN_BYTES = MIB
"""Below this, experts in the model directory alone are read plainly."""

POLICY = Policy(max_hedge_leases=4)
SPOILED = 8
"""Buffers set aside for reads that nobody waits for any more and that have not ended."""


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
            if not is_name(name):
                raise UsageError(f"the drive name {name!r} has others than ASCII letters, digits, '.', '_' and '-'")
            if names.count(name) > 1:
                taken = "the model directory's" if name == MODEL else "given twice"
                raise UsageError(f"the drive name {name!r} is {taken}: give every drive a name of its own")
        for name, path in self.directories:
            if not path.is_dir():
                raise UsageError(f"drive {name}: there is no directory {path}")

    @property
    def is_plain(self) -> bool:
        """Nothing was asked for: the model directory is the only drive."""
        return not self.directories and not self.limits

    def paths(self, model: Path) -> dict[str, Path]:
        """Every drive's directory by its name, beside or instead of the model directory's."""
        return dict.fromkeys([limit.name for limit in self.limits] or [MODEL], model) | dict(self.directories)


class Drives:
    """The drives of a run: opened and looked through, ready to be read from.

    `settings`, by drive, for the record; `notes`, what a person should know. Raises CheckpointError when an expert has
    no holder, StorageError when that is because a drive cannot be read, or the model directory cannot.
    """

    def __init__(
        self, checkpoint: Checkpoint, layout: Layout, trace: TraceLog | None = None, trunk: Precision = "bf16"
    ) -> None:
        """trunk: in `int8`, it is read from every directory that has it converted; in `bf16`, from none of them."""
        self.trace = trace
        self.converted: ConvertedTrunk | None = None
        self._converted_on: dict[str, Path] = {}
        self._checkpoint = checkpoint
        released = [Shards(name, checkpoint) for name in [limit.name for limit in layout.limits] or [MODEL]]
        self._trunk_on = tuple(holder.name for holder in released)
        paths = layout.paths(checkpoint.path)
        limits = {limit.name: limit for limit in layout.limits}
        self._holders: list[Holder] = []
        self._devices: list[Device] = []
        self._specs: list[DriveSpec] = []
        self.reader: Reader | None = None
        self._witness: Witness | None = None
        self.settings: dict[str, dict[str, object]] = {}
        try:
            for shards in released:
                self._open(shards, paths[shards.name], "bf16", limits.get(shards.name))
            files, unusable = self._open_directories(layout, trunk)
            self.placement = self._place([*released, *files], unusable)
        except BaseException:
            self.close()
            raise
        self.alignment = max(mmap.PAGESIZE, *(device.alignment for device in self._devices))
        self.unit_bytes = BufferPool(0, self.alignment).cost(checkpoint.expert_nbytes)
        self.notes = unusable + self.placement.notes
        there = trunk == "int8" and any(os.path.lexists(path / FILE_NAME) for _, path in layout.directories)
        if there and self.converted is None:
            self.notes.append("no converted trunk can be read: int8 is made of the released weights")
        self._look_up(paths, limits)

    def _open(self, holder: Holder, path: Path, trunk: Precision | None, limit: Limit | None = None) -> None:
        device = open_holder(holder, path, self._checkpoint)
        self._devices.append(device if limit is None else ThrottledDevice(device, limit))
        self._holders.append(holder)
        self.settings[holder.name] = {
            "path": str(path),
            "experts": int(np.count_nonzero(holder.here)),
            "trunk": trunk,
            "limit_bytes_per_s": limit and limit.rate,
            "limit_latency_s": limit and limit.latency_s,
        }

    def _open_directories(self, layout: Layout, trunk: Precision) -> tuple[list[ExpertFiles], list[str]]:
        """(what they hold, why some cannot be used): a drive that fails now is as good as one that fails later."""
        files, unusable = [], []
        for name, path in layout.directories:
            try:
                holder, converted = ExpertFiles(name, path, self._checkpoint), None
                there = os.path.lexists(path / FILE_NAME)
                if there and trunk == "int8":
                    converted = self._open_converted(name, path / FILE_NAME)
                elif there and not holder.here.any():
                    holder.notes.append(f"drive {name}: {FILE_NAME} there is what --trunk int8 would read")
                if holder.here.any() or converted is not None:
                    self._open(holder, path, None if converted is None else "int8")
                if holder.here.any() or converted is None:
                    files.append(holder)
                if converted is not None:
                    self._take(name, converted)
            except StorageError as error:
                unusable.append(f"{error}; it is not used")
        return files, unusable

    def _open_converted(self, name: str, path: Path) -> ConvertedTrunk:
        try:
            return ConvertedTrunk.open(path, self._checkpoint)
        except StorageError as error:
            raise StorageError(f"drive {name}: {error}") from None

    def _take(self, name: str, converted: ConvertedTrunk) -> None:
        """A drive has the trunk converted. Raises CheckpointError for one that is not what another drive has."""
        if self.converted is not None and self.converted.sums != converted.sums:
            raise CheckpointError(
                f"{converted.path} and {self.converted.path} differ: python -m runtime convert tells which is damaged, "
                "given the directory of each as --out"
            )
        self.converted = self.converted or converted
        self._converted_on[name] = converted.path

    def _place(self, holders: Sequence[Holder], unusable: Sequence[str]) -> Placement:
        try:
            return Placement(self._checkpoint, holders)
        except CheckpointError as error:
            if not unusable:
                raise
            raise StorageError(f"{'; '.join(unusable)}; without it, {error}") from None

    def _look_up(self, paths: dict[str, Path], limits: dict[str, Limit]) -> None:
        """Find out which real drives are one device, and what probes have found of them. Simulated ones are unknown."""
        places: dict[Path, Identity] = {}
        for path in set(paths.values()):
            with suppress(OSError):
                places[path] = identify(path)
        self._disks = {name: places[path].disks for name, path in paths.items() if path in places}
        real = [device for device in self._devices if device.name not in limits]
        identities = {d.name: places[paths[d.name]] for d in real if paths[d.name] in places}
        recalled = recall(identities, {device.name: device.mode for device in real})
        self.notes += recalled.notes
        for device in self._devices:
            found, group = recalled.known.get(device.name), recalled.group_of(device.name)
            depth = DEPTH if found is None else found.depth
            rate, latency = (None, 0.0) if found is None else (found.bytes_per_s, found.latency_s)
            self._specs.append(DriveSpec(device.name, depth, rate, latency, device.alignment, group))
            self.settings[device.name] |= {
                "depth": depth,
                "bytes_per_s": rate,
                "latency_s": found and latency,
                "probed": found and found.at,
                "uplink": group,
            }
        self._uplinks = {group: rate for group, (_, rate) in recalled.groups.items() if rate is not None}

    @property
    def opened(self) -> list[tuple[Device, Holder]]:
        """Each drive of experts, to read from beside the reader, and what it holds."""
        return [(d, holder) for d, holder in zip(self._devices, self._holders, strict=True) if holder.here.any()]

    @property
    def _policy(self) -> Policy:
        """With one drive there is nothing to turn to: it is waited for as long as a read that is late."""
        return POLICY if len(self._devices) > 1 else replace(POLICY, check_timeout_s=POLICY.give_up_s)

    @property
    def hedges(self) -> int:
        """Second buffers for reads that are late, at most."""
        return POLICY.max_hedge_leases * (len(self._devices) > 1)

    @property
    def extra_bytes(self) -> int:
        """Memory that reading takes beside the buffers of the budget, at most."""
        direct = sum(spec.depth for spec in self._specs if spec.alignment > 1)
        bounces = direct if self._checkpoint.scattered else min(direct, POLICY.max_bounces)
        checks = len(self._devices) * min(POLICY.check_bytes, self._checkpoint.expert_nbytes)
        trace = 0 if self.trace is None else TraceLog.nbytes()
        scales = 0 if self.converted is None else self.converted.nbytes
        return (SPOILED + self.hedges) * self.unit_bytes + bounces * BOUNCE_BYTES + checks + trace + scales

    def lines(self) -> list[str]:
        """Each drive with its mode and what it holds, for people."""
        total = self._checkpoint.experts_here.size
        said = []
        for device in self._devices:
            facts = self.settings[device.name]
            experts = f"{facts['experts']:,} of {total:,} experts"
            said.append(f"{device.name}: {experts}{self._trunk_of(device.name)}, {device.mode}{_manner(facts)}")
        return said + self.notes

    def _trunk_of(self, name: str) -> str:
        """What of the trunk is read from a drive, for people."""
        if name in self._converted_on:
            return ", the trunk in int8"
        if name in self._trunk_on:
            return ", the trunk" if self.converted is None else ", of the trunk what stays as released"
        return ""

    def start(
        self,
        budget_bytes: int,
        verify: Verify | None = None,
        guesses: int = 0,
        streaming_bytes: int = 0,
        memory: Make | None = None,
    ) -> DriveReads:
        """Begin: the buffers under way and kept never take more than `budget_bytes`, which is the store's to see to,
        and of the trunk's blocks more than `streaming_bytes`, which is its own.

        verify: looks at what is read, see `Reader`, before its scales are looked at; guesses: how many experts may be
        guessed at once; memory: makes that of buffers, see `BufferPool`.
        """
        pool = BufferPool(budget_bytes + streaming_bytes + SPOILED * self.unit_bytes, self.alignment, memory)
        drives = list(zip(self._devices, self._specs, strict=True))
        scales = ScaleCheck(self._checkpoint)

        def check(part: Slice, view: memoryview) -> str:
            if isinstance(part.key, BlockKey):
                return ""
            return (verify(part, view) if verify is not None else "") or scales(part, view)

        trace, guess = (None, None) if self.trace is None else (self.trace.slice, self.trace.guess)
        self.reader = Reader(
            drives,
            pool,
            policy=self._policy,
            uplinks=self._uplinks,
            kind_of=_kind_of,
            verify=check,
            trace=trace,
            guess=guess,
        )
        self._witness = Witness(self._disks)
        ahead = budget_bytes // self.unit_bytes
        return DriveReads(self._checkpoint, self.placement, self.reader, self.unit_bytes, ahead, guesses)

    def trunk_reads(self, verify: VerifyReads = "first") -> TrunkReads:
        """How the trunk is read, and what is compared of one that is converted. After `start`."""
        assert self.reader is not None
        if self.converted is None:
            return TrunkReads(self._checkpoint, self.reader, self._trunk_on)
        on = self._converted_on
        check = TrunkCheck(self.converted, [(d, on[d.name]) for d in self._devices if d.name in on], verify)
        return TrunkReads(self._checkpoint, self.reader, self._trunk_on, self.converted, tuple(on), check)

    def counts(self) -> tuple[dict[str, ReadCounts], dict[str, ReadCounts], dict[str, str]]:
        """By drive, by kind, and the mode of each drive."""
        assert self.reader is not None
        return *self.reader.counts(), self.reader.modes()

    def witnessed(self) -> tuple[int | None, dict[str, tuple[tuple[str, ...], DiskCounts]]]:
        """What the system counted since the start.

        (bytes this process had fetched from storage, by disk the drives above it and what it has done for anybody).
        """
        assert self._witness is not None
        process, disks = self._witness.since()
        above = {disk: tuple(name for name, below in self._disks.items() if disk in below) for disk in disks}
        return process, {disk: (above[disk], counts) for disk, counts in disks.items()}

    def close(self) -> None:
        """Stop reading. Reads that hang are left behind."""
        if self._witness is not None:
            self._witness.close()
        if self.reader is not None:
            self.reader.close()
        else:
            for device in self._devices:
                device.close()


def _kind_of(job: Job) -> str:
    return TRUNK if isinstance(job.key, BlockKey) else ""


def _manner(facts: Mapping[str, Any]) -> str:
    """How a drive is used, for people: what is known of it, its limit, what it shares."""
    said = f", depth {facts['depth']}"
    if facts["bytes_per_s"] is None:
        said += ", rate unknown: learned"
    else:
        said += f", {per_second(facts['bytes_per_s'])} by probe of {facts['probed'][:10]}"
    if facts["uplink"]:
        said += f", on {facts['uplink']}"
    if facts["limit_bytes_per_s"] is not None:
        said += f", behind a limit of {per_second(facts['limit_bytes_per_s'])}"
        if facts["limit_latency_s"]:
            said += f" and {facts['limit_latency_s'] * 1e3:g} ms"
    return said


def open_drives(
    checkpoint: Checkpoint, layout: Layout, trace: TraceLog | None = None, trunk: Precision = "bf16"
) -> Drives | None:
    """The drives of a run, or None where one plain directory of small experts needs none of it.

    What is traced is read by drive, however small: there is nothing else to trace.
    """
    if layout.is_plain and checkpoint.expert_nbytes < PLAIN_BYTES and trace is None:
        return None
    return Drives(checkpoint, layout, trace, trunk)
