"""What is mounted where: the system's own list, read on Linux from mountinfo and on macOS from `mount`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
NEVER = ("devtmpfs", "squashfs", "erofs", "iso9660", "udf", "autofs", "devfs")
"""File systems on or like block devices that no model lies on."""
WITHOUT_A_DEVICE = ("zfs", "bcachefs", "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "overlay")
"""File systems that hold files on drives and do not say so by naming a block device."""
OF_THE_SYSTEM = ("/boot", "/System/Volumes", "/private/var/vm")
DATA = "/System/Volumes/Data"
"""Where the system keeps parts of itself; the one place among them, on macOS, where people's files are."""

_OCTAL = re.compile(rb"\\([0-7]{3})")
_MACOS = re.compile(r"(?P<source>.+?) on (?P<point>.+) \((?P<options>[^()]*)\)")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system. st_dev: (major, minor), None where the list does not say. root: the part of it that
    is mounted here, `/` for all of it. options: of this mount, then of the file system."""

    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]
    st_dev: tuple[int, int] | None = None
    root: str = "/"

    @property
    def holds_files(self) -> bool:
        """Whether files on it lie on some drive, as far as its kind tells."""
        system = any(self.point == place or self.point.startswith(f"{place}/") for place in OF_THE_SYSTEM)
        if self.filesystem in NEVER or (system and self.point != DATA):
            return False
        kind = self.filesystem
        return self.source.startswith("/dev/") or kind in WITHOUT_A_DEVICE or kind.startswith("fuse.")


def mounts() -> list[Mount]:
    """Everything mounted, in the order of mounting; nothing where the system does not tell."""
    try:
        if sys.platform == "darwin":
            done = subprocess.run(["mount"], capture_output=True, timeout=10, check=True)
            return list(parse_mount(done.stdout.decode(errors="surrogateescape")))
        return list(parse_mountinfo(MOUNTINFO.read_bytes()))
    except (OSError, subprocess.SubprocessError):
        return []


def parse_mountinfo(text: bytes) -> Iterator[Mount]:
    """Linux: proc(5), /proc/pid/mountinfo. Lines that are not understood are passed over."""
    for line in text.splitlines():
        fields, _, rest = line.partition(b" - ")
        words, more = [[_plain(word) for word in part.split(b" ")] for part in (fields, rest)]
        if len(words) < 6 or len(more) < 2:
            continue
        major, _, minor = words[2].partition(":")
        if not (major.isdecimal() and minor.isdecimal()):
            continue
        options = [*words[5].split(","), *(more[2].split(",") if len(more) > 2 else ())]
        yield Mount(words[4], more[0], more[1], tuple(dict.fromkeys(options)), (int(major), int(minor)), words[3])


def parse_mount(text: str) -> Iterator[Mount]:
    """macOS: the lines of `mount`, such as `/dev/disk3s1 on / (apfs, sealed, local, read-only)`."""
    for line in text.splitlines():
        if match := _MACOS.fullmatch(line.strip()):
            kind, *options = [option.strip() for option in match["options"].split(",")]
            yield Mount(match["point"], kind, match["source"], tuple(options))


def drives_among(found: Sequence[Mount]) -> list[Mount]:
    """One mount for each file system that holds files on a drive: the one nearest to its root, then to `/`."""
    best: dict[object, Mount] = {}
    for mount in found:
        if mount.holds_files:
            key = mount.st_dev or mount.source
            best[key] = min(best.get(key, mount), mount, key=lambda m: (len(m.root), len(m.point)))
    return list(best.values())


def _plain(word: bytes) -> str:
    """Blanks and the like are written as \\040."""
    return _OCTAL.sub(lambda m: bytes([int(m[1], 8)]), word).decode(errors="surrogateescape")
