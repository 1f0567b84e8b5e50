"""What the program keeps between runs: where, and whole or not at all."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

import numpy as np
import pytest
from loopback import ext4_image

from runtime.checkpoint.arrays import Unreadable, read_arrays, write_arrays
from runtime.home import home, write_whole


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(tmp_path / "named"))
    assert home() == tmp_path / "named"
    monkeypatch.delenv("EXPERTSTREAM_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert home() == tmp_path / "state" / "expertstream"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert home() == tmp_path / ".local" / "state" / "expertstream"
    monkeypatch.setattr("sys.platform", "darwin")
    assert home() == tmp_path / "Library" / "Application Support" / "expertstream"


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"one")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file"]


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTSTREAM_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "")
    assert home() == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".local" / "state" / "expertstream"


def test_a_file_on_a_drive_that_fails_is_an_error_and_no_signal(tmp_path: Path) -> None:
    with ext4_image(tmp_path) as (image, mount):
        path = mount / "kept"
        write_arrays(path, {"numbers": np.arange(1 << 20)}, {})
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        os.truncate(image, 4096)
        with pytest.raises(Unreadable, match=os.strerror(errno.EIO)):
            read_arrays(path)
