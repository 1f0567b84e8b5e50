"""A file system of a test's own, on a loop device: where a kernel can be made to fail. Needs root; skips elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE_BYTES = 64 << 20


@contextmanager
def ext4_image(folder: Path, block_bytes: int = 4096) -> Iterator[tuple[Path, Path]]:
    """(image, mount point) of a fresh ext4 file system below `folder`."""
    if os.geteuid() or not shutil.which("mkfs.ext4") or not shutil.which("mount"):
        pytest.skip("needs root, mkfs.ext4 and mount")
    image, mount = folder / "image", folder / "mount"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        _run("mkfs.ext4", "-q", "-b", str(block_bytes), str(image))
        _run("mount", "-o", "loop", str(image), str(mount))
    except subprocess.SubprocessError as error:
        pytest.skip(f"no loop mounts here: {error}")
    try:
        yield image, mount
    finally:
        _run("umount", "-l", str(mount))


@contextmanager
def kernel_limits(rates: dict[Path, int]) -> Iterator[None]:
    """Meanwhile the kernel lets this process read no more bytes/s from the devices mounted there."""
    group = Path("/sys/fs/cgroup/blkio") / f"limits-{os.getpid()}"
    if not group.parent.joinpath("cgroup.procs").is_file():
        pytest.skip("needs the blkio controller of cgroup version 1")
    home = next(
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":blkio:" in line
    )
    group.mkdir()
    try:
        for mount, rate in rates.items():
            device = os.stat(mount).st_dev
            limit = f"{os.major(device)}:{os.minor(device)} {rate}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    except OSError as error:
        pytest.skip(f"the kernel sets no limits here: {error}")
    finally:
        (group.parent / home.strip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
