"""Which physical drive a path lies on: by what the device says of itself, never by the mount path.

Two names for one device are no two drives: a read plan that counts on both gets half. What cannot be found out is
shown as `unknown`, and is never taken as proof that two drives are different, or the same.
"""

from __future__ import annotations

import fcntl
import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.drives.mounts import Mount, mounts

UNKNOWN = "unknown"
SYS, DEV = Path("/sys"), Path("/dev")
FS_IOC_GETFSUUID = 0x80111500
"""Linux 6.9: the identity of a mounted file system, for everybody: one byte of length, sixteen of UUID."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What is known of the drive below a path.

    st_dev: of the mounted file system, (major, minor). disks: the physical devices at the bottom, below partitions
    and volumes; empty when unknown. backing: the file behind a loop device, else "". serial and uuid: `unknown` where
    they cannot be read.
    """

    path: str
    st_dev: tuple[int, int]
    mount: str
    filesystem: str
    source: str
    uuid: str
    disks: tuple[str, ...]
    serial: str
    model: str
    backing: str
    free_bytes: int
    total_bytes: int


def identify(path: str | Path) -> Identity:
    """Look at the drive below an existing path. Raises OSError only when the path itself is not there."""
    path = os.path.realpath(path)
    found = os.stat(path)
    space = os.statvfs(path)
    dev = (os.major(found.st_dev), os.minor(found.st_dev))
    facts = _on_macos(path) if sys.platform == "darwin" else _on_linux(path, dev)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return Identity(path=path, st_dev=dev, free_bytes=free, total_bytes=total, **facts)


def same_device(drives: Mapping[str, Identity]) -> list[tuple[str, ...]]:
    """Groups of names that are one physical device, one file system, or one pool of devices."""
    groups: list[tuple[set[tuple[object, ...]], list[str]]] = []
    for name, identity in drives.items():
        marks: set[tuple[object, ...]] = {("disk", disk) for disk in identity.disks}
        marks.add(("st_dev", *identity.st_dev))
        if identity.serial != UNKNOWN:
            marks.add(("serial", identity.model, identity.serial))
        if identity.filesystem == "zfs":
            marks.add(("pool", identity.source.partition("/")[0]))
        names = [name]
        for group in [g for g in groups if g[0] & marks]:
            groups.remove(group)
            marks |= group[0]
            names = group[1] + names
        groups.append((marks, names))
    return [tuple(names) for _, names in groups if len(names) > 1]


# --- Linux ---


def _on_linux(path: str, dev: tuple[int, int]) -> dict[str, Any]:
    mount = _mount_of(path, dev)
    source = mount.source
    block = SYS / "dev/block" / f"{dev[0]}:{dev[1]}"
    if not block.exists() and source.startswith("/dev/"):  # btrfs and others have a device number of their own
        try:
            rdev = os.stat(source).st_rdev
            block = SYS / "dev/block" / f"{os.major(rdev)}:{os.minor(rdev)}"
        except OSError:
            pass
    below = _disks_below(block) if block.exists() else set()
    disks = sorted(below | _btrfs_disks(source) if mount.filesystem == "btrfs" else below)
    about = SYS / "block" / disks[0] if len(disks) == 1 else None
    return {
        "mount": mount.point,
        "filesystem": mount.filesystem,
        "source": source,
        "uuid": _uuid_of(path, source),
        "disks": tuple(disks),
        "serial": first_line(about, "serial", "device/serial", "device/wwid", "wwid"),
        "model": first_line(about, "device/model"),
        "backing": first_line(about, "loop/backing_file", missing=""),
    }


def disks_below_image(disk: str) -> tuple[str, ...]:
    """The disks that the file behind a loop device lies on: what is read from it is read from them, too."""
    image = first_line(SYS / "block" / disk, "loop/backing_file", missing="")
    with suppress(OSError):
        return identify(image).disks if image else ()
    return ()


def _mount_of(path: str, dev: tuple[int, int]) -> Mount:
    """The deepest mount of this device that holds the path."""
    best = Mount("", UNKNOWN, UNKNOWN, (), dev)
    for mount in mounts():
        holds = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if holds and mount.st_dev == dev and len(mount.point) >= len(best.point):
            best = mount
    return best


def _disks_below(block: Path) -> set[str]:
    """Names of whole disks below a block device: through partitions, and through volumes made of others."""
    place = block.resolve()
    if (place / "partition").exists():
        place = place.parent
    slaves = place / "slaves"
    below = list(slaves.iterdir()) if slaves.is_dir() else []
    return {disk for slave in below for disk in _disks_below(slave)} if below else {place.name}


def _btrfs_disks(source: str) -> set[str]:
    """Names of the disks below all devices of the btrfs file system that this device belongs to."""
    name = Path(os.path.realpath(source)).name
    for devices in (SYS / "fs/btrfs").glob("*/devices"):
        if (devices / name).exists():
            return {disk for device in devices.iterdir() for disk in _disks_below(device)}
    return set()


def _uuid_of(path: str, source: str) -> str:
    buffer = bytearray(17)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.ioctl(fd, FS_IOC_GETFSUUID, buffer)
        finally:
            os.close(fd)
        raw = bytes(buffer[1 : 1 + buffer[0]])
        if any(raw):
            text = raw.hex()
            return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])) if len(raw) == 16 else text
    except OSError:
        pass
    try:
        for link in (DEV / "disk/by-uuid").iterdir():
            if link.resolve() == Path(source).resolve():
                return link.name
    except OSError:
        pass
    return UNKNOWN


def first_line(folder: Path | None, *names: str, missing: str = UNKNOWN) -> str:
    """What the first of these files that says anything says."""
    for name in names if folder is not None else ():
        assert folder is not None
        try:
            text = (folder / name).read_text(errors="replace").strip()
        except OSError:
            continue
        if text:
            return text
    return missing


# --- macOS ---


def _on_macos(path: str) -> dict[str, Any]:
    """From `diskutil`; serial numbers would take seconds, the physical stores below a volume are as good."""
    mount = _mount_point(path)
    volume = diskutil(mount)
    container = str(volume.get("APFSContainerReference", ""))
    stores = diskutil(container).get("APFSPhysicalStores", []) if container else []
    parts = [str(s.get("APFSPhysicalStore", "")) for s in stores] or [str(volume.get("DeviceIdentifier", ""))]
    disks = {str(diskutil(part).get("ParentWholeDisk", "")) for part in parts if part} - {""}
    whole = diskutil(min(disks)) if len(disks) == 1 else {}
    return {
        "mount": mount,
        "filesystem": str(volume.get("FilesystemType", UNKNOWN)),
        "source": str(volume.get("DeviceNode", UNKNOWN)),
        "uuid": str(volume.get("VolumeUUID", UNKNOWN)),
        "disks": tuple(sorted(disks)),
        "serial": UNKNOWN,
        "model": str(whole.get("MediaName", UNKNOWN)),
        "backing": "",
    }


def _mount_point(path: str) -> str:
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def diskutil(what: str) -> dict[str, Any]:
    """What macOS says of a disk, a volume or a mount point; nothing where it says nothing."""
    try:
        done = subprocess.run(["diskutil", "info", "-plist", what], capture_output=True, timeout=10, check=True)
        found = plistlib.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
