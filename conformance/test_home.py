"""What the program keeps between runs: where, and whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
