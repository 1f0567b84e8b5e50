"""Whatever happens to a drive, while another one has the bytes: the same answer, bit for bit, and the story told."""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import matrix
import pytest
import shapes
from copies import every, large_experts, write_experts
from covering import Cell
from loopback import IMAGE_BYTES, ext4_image
from matrix import Answer, Prompt, Site, answer
from trouble import HANGS_S, Doing, Read, Turns, by_drive, delayed, failing, lost, trouble, wrong

from runtime.commands.drives import Failures
from runtime.drives.crew import ReadCounts
from runtime.drives.jobs import Fault
from runtime.drives.ledger import Health
from runtime.generate import Engine
from runtime.weights import layout as arrangement
from runtime.weights.checks import VerifyReads
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL

SLOW_S = 0.002


@dataclass(frozen=True)
class Stand:
    """A checkpoint, copies of all its experts, a prompt and its answer."""

    site: Site
    prompt: Prompt
    plain: Answer


@pytest.fixture(scope="module", params=["small", "large"])
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Experts of a few kB, and of some MiB, which are read in slices."""
    folder, large = tmp_path_factory.mktemp("faults"), request.param == "large"
    if large:
        large_experts(folder / "model")
    else:
        shapes.write_checkpoint("released-proportions", 35, folder / "model")
    prompt = Prompt(tuple(random.Random(0).randrange(256) for _ in range(12)), 8)
    return Stand(Site(folder / "model", folder), prompt, matrix.baseline(folder / "model", [prompt])[0])


COMPLETE: Cell = {"drives": 2, "placement": "complete"}


@contextmanager
def two_drives(
    stand: Stand, fault: Doing | None = None, *, patient: bool = True, verify: VerifyReads = "off"
) -> Iterator[tuple[Engine, Turns]]:
    """The model directory and a drive d0 with all experts, no cache between tokens; what d0 does once it is trusted."""
    model, layout = stand.site.place(COMPLETE)
    if verify != "off":
        stand.site.write_manifest(model)
    with (
        by_drive(patient),
        trouble() as doings,
        Engine.load(model, backend="cpu", layout=layout, reuse=False, verify_reads=verify) as engine,
    ):
        yield engine, Turns(doings, "d0", "model", fault, SLOW_S)


def counted(engine: Engine) -> dict[str, ReadCounts]:
    assert engine.drives is not None
    return engine.drives.counts()[0]


def health(engine: Engine) -> Health:
    assert engine.drives is not None
    assert engine.drives.reader is not None
    return engine.drives.reader.health("d0")


def now_and_then(doing: Doing) -> Doing:
    """The first read and one in three."""
    chance, reads = random.Random(0), count()

    def sometimes(read: Read, into: memoryview) -> int:
        return doing(read, into) if not next(reads) or chance.random() < 1 / 3 else read()

    return sometimes


def half_done(read: Read, into: memoryview) -> int:
    """Some of the bytes come, and then an error."""
    read()
    into[len(into) // 2 :] = bytes(len(into) - len(into) // 2)
    return failing(Fault.SHORT, "end of file")(read, into)


FAULTS: dict[str, Callable[[], Doing]] = {
    "EIO": lambda: failing(Fault.IO, "input/output error"),
    "EIO now and then": lambda: now_and_then(failing(Fault.IO, "input/output error")),
    "vanished": lambda: lost,
    "truncated": lambda: half_done,
    "anything raised": lambda: now_and_then(lambda read, into: 1 // 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_reads_that_fail(fault: str, stand: Stand) -> None:
    with two_drives(stand, FAULTS[fault]()) as (engine, _):
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert counted(engine)["d0"].errors >= 1
        assert counted(engine)["model"].errors == 0
        assert counted(engine)["model"].retries >= 1


def test_wrong_bytes_where_a_manifest_tells(stand: Stand) -> None:
    """A drive that is right at times, which takes a look at every read."""
    with two_drives(stand, now_and_then(wrong), verify="all") as (engine, _):
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert counted(engine)["d0"].spoiled_bytes > 0
        assert counted(engine)["model"].errors == 0


def test_wrong_bytes_where_nothing_tells(stand: Stand) -> None:
    """What this costs without a manifest: the comparison with the baseline sees it, and nothing else would."""
    with two_drives(stand, wrong) as (engine, _):
        assert answer(engine.session(), stand.prompt) != stand.plain
        assert counted(engine)["d0"].errors == 0


def test_a_drive_that_becomes_slow(stand: Stand) -> None:
    with two_drives(stand, delayed(0, 20 * SLOW_S)) as (engine, _):
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert all(counts.errors == 0 and counts.requested_bytes > 0 for counts in counted(engine).values())


def test_reads_that_hang_are_hedged(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads do not come back before the answer is there."""
    monkeypatch.setattr(arrangement, "POLICY", replace(arrangement.POLICY, deadline_floor_s=0.05))
    let_go, hung = threading.Event(), threading.Semaphore(2)

    def hang(read: Read, into: memoryview) -> int:
        if hung.acquire(blocking=False):
            let_go.wait(HANGS_S)
        return read()

    with two_drives(stand, hang, patient=False) as (engine, _):
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert sum(counts.hedges for counts in counted(engine).values()) >= 1
        let_go.set()
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert engine.drives is not None
        assert engine.drives.reader is not None
        for _ in range(1000):
            if engine.drives.reader.idle:
                break
            time.sleep(0.01)
        engine.drives.reader.audit()
        assert engine.drives.reader.pool.in_use == 0


def test_a_drive_that_never_answers_is_told_of_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arrangement, "POLICY", replace(arrangement.POLICY, deadline_floor_s=0.05))
    asked, let_go = threading.Event(), threading.Event()

    def silent(read: Read, into: memoryview) -> int:
        asked.set()
        let_go.wait(HANGS_S)
        return read()

    def reluctant(read: Read, into: memoryview) -> int:
        asked.wait(HANGS_S)
        return read()

    model, layout = stand.site.place(COMPLETE)
    with (
        by_drive(patient=False),
        trouble() as doings,
        Engine.load(model, backend="cpu", layout=layout, reuse=False) as engine,
    ):
        doings |= {"d0": silent, "model": reluctant}
        assert answer(engine.session(), stand.prompt) == stand.plain
        failures = Failures(engine)
        for _ in range(2):
            failures.tell()
        let_go.set()
    assert capsys.readouterr().err == "note     drive d0: it has not answered, and nothing was read from it\n"


def test_a_drive_that_comes_back_is_read_again(stand: Stand) -> None:
    with two_drives(stand, lost) as (engine, turns):
        assert answer(engine.session(), stand.prompt) == stand.plain
        assert health(engine) in (Health.SUSPECT, Health.LOST)
        before = counted(engine)["d0"]
        turns.again()
        for _ in range(2000):
            if health(engine) is Health.READY:
                break
            time.sleep(0.01)
        turns.doings[MODEL] = lost  # or a check on a busy machine may have found d0 too slow to be asked
        assert answer(engine.session(), stand.prompt) == stand.plain
        after = counted(engine)["d0"]
        assert after.requested_bytes - after.checked_bytes > before.requested_bytes - before.checked_bytes


# -- copies and places ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["manifest", "no manifest"])
def test_a_stale_replica_of_the_right_size(known: bool, stand: Stand, tmp_path: Path) -> None:
    """Every file has the bytes of another expert: a manifest tells, and without one the copies are believed."""
    files = sorted(write_experts(stand.site.model, tmp_path / "d0", every).iterdir())
    copies = [file.read_bytes() for file in files]
    for file, other in zip(files, copies[1:] + copies[:1], strict=True):
        file.write_bytes(other)
    if known:
        stand.site.write_manifest(stand.site.model)
    with (
        by_drive(),
        trouble() as doings,
        Engine.load(stand.site.model, backend="cpu", layout=Layout((("d0", tmp_path / "d0"),))) as engine,
    ):
        Turns(doings, "d0", "model")
        assert (answer(engine.session(), stand.prompt) == stand.plain) == known
        assert (counted(engine)["d0"].errors > 0) == known


def everything_below(*places: Path) -> dict[Path, tuple[int, int, int]]:
    """Size, mode and time of change of each file and folder."""
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    return {path: (found.st_size, found.st_mode, found.st_mtime_ns) for path in paths for found in [path.lstat()]}


def test_nothing_is_written_where_a_run_reads(stand: Stand, own_home: Path) -> None:
    """Folders that cannot be written to are as good, and nothing in them changes; what is learned is kept at home."""
    model, layout = stand.site.place(COMPLETE)
    places = [model, *dict(layout.directories).values()]
    modes = {path: path.stat().st_mode for place in places for path in (place, *place.rglob("*"))}
    try:
        for path in modes:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = everything_below(*places)
        with two_drives(stand, verify="first") as (engine, _):
            assert answer(engine.session(), stand.prompt) == stand.plain
        assert everything_below(*places) == before
        assert list((own_home / "heat").iterdir())
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_model_on_a_file_system_that_is_read_only(stand: Stand, tmp_path: Path) -> None:
    with ext4_image(tmp_path) as (_, mount):
        if sum(file.stat().st_size for file in stand.site.model.iterdir()) > IMAGE_BYTES // 4:
            pytest.skip("too large for the image")
        shutil.copytree(stand.site.model, mount / "model")
        write_experts(stand.site.model, mount / "d0", every)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True, timeout=30)
        with (
            by_drive(),
            Engine.load(mount / "model", backend="cpu", layout=Layout((("d0", mount / "d0"),))) as engine,
        ):
            assert answer(engine.session(), stand.prompt) == stand.plain
            assert all(counts.errors == 0 for counts in counted(engine).values())
