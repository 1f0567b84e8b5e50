"""Drives that the kernel itself makes slow: ext4 file systems on loop devices, reads limited by the block throttle.

Needs root, Linux, mkfs.ext4, losetup, mount, and a controller: `blkio` of cgroup version 1 or `io` of version 2. What
lies behind a loop device is a file, which may well be in memory; how fast it is read is the limit's doing alone, as
long as the file is faster. Everything is undone when the block ends, however it ends; what undoing fails at is said.

Linux documents the limits in admin-guide/cgroup-v1/blkio-controller and admin-guide/cgroup-v2, `io.max`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

TOOLS = ("mkfs.ext4", "losetup", "mount", "umount")
V1, V2 = Path("/sys/fs/cgroup/blkio"), (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
MOUNTED = "expertstream-drive"
"""How the images and mount points of these drives begin, wherever they lie."""
PATIENCE_S = 10.0
SPARE_BYTES = 4 << 30
"""Memory that is left to everything else when images are kept there."""
JOIN = 'echo $$ > "$0" && exec "$@"'


class Unavailable(Exception):
    """Why this machine cannot limit drives by its kernel."""


@contextmanager
def loop_drives(sizes: Mapping[str, int], folder: Path) -> Iterator[dict[str, Path]]:
    """Mount points of new, empty file systems with room for so many bytes each, as drives of their own.

    The images lie in `folder`. Raises Unavailable, and then nothing is left.
    """
    if sys.platform != "linux" or os.geteuid():
        raise Unavailable("it needs Linux, and root")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise Unavailable(f"there is no {missing[0]}")
    with ExitStack() as stack:
        mounts = {}
        for name, nbytes in sizes.items():
            image, mount = folder / f"{MOUNTED}-{name}.img", folder / f"{MOUNTED}-{name}"
            with image.open("xb") as file:
                stack.callback(image.unlink, missing_ok=True)
                file.truncate(nbytes + nbytes // 32 + (24 << 20))  # inodes, bitmaps
            mount.mkdir()
            stack.callback(mount.rmdir)
            _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", "-N", "4096", str(image))
            device = _run("losetup", "--find", "--show", str(image))
            stack.callback(_undo, "losetup", "--detach", device)
            _run("mount", "-t", "ext4", "-o", "noatime", device, str(mount))
            stack.callback(_undo, "umount", str(mount))
            mounts[name] = mount
        yield mounts


@contextmanager
def kernel_limits(rates: Mapping[Path, int]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Bytes/s that a process may read from the devices mounted there, once started with the command that is given.

    Yields (which controller, the command to put before a process's own). Raises Unavailable, and then nothing is left.
    """
    name = f"expertstream-bench-{os.getpid()}"
    devices = {mount: os.stat(mount).st_dev for mount in rates}
    numbers = {mount: f"{os.major(device)}:{os.minor(device)}" for mount, device in devices.items()}
    with ExitStack() as stack:
        try:
            if (V1 / "cgroup.procs").is_file():
                group, said = V1 / name, "cgroup version 1, blkio.throttle.read_bps_device"
                group.mkdir()
                stack.callback(_remove, group)
                for mount, rate in rates.items():
                    (group / "blkio.throttle.read_bps_device").write_text(f"{numbers[mount]} {rate}")
            else:
                top, said = _with_io(V2), "cgroup version 2, io.max"
                group = top / name
                group.mkdir()
                stack.callback(_remove, group)
                for mount, rate in rates.items():
                    (group / "io.max").write_text(f"{numbers[mount]} rbps={rate}")
        except OSError as error:
            raise Unavailable(f"the kernel sets no limits here: {error}") from None
        yield said, ("sh", "-c", JOIN, str(group / "cgroup.procs"))


def _with_io(places: Sequence[Path]) -> Path:
    """A version 2 hierarchy that can limit devices."""
    for top in places:
        with suppress(OSError):
            if "io" in (top / "cgroup.controllers").read_text().split():
                (top / "cgroup.subtree_control").write_text("+io")
                return top
    raise Unavailable("there is neither the blkio controller of cgroup version 1 nor io of version 2")


def _remove(group: Path) -> None:
    """Its processes have ended, or are moved out."""
    with suppress(OSError):
        for process in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(process)
    try:
        group.rmdir()
    except OSError as error:
        print(f"note     left behind: {group}: {error.strerror}", file=sys.stderr)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{command[0]}: {error.stderr.strip() or error}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from None
    return done.stdout.strip()


def _undo(*command: str) -> None:
    """What a process that has just been ended still holds becomes free a little later; a file system that does not is
    let go of all the same."""
    until = time.monotonic() + PATIENCE_S
    while (done := subprocess.run(command, capture_output=True, text=True)).returncode and time.monotonic() < until:
        time.sleep(0.1)
    if done.returncode and command[0] == "umount":
        done = subprocess.run(("umount", "-l", *command[1:]), capture_output=True, text=True)
    if done.returncode:
        print(f"note     left behind: {' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)


def keep_in_memory(folder: Path) -> bool:
    """Read all images there, so that their drives are as fast as their limits and not as the disk that they lie on;
    False, and nothing is read, where memory has no room for them. What is needed elsewhere later goes again."""
    images = sorted(folder.glob(f"{MOUNTED}-*.img"))
    nbytes = sum(image.stat().st_blocks * 512 for image in images)
    if psutil.virtual_memory().available < nbytes + SPARE_BYTES:
        return False
    piece = bytearray(16 << 20)
    for image in images:
        with image.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return True


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block like ^C does, so that what it has set up is undone."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
