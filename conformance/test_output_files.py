"""Files beside a result: a disk that fills costs no result, and no file that is read is written over."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from commandline import Command, on

RUN = ["run", "--prompt-ids", "5,9", "--max-new", 2]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be written to its end."""

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("runtime.home.os.fsync", fail)


@pytest.mark.usefixtures("full")
def test_an_answer_is_there_although_the_files_beside_it_are_not(cli: Command, tiny: Path, tmp_path: Path) -> None:
    names = [tmp_path / "t.csv", tmp_path / "t.json"]
    done = cli(*RUN, *on(tiny), "--json", "--trace", names[0], "--timeline", names[1])
    assert done.status == 4
    assert len(done.record["token_ids"]) == 2, "one record, and nothing else"
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert all(f"{name} could not be written: No space left" in line for name in names)
    assert not list(tmp_path.iterdir())


def test_a_report_is_there_although_its_picture_is_not(
    cli: Command, tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trace = tmp_path / "t.csv"
    assert cli(*RUN, *on(tiny), "--trace", trace).status == 0
    request.getfixturevalue("full")
    for form in ([], ["--json"]):
        done = cli("trace", "report", trace, "--svg", tmp_path / "t.svg", *form)
        assert done.status == 4
        assert "Drives" in done.out if not form else json.loads(done.out)["slices"] > 0
        assert "could not be written: No space left" in done.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [trace]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("early", [False, True], ids=["at the end", "while it is watched"])
def test_a_watch_ends_with_its_summary_although_its_samples_are_lost(
    early: bool, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cli("drives", "monitor", "--seconds", 0.01).out:
        pytest.skip("no disk is known here")
    if early:

        def fail(sample: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("runtime.commands.monitor.rows", fail)
    done = cli("drives", "monitor", "--seconds", 0.3, "--csv", tmp_path / "a.csv")
    assert done.status == 4
    assert "samples" in done.out
    assert "could not be written: No space left" in done.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_no_file_that_is_read_or_kept_is_written_over(cli: Command, tiny: Path, tmp_path: Path, own_home: Path) -> None:
    prompt, trace = tmp_path / "p.json", tmp_path / "t.csv"
    prompt.write_text("hello")
    assert cli(*RUN, *on(tiny), "--trace", trace).status == 0
    (tmp_path / "link.json").symlink_to(prompt)
    kept = {path: path.read_bytes() for path in (*tmp_path.iterdir(), *own_home.rglob("*")) if path.is_file()}
    said = ["run", "--prompt-file", prompt, *on(tiny)]
    same = tmp_path / "new.json"
    for command, reason in (
        (["trace", "report", trace, "--svg", trace], "is also the file of the trace"),
        ([*said, "--trace", prompt], "is also the file of --prompt-file"),
        ([*said, "--trace", tmp_path / "link.json"], "is also the file of --prompt-file"),
        ([*said, "--timeline", prompt], "is also the file of --prompt-file"),
        ([*said, "--trace", same, "--timeline", same], "is also the file of --trace"),
        ([*said, "--trace", own_home / "drives.json"], "where the program keeps what it has learned"),
        ([*said, "--trace", next(own_home.rglob("heat/*"))], "where the program keeps what it has learned"),
        ([*said, "--trace", ""], "the name is empty"),
    ):
        done = cli(*command)
        assert (done.status, done.out) == (2, ""), done
        assert reason in done.err
        assert len(done.err.splitlines()) == 1
    assert kept == {path: path.read_bytes() for path in kept}
