"""`drives map`: what each drive is, how it is connected and read, what it holds, and which names are one device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import FILE_NAME, ConvertedTrunk
from runtime.checkpoint.manifest import COPY_NAME, load_if_there, manifest_path
from runtime.commands.drives import require_model
from runtime.commands.terminal import say, write
from runtime.drives.device import DeviceError
from runtime.drives.hardware import Disk, look_at
from runtime.drives.identity import UNKNOWN, Identity, identify, same_device
from runtime.drives.mounts import Mount, drives_among, mounts
from runtime.drives.real import RealDevice
from runtime.drives.remembered import Known, Remembered, key_of
from runtime.errors import CheckpointError, StorageError
from runtime.units import per_second, size
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL, ExpertFiles, Holder, Shards, count_expert_files
from runtime.weights.trunk import Precision

SCHEMA = "expertstream.map/1"
TELLING = ("ro", "read-only", "sync", "noatime", "discard", "nobarrier", "degraded", "compress", "dax")
"""Mount options that bear on reading large files, or on what was meant."""


@dataclass
class Entry:
    """One drive as it was found."""

    path: Path
    identity: Identity
    options: tuple[str, ...]
    disks: list[Disk]
    mode: str
    known: Known | None
    holds: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def map_drives(model: Path | None, layout: Layout, as_json: bool) -> None:
    """Look and tell. Raises UsageError, CheckpointError, StorageError for a named drive that cannot be looked at."""
    places = dict(layout.directories)
    if model is not None:
        require_model(model)
        places = {MODEL: model} | places
    found = mounts()
    named = bool(places)
    if not named:
        places = {mount.point: Path(mount.point) for mount in drives_among(found)}
    remembered, entries = Remembered.load(), {}
    if remembered.note:
        say(f"note     {remembered.note}")
    for name, path in places.items():
        try:
            entries[name] = look(path, found, remembered)
        except OSError as error:
            message = f"drive {name}: {path} cannot be looked at: {error.strerror or error}"
            if named:
                raise StorageError(message) from None
            say(f"note     {message}")
    if model is None:
        _count_files(entries)
    else:
        with Checkpoint.open(model, experts_elsewhere=True) as checkpoint:
            _hold_against(checkpoint, entries)
    groups = same_device({name: entry.identity for name, entry in entries.items()})
    if as_json:
        drives = {name: _record(entry) for name, entry in entries.items()}
        write(json.dumps({"schema": SCHEMA, "drives": drives, "one_device": groups}) + "\n")
        return
    said = [line for name, entry in entries.items() for line in _lines(name, entry)]
    said += [f"{' and '.join(names)} are one device, and give no more than one" for names in groups]
    write("\n".join(said or ["no drive is mounted that holds files"]).rstrip() + "\n")


def look(path: Path, found: list[Mount], remembered: Remembered) -> Entry:
    """One drive, which is read from. Raises OSError where the path is not there."""
    identity = identify(path)
    try:
        device = RealDevice(str(path), path)
        mode = device.mode
        device.close()
    except DeviceError as error:
        why = str(error).removeprefix(f"drive {path}: ")
        mode = f"{UNKNOWN}: {why}"
    options = [m.options for m in found if m.point == identity.mount and m.st_dev in (None, identity.st_dev)]
    key = key_of(identity, mode)
    return Entry(
        path,
        identity,
        options[-1] if options else (),
        [look_at(disk) for disk in identity.disks],
        mode,
        remembered.drives.get(key) if key else None,
    )


def _count_files(entries: Mapping[str, Entry]) -> None:
    for entry in entries.values():
        try:
            entry.holds = {"expert_files": count_expert_files(entry.path)}
        except OSError as error:
            entry.notes.append(f"cannot list {entry.path}: {error.strerror or error}")


def _hold_against(checkpoint: Checkpoint, entries: Mapping[str, Entry]) -> None:
    """What each drive holds of the model; what none does is a note on the model's own."""
    nowhere = np.ones_like(checkpoint.experts_here)
    for name, entry in entries.items():
        holder: Holder = Shards(name, checkpoint) if name == MODEL else ExpertFiles(name, entry.path, checkpoint)
        entry.notes += holder.notes
        here = int(np.count_nonzero(holder.here))
        entry.holds = {"experts": here, "of": holder.here.size, "complete": here == holder.here.size}
        place = manifest_path(checkpoint) if name == MODEL else entry.path / COPY_NAME
        manifest, why = load_if_there(place, checkpoint)
        entry.holds["manifest"] = None if manifest is None else int(np.count_nonzero(manifest.known))
        if why:
            entry.notes.append(why)
        entry.holds["trunk"] = _trunk_in(name, entry, checkpoint)
        nowhere &= ~holder.here
    missing = int(np.count_nonzero(nowhere))
    if missing:
        entries[MODEL].notes.append(f"{missing:,} of {nowhere.size:,} experts are on none of these drives")


def _trunk_in(name: str, entry: Entry, checkpoint: Checkpoint) -> Precision | None:
    """In which form a drive holds the trunk, if it does."""
    if name == MODEL:
        return "bf16"
    if not os.path.lexists(entry.path / FILE_NAME):
        return None
    try:
        ConvertedTrunk.open(entry.path / FILE_NAME, checkpoint)
    except (CheckpointError, StorageError) as error:
        entry.notes.append(str(error))
        return None
    return "int8"


def _record(entry: Entry) -> dict[str, Any]:
    return {
        "path": str(entry.path),
        "identity": asdict(entry.identity),
        "mount_options": entry.options,
        "disks": [asdict(disk) for disk in entry.disks],
        "mode": entry.mode,
        "probed": entry.known and asdict(entry.known),
        "holds": entry.holds,
        "notes": entry.notes,
    }


def _lines(name: str, entry: Entry) -> list[str]:
    """A drive for people: its name, and what is known of it; what is not known is left out."""
    identity = entry.identity
    telling = [option for option in entry.options if option.partition("=")[0] in TELLING]
    where = f"{identity.filesystem} on {identity.source}, mounted at {identity.mount}"
    space = f"{size(identity.total_bytes)}, {size(identity.free_bytes)} free"
    rows = [
        ("files", ", ".join([where, *telling])),
        ("space", space),
        ("uuid", identity.uuid),
        ("backed by", identity.backing),
        *(("disk", disk_text(disk)) for disk in entry.disks),
        ("reads", entry.mode if entry.known is None else f"{entry.mode}, {_known_text(entry.known)}"),
        ("holds", _holds_text(entry.holds)),
        *(("note", note) for note in entry.notes),
    ]
    title = name if name == str(entry.path) else f"{name}  {entry.path}"
    return [title, *(f"  {what:9} {text}" for what, text in rows if text not in ("", UNKNOWN)), ""]


def disk_text(disk: Disk) -> str:
    """What is known of a disk, for people."""
    turning = {True: "said to be rotational", False: "solid state", None: ""}[disk.rotational]
    facts = [
        disk.model,
        disk.serial if disk.serial == UNKNOWN else f"serial {disk.serial}",
        disk.bus,
        " > ".join(disk.pci),
        disk.link,
        "" if disk.size_bytes is None else size(disk.size_bytes),
        turning,
        "" if disk.queue_requests is None else f"queue of {disk.queue_requests:,}, scheduler {disk.scheduler}",
    ]
    return f"{disk.name}: " + ", ".join(fact for fact in facts if fact not in ("", UNKNOWN))


def _known_text(known: Known) -> str:
    return f"{per_second(known.bytes_per_s)} at depth {known.depth} by probe of {known.at[:10]}"


def _holds_text(holds: Mapping[str, Any]) -> str:
    if "experts" in holds:
        whole = "all" if holds["complete"] else f"{holds['experts']:,} of"
        listed = "" if holds["manifest"] is None else f", a manifest of {holds['manifest']:,}"
        trunk = ", the trunk in int8" if holds["trunk"] == "int8" else ""
        return f"{whole} {holds['of']:,} experts{listed}{trunk}"
    count = holds.get("expert_files", 0)
    return f"{count:,} files with names of experts" if count else ""
