"""A file system of a test's own, on a loop device: where a kernel can be made to fail. Needs root; skips elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.limits import V1, Unavailable, kernel_limits

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
def limited(rates: dict[Path, int]) -> Iterator[None]:
    """Meanwhile the kernel lets this process read no more bytes/s from the devices mounted there."""
    with ExitStack() as stack:
        try:
            _, (*_, members) = stack.enter_context(kernel_limits(rates))
        except Unavailable as error:
            pytest.skip(str(error))
        top = Path(members).parent.parent
        controller = "blkio" if top == V1 else ""
        joined = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
        home = top / next(path.strip("/") for _, name, path in joined if name == controller) / "cgroup.procs"
        Path(members).write_text(str(os.getpid()))
        stack.callback(home.write_text, str(os.getpid()))
        yield


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
