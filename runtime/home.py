"""Where the program keeps what it has learned: how often experts are used, checksums, what drives can do.

Never in a model's directory, never on its drives. All of it can be deleted at any time and is learned again; whoever
reads from here goes on without what cannot be read, and whoever writes says so where it matters.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def home() -> Path:
    """The directory, which need not exist: EXPERTSTREAM_HOME, else the system's place for a program's state."""
    if named := os.environ.get("EXPERTSTREAM_HOME"):
        return Path(named)
    if sys.platform == "darwin":
        return _user() / "Library" / "Application Support" / "expertstream"
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else _user() / ".local" / "state") / "expertstream"


def _user() -> Path:
    """The user's own directory; an empty HOME says nothing of it."""
    return Path(os.path.expanduser("~" if os.environ.get("HOME", "~") else f"~{getpass.getuser()}"))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that its name never stands for half of it, and it survives a power cut once this returns.

    Makes the directory where it is missing. Raises OSError, and then nothing is left behind.
    """
    with whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends, and none when it fails; see `write_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """What was renamed in this directory survives a power cut once this returns. Raises OSError."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
