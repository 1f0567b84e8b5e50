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


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
