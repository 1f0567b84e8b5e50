"""`replicate`: the hottest experts on another drive, right or not there at all, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commandline import HANGS_S, Command, Outcome, Start, on
from conftest import ROOT
from copies import every, flip, flip_in_model, large_experts, rewrite, write_experts
from loopback import ext4_image

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import COPY_NAME, Manifest, manifest_path
from runtime.commands import replicate as command
from runtime.drives.buffers import Buffer
from runtime.drives.device import DeviceError
from runtime.drives.identity import UNKNOWN, identify
from runtime.drives.jobs import Fault
from runtime.drives.real import RealDevice
from runtime.errors import UsageError
from runtime.progress import Progress
from runtime.setup import copies as opened
from runtime.setup import replicate as work
from runtime.setup import target as writing
from runtime.setup.replicate import choose
from runtime.setup.synth import synthesize
from runtime.setup.target import PART, Target
from runtime.setup.usage import hottest_first, read_usage
from runtime.weights.heat import Heat

ROUTES = ROOT.parent / "shared" / "data" / "k3-routes-12x92x16.npy"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_experts(tmp_path_factory.mktemp("large") / "model")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of eight experts. Not to be written to."""
    path = tmp_path_factory.mktemp("small") / "model"
    synthesize("tiny", path, layers=3, experts=8, top_k=2, vocab=1024)
    return path


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """An empty target."""
    (tmp_path / "to").mkdir()
    return tmp_path / "to"


def line(model: Path, to: Path, budget: object = "all", *more: object) -> list[object]:
    return ["replicate", "--model", model, "--to", to, "--budget", budget, "--floor", 0, "--allow-same-device", *more]


def right(model: Path, to: Path) -> list[str]:
    """The names of the files in the target, which are all copies of the model's experts, byte by byte, or manifests."""
    names = sorted(path.name for path in to.iterdir())
    with Checkpoint.open(model) as checkpoint:
        for name in names:
            if name != COPY_NAME:
                layer, expert = (int(part) for part in name[1:-4].split("-E"))
                wanted = b"".join(part.tobytes() for part in checkpoint.read_expert(layer, expert))
                assert (to / name).read_bytes() == wanted, name
    return [name for name in names if name != COPY_NAME]


def last(ended: Outcome) -> str:
    return ended.err.splitlines()[-1]


# -- what is chosen ------------------------------------------------------------------------------------------------


def test_the_most_used_come_first_and_the_unused_from_all_layers_alike() -> None:
    counts = np.zeros((3, 4))
    assert hottest_first(counts)[:7] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    counts[1, 3], counts[2, 2], counts[0, 1] = 5, 7, 5
    order = hottest_first(counts)
    assert order[:3] == [(2, 2), (0, 1), (1, 3)]
    assert order[3:6] == [(0, 0), (1, 0), (2, 0)]
    assert sorted(order) == [(row, expert) for row in range(3) for expert in range(4)]


def test_what_is_there_counts_and_stays(large: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        counts = np.array([[4.0, 3, 2, 1], [8, 7, 6, 5]])
        here, available = np.zeros((2, 4), np.bool_), np.ones((2, 4), np.bool_)
        here[0, 3] = True
        available[1, 0] = False
        plan = choose(checkpoint, counts, available, here, 3 * checkpoint.expert_nbytes + 5)
        assert plan.there == [(1, 3)]
        assert plan.new == [(2, 1), (2, 2)]
        assert plan.colder == 1
        assert choose(checkpoint, counts, available, here, 1).new == []


def test_usage_of_the_released_model(large: Path) -> None:
    if not ROUTES.exists():
        pytest.skip(f"{ROUTES} is not here")
    routes = np.load(ROUTES)
    counts = np.stack([np.bincount(routes[:, row].ravel(), minlength=896) for row in range(92)]).astype(float)
    order = hottest_first(counts)
    hits = np.cumsum([counts[place] for place in order])
    assert hits[-1] == routes.size
    assert (np.diff(hits, 2) <= 0).all(), "each further expert serves no more than the one before"


def test_forms_of_usage(large: Path, tmp_path: Path) -> None:
    wanted = [[0, 2, 0, 1], [0, 0, 3.5, 0]]
    (tmp_path / "u.csv").write_text("layer,expert,count\n1,1,2\n\n1, 3, 1\n2,2,3\n2,2,0.5\n")
    entries = [{"layer": 1, "expert": 1, "count": 2}, {"layer": 1, "expert": 3, "count": 1}]
    entries.append({"layer": 2, "expert": 2, "count": 3.5})
    (tmp_path / "u.jsonl").write_text("\n".join(map(json.dumps, entries)))
    np.save(tmp_path / "u.npy", np.array([[[1, 1], [0, 2]], [[3, 1], [2, 2]]], np.int16))
    with Checkpoint.open(large) as checkpoint:
        assert read_usage(tmp_path / "u.csv", checkpoint).tolist() == wanted
        assert read_usage(tmp_path / "u.jsonl", checkpoint).tolist() == wanted
        assert read_usage(tmp_path / "u.npy", checkpoint).tolist() == [[0, 3, 0, 1], [1, 0, 3, 0]]
        for text, said in (
            ("1,1", "line 1"),
            ("1,1,1\n1,x,1", "line 2"),
            ("1,1,-1", "line 1"),
            ("1,1,nan", "line 1"),
            ("0,1,1", "no expert 1 in layer 0"),
            ("1,4,1", "no expert 4"),
            ('{"layer": 1, "expert": 1}', "line 1"),
            ('{"layer": true, "expert": 1, "count": 1}', "line 1"),
            ('{"layer": 1.7, "expert": 1, "count": 1}', "line 1"),
            ('{"layer": 1e999, "expert": 1, "count": 1}', "line 1"),
            ('{"layer": 1, "expert": 1, "count": 1%s}' % ("0" * 400), "line 1"),
            ("{", "line 1"),
        ):
            (tmp_path / "bad").write_text(text)
            with pytest.raises(UsageError, match=said):
                read_usage(tmp_path / "bad", checkpoint)
        for array in (np.zeros((2, 3, 1), int), np.zeros((2, 2, 1)), np.full((1, 2, 1), 4), np.array(-1)):
            np.save(tmp_path / "bad.npy", array)
            with pytest.raises(UsageError, match="--usage"):
                read_usage(tmp_path / "bad.npy", checkpoint)
        np.savez(tmp_path / "several.npz", np.zeros((2, 2, 1), int))
        np.save(tmp_path / "objects.npy", np.array([{}]))
        for content in (b"no array", *((tmp_path / name).read_bytes() for name in ("several.npz", "objects.npy"))):
            (tmp_path / "bad.npy").write_bytes(content)
            with pytest.raises(UsageError, match=r"--usage: .* is no NumPy file of integers, or not the whole of one$"):
                read_usage(tmp_path / "bad.npy", checkpoint)
        with pytest.raises(UsageError, match="cannot read"):
            read_usage(tmp_path / "none", checkpoint)
        for text in ("", "layer,expert,count\n", "1,1,0\n"):
            (tmp_path / "bad").write_text(text)
            with pytest.raises(UsageError, match="says of no expert that it is used"):
                read_usage(tmp_path / "bad", checkpoint)
        for name in ("pipe", "pipe.npy"):  # nobody writes to it: who opens it waits for ever
            os.mkfifo(tmp_path / name)
            with pytest.raises(UsageError, match="is not a regular file but a pipe"):
                read_usage(tmp_path / name, checkpoint)


def test_the_budget_is_spent_on_the_hottest(cli: Command, large: Path, to: Path, tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("1,1,2\n1,3,1\n2,2,3\n")
    ended = cli(*line(large, to, "14M", "--usage", tmp_path / "u.csv"))
    assert ended.status == 0
    assert right(large, to) == ["L1-E1.bin", "L2-E2.bin"]
    assert f"plan     2 of 8 experts, 13.4 MB, hottest first, by {tmp_path / 'u.csv'}" in ended.err
    assert cli(*line(large, to, "40M")).status == 0
    assert right(large, to) == ["L1-E0.bin", "L1-E1.bin", "L2-E0.bin", "L2-E1.bin", "L2-E2.bin"]
    (tmp_path / "u.csv").write_text("1,3,1\n")
    ended = cli(*line(large, to, "7M", "--usage", tmp_path / "u.csv"))
    assert "5 copies that are there are used less than others that are not; none is removed" in ended.err
    assert "already, more than --budget 7 MB: nothing is added, and nothing is removed" in ended.err
    assert len(right(large, to)) == 5
    assert cli(*line(large, to, "6M")).status == 2


def test_without_a_file_what_runs_have_learned_decides(cli: Command, large: Path, to: Path) -> None:
    ended = cli(*line(large, to, "7M"))
    assert "plan     1 of 8 experts, 6.68 MB, evenly from all layers: no run has learned" in ended.err
    with Checkpoint.open(large) as checkpoint:
        heat = Heat.load(checkpoint)
        heat.want(2, np.array([3]))
        heat.end_of_pass()
        heat.save()
    ended = cli(*line(large, to, "14M"))
    assert "plan     2 of 8 experts, 13.4 MB, hottest first, by what runs have learned" in ended.err
    assert right(large, to) == ["L1-E0.bin", "L2-E3.bin"]


# -- what is written -----------------------------------------------------------------------------------------------


def test_copies_are_the_experts_and_the_manifest_lies_beside_them(cli: Command, small: Path, to: Path) -> None:
    ended = cli(*line(small, to))
    assert ended.status == 0
    assert ended.out.startswith("copied   16 experts, 157 kB in ")
    assert len(right(small, to)) == 16
    with Checkpoint.open(small) as checkpoint:
        for path in (to / COPY_NAME, manifest_path(checkpoint)):
            assert Manifest.load(path, checkpoint).known.all()
    assert cli("verify", "--model", small, "--drive", f"a={to}").status == 0
    run = cli("run", *on(small), "--prompt-ids", "1,2", "--max-new", 1, "--drive", f"a={to}")
    assert "         a: 16 of 16 experts, " in run.err
    assert "verify   the first read of each expert and drive, 16 of 16 experts in the manifest" in run.err
    before = {path.name: path.stat().st_ino for path in to.iterdir() if path.name != COPY_NAME}
    again = cli(*line(small, to))
    assert again.status == 0
    assert "copied   0 experts" in again.out
    assert "right    16 copies that were there" in again.out
    assert {path.name: path.stat().st_ino for path in to.iterdir() if path.name != COPY_NAME} == before


def test_scattered_experts_are_gathered(cli: Command, small: Path, tmp_path: Path, to: Path) -> None:
    scattered = rewrite(small, tmp_path / "scattered")
    assert cli(*line(scattered, to)).status == 0
    assert len(right(small, to)) == 16


def test_where_copies_lie_already_the_others_go(cli: Command, small: Path, to: Path) -> None:
    write_experts(small, to / "k3-experts", lambda layer, _: layer == 1)
    assert cli(*line(small, to)).status == 0
    assert len(right(small, to / "k3-experts")) == 16
    assert os.listdir(to).count(COPY_NAME) == 1


def test_damaged_and_truncated_copies_of_ours_are_written_anew(cli: Command, small: Path, to: Path) -> None:
    assert cli(*line(small, to)).status == 0
    flip(to / "L2-E4.bin", 500)
    os.truncate(to / "L2-E1.bin", 77)
    (to / "L1-E5.bin").unlink()
    ended = cli(*line(small, to))
    assert ended.status == 0
    assert "copied   3 experts" in ended.out
    assert "1 of them in place of wrong ones" in ended.out
    assert len(right(small, to)) == 16


def test_files_of_others_are_left_as_they_are(cli: Command, small: Path, to: Path) -> None:
    to.rmdir()
    write_experts(small, to, lambda layer, expert: layer == 1 and expert < 3)
    flip(to / "L1-E1.bin", 3)
    before = (to / "L1-E1.bin").read_bytes()
    ended = cli(*line(small, to))
    assert ended.status == 4
    assert ended.err.splitlines()[-2].startswith(
        f"error: {to} has 1 files with the name of an expert that are not this"
    )
    assert last(ended) == "  L1-E1.bin"
    assert (to / "L1-E1.bin").read_bytes() == before
    assert len(os.listdir(to)) == 3
    os.truncate(to / "L1-E1.bin", 9)
    assert cli(*line(small, to)).status == 4
    assert cli(*line(small, to)).status == 4, "it has not become ours"
    assert cli(*line(small, to, "all", "--replace")).status == 0
    assert len(right(small, to)) == 16


def test_a_replica_of_another_model_is_refused(cli: Command, small: Path, large: Path, to: Path) -> None:
    assert cli(*line(large, to, "7M")).status == 0
    ended = cli(*line(small, to))
    assert ended.status == 2
    assert "is the manifest of another model" in last(ended)
    assert right(large, to) == ["L1-E0.bin"]


# -- sources -------------------------------------------------------------------------------------------------------


def test_a_source_that_is_wrong_is_passed_over_or_named(cli: Command, small: Path, to: Path, tmp_path: Path) -> None:
    model = shutil.copytree(small, tmp_path / "model")
    good = write_experts(model, tmp_path / "good", every)
    assert cli("verify", "--model", model).status == 0
    flip_in_model(model, 2, 5, 10)
    ended = cli(*line(model, to))
    assert ended.status == 4
    assert "1 experts could not be copied: no source gives the right bytes" in ended.err
    assert last(ended).startswith("  layer 2 expert 5: drive model: model-0000")
    assert "L2-E5.bin" not in right(small, to)
    assert cli(*line(model, to, "all", "--from", f"good={good}")).status == 0
    assert len(right(small, to)) == 16


def test_what_cannot_be_read_is_read_elsewhere(
    cli: Command, small: Path, to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_experts(small, tmp_path / "good", every)
    assert cli("verify", "--model", small).status == 0

    class Ill(RealDevice):
        def read(self, file: str, offset: int, into: memoryview) -> int:
            if self.name == "model":
                raise DeviceError(Fault.IO, f"{file} at {offset}: Input/output error")
            return super().read(file, offset, into)

    monkeypatch.setattr("runtime.drives.real.RealDevice", Ill)
    ended = cli(*line(small, to, "30k"))
    assert ended.status == 4
    assert "Input/output error" in last(ended)
    assert right(small, to) == []
    assert cli(*line(small, to, "all", "--from", f"good={good}")).status == 0
    assert len(right(small, to)) == 16


def test_a_stale_drive_never_speaks_for_the_model(cli: Command, small: Path, to: Path, tmp_path: Path) -> None:
    """With no manifest at home, the model's directory decides, not a source that has a manifest of its own."""
    old = shutil.copytree(small, tmp_path / "old")
    flip_in_model(old, 1, 3, 33)
    (tmp_path / "stale").mkdir()
    assert cli(*line(old, tmp_path / "stale")).status == 0
    with Checkpoint.open(small) as checkpoint:
        manifest_path(checkpoint).unlink()
    assert cli(*line(small, to, "all", "--from", f"stale={tmp_path / 'stale'}")).status == 0
    assert len(right(small, to)) == 16


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_targets_that_are_refused(
    cli: Command, small: Path, tmp_path: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / "other").mkdir()
    model = shutil.copytree(small, tmp_path / "model")
    (model / "inside").mkdir()
    (tmp_path / "file").write_text("")
    for place, said in (
        (tmp_path / "none", "there is no such directory"),
        (tmp_path / "file", "there is no such directory"),
        (model, "is inside the model's directory"),
        (model / "inside", "is inside the model's directory"),
    ):
        ended = cli(*line(model, place))
        assert ended.status == 2
        assert said in last(ended)
    assert cli(*line(tmp_path / "none", to)).status == 3
    ended = cli(*line(model, to, "all", "--from", f"x={to}"))
    assert ended.status == 2
    assert "is inside the directory of drive x" in last(ended)
    ended = cli("replicate", "--model", model, "--to", to, "--budget", "all", "--floor", 1)
    assert ended.status == 2
    assert "is on the device of the model's directory" in last(ended)
    far = replace(identify(model), st_dev=(0, 0), disks=(), serial=UNKNOWN)
    monkeypatch.setattr(command, "identify", lambda path: far if path == model else identify(path))
    ended = cli("replicate", "--model", model, "--from", f"x={other}", "--to", to, "--budget", "all", "--floor", 1)
    assert ended.status == 2
    assert "is on the device of drive x: a copy there" in last(ended)
    assert not list(to.iterdir())
    assert sorted(p.name for p in model.iterdir()) == sorted([*(p.name for p in small.iterdir()), "inside"])


def test_one_at_a_time(cli: Command, small: Path, to: Path) -> None:
    fd = os.open(to, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    ended = cli(*line(small, to))
    os.close(fd)
    assert ended.status == 2
    assert "another replicate is writing there" in last(ended)
    assert cli(*line(small, to)).status == 0


def test_the_floor(cli: Command, large: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli("replicate", "--model", large, "--to", to, "--budget", "all", "--floor", "9T", "--allow-same-device")
    assert ended.status == 4
    assert "9 TB are to stay free: make room, or give a smaller --floor" in last(ended)
    nbytes = 6_684_672
    monkeypatch.setattr(Target, "free_bytes", 5 * nbytes // 2 + 10**9)
    ended = cli("replicate", "--model", large, "--to", to, "--budget", "all", "--floor", "1G", "--allow-same-device")
    assert ended.status == 4
    assert f"give --budget {2 * nbytes} or less, or a smaller --floor" in last(ended)
    assert not list(to.iterdir())

    def shrinking() -> Iterator[int]:
        yield from (10**12, 10**12, 10**12)  # planned, said, the first copy
        while True:
            yield 10**9 + nbytes - 1

    free = shrinking()
    monkeypatch.setattr(Target, "free_bytes", property(lambda _: next(free)))
    ended = cli("replicate", "--model", large, "--to", to, "--budget", "all", "--floor", "1G", "--allow-same-device")
    assert ended.status == 4
    assert "1 GB are to stay free: no room for the next copy; those that are there stay" in last(ended)
    assert len(right(large, to)) == 1


def test_a_full_drive_is_one_line_and_leaves_whole_copies(
    cli: Command, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ext4_image(tmp_path) as (_, mount):
        room = shutil.disk_usage(mount).free
        (mount / "filler").write_bytes(b"x" * (room - 3 * 6_684_672))
        (mount / "copies").mkdir()
        monkeypatch.setattr(Target, "free_bytes", 10**12)
        ended = cli(*line(large, mount / "copies"))
        assert ended.status == 4
        assert "No space left on device; the copies that are there stay. Make room" in last(ended)
        assert 1 <= len(right(large, mount / "copies")) <= 3
        (mount / "filler").unlink()
        again = cli(*line(large, mount / "copies"))
        assert again.status == 0
        assert len(right(large, mount / "copies")) == 8


def test_a_read_only_target_is_one_line(cli: Command, small: Path, tmp_path: Path) -> None:
    with ext4_image(tmp_path) as (_, mount):
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True, capture_output=True)
        ended = cli(*line(small, mount))
        assert ended.status == 4
        assert last(ended) == f"error: cannot write to {mount}: Read-only file system"


def test_from_a_model_that_cannot_be_written_to_another_device(
    cli: Command, small: Path, tmp_path: Path, to: Path
) -> None:
    with ext4_image(tmp_path) as (_, mount):
        model = shutil.copytree(small, mount / "model")
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True, capture_output=True)
        assert cli("verify", "--model", model).status == 0
        assert cli("replicate", "--model", model, "--to", to, "--budget", "all", "--floor", 1).status == 0
        assert len(right(model, to)) == 16


def test_a_drive_that_does_not_keep_what_is_written(
    cli: Command, small: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(path: Path, data: memoryview) -> None:
        path.write_bytes(data)
        if path.name.startswith(".L1-E3."):
            flip(path, 9)

    monkeypatch.setattr(writing, "_write", forgetful)
    ended = cli(*line(small, to))
    assert ended.status == 4
    assert "what was written is not what is read back, in MiB 1: this drive, or its cable, cannot be trusted" in last(
        ended
    )
    assert "L1-E3.bin" not in right(small, to)


def test_killed_in_the_middle_and_taken_up_again(cli: Command, start: Start, small: Path, to: Path) -> None:
    process = start(*line(small, to))
    until = time.monotonic() + HANGS_S
    while len(list(to.glob("L*.bin"))) < 5 and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.001)
    process.kill()
    process.wait()
    unfinished = list(to.glob(f".*{PART}"))
    assert len(unfinished) <= 1
    for path in unfinished:
        path.unlink()
    done = right(small, to)
    assert len(done) >= 5
    (to / f".L1-E7.bin{PART}").write_bytes(b"half")
    (to / f".{COPY_NAME}.0123abcd").write_bytes(b"half")
    (to / ".another.part").write_bytes(b"not ours")
    ended = cli(*line(small, to))
    assert ended.status == 0
    assert f"right    {len(done)} copies that were there" in ended.out
    (to / ".another.part").unlink()
    assert len(right(small, to)) == 16


def test_stopped_it_keeps_what_it_has_written(
    cli: Command, small: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = work.Replication.run

    def until_ten(self: work.Replication, plan: work.Plan, progress: Progress) -> None:
        def advanced(done: int, total: int) -> None:
            if self.outcome.written == 10:
                os.kill(os.getpid(), signal.SIGINT)
            progress(done, total)

        whole(self, plan, advanced)

    monkeypatch.setattr(work.Replication, "run", until_ten)
    ended = cli(*line(small, to))
    assert ended.status == 130
    assert last(ended) == "stopped while copying, as asked"
    assert "copied   10 experts" in ended.out
    assert len(right(small, to)) == 10
    with Checkpoint.open(small) as checkpoint:
        assert Manifest.load(to / COPY_NAME, checkpoint).known.sum() >= 10


def test_a_source_that_hangs_can_be_left(cli: Command, small: Path, to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(self: opened.Copies, layer: int, expert: int) -> Buffer:
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(HANGS_S)
        raise DeviceError(Fault.IO, "it came back")

    monkeypatch.setattr(opened.Copies, "fetch", hang)
    try:
        assert cli(*line(small, to)).status == 130
        left = [thread for thread in threading.enumerate() if thread.name.startswith("drives-source")]
        assert left
        assert all(thread.daemon for thread in left), "the program would wait for it"
    finally:
        over.set()


def test_a_home_that_cannot_be_written_is_a_note(
    cli: Command, small: Path, to: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(tmp_path / "file"))
    ended = cli(*line(small, to))
    assert ended.status == 0
    assert f"note     the manifest is kept in {to} alone: " in ended.err
    run = cli("run", *on(small), "--prompt-ids", "1,2", "--max-new", 1, "--drive", f"a={to}")
    assert "verify   the first read of each expert and drive, 16 of 16 experts in the manifest" in run.err
