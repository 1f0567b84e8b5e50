"""What is learned of the experts over runs: what it counts, how it is kept, and that it never matters to a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commandline import HANGS_S, Command, on

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.arrays import write_arrays
from runtime.generate import Engine
from runtime.weights import heat as learned
from runtime.weights.heat import HALF_LIFE, Heat


@pytest.fixture
def checkpoint(tiny: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(tiny) as checkpoint:
        yield checkpoint


def use(heat: Heat, *experts: int, layer: int = 1, passes: int = 1) -> Heat:
    for _ in range(passes):
        heat.want(layer, np.array(experts))
        heat.end_of_pass()
    return heat


def test_an_expert_counts_once_a_pass_and_fades(checkpoint: Checkpoint) -> None:
    heat = use(Heat.load(checkpoint), 3, 5)
    assert heat.counts.shape == (8, 16)
    assert np.argwhere(heat.counts > 0.999).tolist() == [[0, 3], [0, 5]]
    use(heat, 7, layer=8, passes=HALF_LIFE)
    assert heat.counts[0, 3] == pytest.approx(0.5, rel=1e-3)
    assert heat.counts[7, 7] == pytest.approx(heat.passes, rel=1e-3)
    assert heat.shares([7], [7]) > 0.99 > 0.01 > heat.shares([0], [3])


def test_a_few_passes_say_little(checkpoint: Checkpoint) -> None:
    assert use(Heat.load(checkpoint), 3).shares([0], [3])[0] < 0.05


def test_a_later_run_goes_on_from_it(checkpoint: Checkpoint, own_home: Path) -> None:
    first = use(Heat.load(checkpoint), 1, 2, passes=3)
    first.save()
    assert [p.name for p in (own_home / "heat").iterdir()] == [f"{checkpoint.fingerprint}.safetensors"]
    again = Heat.load(checkpoint)
    np.testing.assert_array_equal(again.counts, first.counts)
    assert again.passes == first.passes
    use(again, 2).save()
    again.save()
    assert Heat.load(checkpoint).counts[0, 1:3] == pytest.approx([3, 4], rel=1e-2)
    assert (first.note, again.note) == ("", "")


def test_runs_at_the_same_time_add_up(checkpoint: Checkpoint) -> None:
    runs = [Heat.load(checkpoint) for _ in range(3)]
    for number, run in enumerate(runs, 1):
        use(run, 0, number, passes=number)
    for run in [*runs, *runs]:
        run.save()
    assert Heat.load(checkpoint).counts[0, :4] == pytest.approx([6, 1, 2, 3], rel=1e-2)


def test_a_long_run_keeps_it_on_the_way_and_waits_for_no_drive(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes are given to the file, and while it cannot be written others go on: nothing is lost or added twice."""
    drive, asked, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        asked.set()
        assert drive.wait(HANGS_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    heat = use(Heat.load(checkpoint), 1)
    monkeypatch.setattr(learned, "SAVE_AFTER_S", 0.0)
    use(heat, 1)
    assert asked.wait(HANGS_S)
    use(heat, 1, 2, passes=3)
    assert not heat.path.exists()
    assert heat.counts[0, 1:3] == pytest.approx([5, 3], rel=1e-2)
    drive.set()
    heat.save()
    assert heat.counts[0, 1:3] == pytest.approx([5, 3], rel=1e-2)
    np.testing.assert_array_equal(Heat.load(checkpoint).counts, heat.counts)
    assert Heat.load(checkpoint).passes == heat.passes == pytest.approx(5, rel=1e-2)


def test_a_pass_that_is_cancelled_counts_for_nothing(checkpoint: Checkpoint) -> None:
    heat = use(Heat.load(checkpoint), 3)
    for layer in (1, 2, 3):
        heat.want(layer, np.array([7]))
    use(heat, 4)
    heat.want(1, np.array([7]))
    heat.save()
    for known in (heat, Heat.load(checkpoint)):
        assert np.flatnonzero(known.counts.any(axis=0)).tolist() == [3, 4]
        assert known.passes == pytest.approx(2, rel=1e-2)


def damage(path: Path, how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    counts, passes = np.ones((8, 16)), np.array([9.0])
    about = {"format": learned.FORMAT, "fingerprint": path.stem}
    match how:
        case "cut":
            write_arrays(path, {"counts": counts, "passes": passes}, about)
            path.write_bytes(path.read_bytes()[:-8])
            return
        case "bit":
            write_arrays(path, {"counts": counts, "passes": passes}, about)
            path.write_bytes(path.read_bytes()[:-1] + b"\x41")
            return
        case "text":
            path.write_text("not a file of this kind")
            return
        case "empty":
            path.write_bytes(b"")
            return
        case "folder":
            path.mkdir()
            return
        case "pipe":
            os.mkfifo(path)
            return
        case "model":
            about["fingerprint"] = "0" * 64
        case "shape":
            counts = np.ones((8, 15))
        case "type":
            counts = np.ones((8, 16), np.float32)
        case "negative":
            counts[3, 3] = -1
        case "nan":
            counts[3, 3] = np.nan
        case "lacking":
            write_arrays(path, {"counts": counts}, about)
            return
    write_arrays(path, {"counts": counts, "passes": passes}, about)


HOWS = ["cut", "bit", "text", "empty", "folder", "pipe", "model", "shape", "type", "negative", "nan", "lacking"]


@pytest.mark.parametrize("how", HOWS)
def test_what_cannot_be_used_is_said_once_and_learned_anew(how: str, checkpoint: Checkpoint, own_home: Path) -> None:
    path = own_home / "heat" / f"{checkpoint.fingerprint}.safetensors"
    damage(path, how)
    heat = Heat.load(checkpoint)
    assert not heat.counts.any()
    assert heat.note.count(str(path)) == 1
    assert "\n" not in heat.note
    use(heat, 4).save()
    if how != "folder":
        assert Heat.load(checkpoint).note == ""
        assert Heat.load(checkpoint).counts[0, 4] > 0.9


def full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_changes_nothing_and_is_said(
    cli: Command, tiny: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 3)
    before = cli(*line)
    kept = {path: path.read_bytes() for path in (own_home / "heat").iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    after = cli(*line)
    assert (after.status, after.out) == (0, before.out)
    assert after.err.count("note ") == before.err.count("note ") + 1
    assert "No space left" in after.err.splitlines()[-1]
    assert {path: path.read_bytes() for path in (own_home / "heat").iterdir()} == kept, "and nothing half-written"


def test_what_a_run_that_could_not_keep_it_has_counted_stays_with_it(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    heat = use(Heat.load(checkpoint), 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        heat.save()
        assert "No space left" in heat.note
        use(heat, 1).save()
    assert heat.counts[0, 1] == pytest.approx(2, rel=1e-2)
    heat.save()
    assert Heat.load(checkpoint).counts[0, 1] == pytest.approx(2, rel=1e-2)


@pytest.mark.parametrize("home", ["a file", "read-only"])
def test_a_home_that_cannot_be_written(
    home: str, cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "home"
    if home == "a file":
        place.write_text("")
    else:
        place.mkdir(mode=0o500)
        if os.access(place, os.W_OK):
            pytest.skip("this user may write anywhere")
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(place))
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 2)
    assert ended.status == 0
    assert ended.err.count("experts") >= 1
    assert "Traceback" not in ended.err


def test_where_no_thread_can_be_begun_it_is_written_all_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heat = Heat.load(checkpoint)
    heat.want(1, np.array([1]))
    heat.end_of_pass()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    heat.save()
    heat.save()
    np.testing.assert_array_equal(Heat.load(checkpoint).counts, heat.counts)
    assert heat.counts.sum() == pytest.approx(1, rel=1e-2)


def test_an_engine_learns_what_it_routes_to(tiny: Path) -> None:
    with Engine.load(tiny, backend="reference") as engine:
        list(engine.session().generate([1, 2, 3, 4], 4))
        assert engine.experts.heat is not None
        counts = engine.experts.heat.counts
        assert counts.sum() == pytest.approx(engine.experts.stats.wanted, rel=1e-2)
        assert engine.experts.heat.passes == pytest.approx(4, rel=1e-2), "a prompt in one chunk, and three tokens"
    with Checkpoint.open(tiny) as checkpoint:
        np.testing.assert_array_equal(Heat.load(checkpoint).counts, counts)
