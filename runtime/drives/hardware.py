"""What the system says of a physical disk: its name, how it is connected, how requests queue for it.

Everything is read, nothing is asked of the disk itself. What is not said is `unknown`, or None for a number.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.drives.identity import SYS, UNKNOWN, diskutil, first_line

BUSES = ("nvme", "usb", "virtio", "ata", "mmc", "xen", "scsi", "virtual")
"""Looked for in this order in the path of a disk below /sys/devices."""
_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Disk:
    """pci: the addresses from the root port down to the controller; disks that have the first ones in common share
    what those can carry. link: of the controller, as negotiated. rotational: what the system believes."""

    name: str
    model: str
    serial: str
    bus: str
    pci: tuple[str, ...]
    link: str
    size_bytes: int | None
    rotational: bool | None
    scheduler: str
    queue_requests: int | None
    block_bytes: int | None


def look_at(name: str) -> Disk:
    """The facts of a whole disk, by its name in the system, such as `nvme0n1` or `disk4`."""
    return _on_macos(name) if sys.platform == "darwin" else _on_linux(name)


def _on_linux(name: str) -> Disk:
    place = SYS / "block" / name
    parts = place.resolve().parts
    pci = tuple(part for part in parts if _PCI.fullmatch(part))
    controllers = [Path(*parts[: parts.index(address) + 1]) for address in reversed(pci)]
    links = [link for controller in controllers if (link := _link(controller))]
    sectors, queued = _number(place, "size"), _number(place, "queue/nr_requests")
    turning = first_line(place, "queue/rotational")
    chosen = re.search(r"\[(.+?)\]", first_line(place, "queue/scheduler"))
    return Disk(
        name=name,
        model=first_line(place, "device/model"),
        serial=first_line(place, "serial", "device/serial", "device/wwid", "wwid"),
        bus=next((bus for bus in BUSES if any(part.startswith(bus) for part in parts)), UNKNOWN),
        pci=pci,
        link=links[0] if links else UNKNOWN,
        size_bytes=None if sectors is None else sectors * 512,
        rotational={"0": False, "1": True}.get(turning),
        scheduler=chosen[1] if chosen else UNKNOWN,
        queue_requests=queued,
        block_bytes=_number(place, "queue/logical_block_size"),
    )


def _link(controller: Path) -> str:
    """Speed and width of a PCI device's link; nothing where it has none."""
    speed, width = (first_line(controller, f"current_link_{what}", missing="") for what in ("speed", "width"))
    return f"{speed} x{width}" if speed and width not in ("", "0") and not speed.startswith("Unknown") else ""


def _number(folder: Path, name: str) -> int | None:
    text = first_line(folder, name)
    return int(text) if text.isdecimal() else None


def _on_macos(name: str) -> Disk:
    facts = diskutil(name)
    solid, nbytes = facts.get("SolidState"), facts.get("TotalSize", facts.get("Size"))
    block = facts.get("DeviceBlockSize")
    return Disk(
        name=name,
        model=_text(facts.get("MediaName")),
        serial=UNKNOWN,
        bus=_text(facts.get("BusProtocol")),
        pci=(),
        link=UNKNOWN,
        size_bytes=nbytes if isinstance(nbytes, int) else None,
        rotational=not solid if isinstance(solid, bool) else None,
        scheduler=UNKNOWN,
        queue_requests=None,
        block_bytes=block if isinstance(block, int) else None,
    )


def _text(value: Any) -> str:
    return str(value).strip() or UNKNOWN if value is not None else UNKNOWN
