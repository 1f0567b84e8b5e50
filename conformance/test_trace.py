"""Traces: every slice written down as it was read, what became of guesses, and a file that can be trusted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import Command, on

from runtime.commands.terminal import Interrupts
from runtime.drives.buffers import BufferPool
from runtime.drives.crew import ReadRecord
from runtime.drives.device import DeviceError
from runtime.drives.jobs import MIB, DriveSpec, Fault, Job, Kind, Policy, Priority, Slice, Span
from runtime.drives.outcomes import Dropped, Fate, Landed
from runtime.drives.reader import Reader
from runtime.drives.real import RealDevice
from runtime.drives.trace import COLUMNS, SCHEMA, TraceFile, TraceLog, load
from runtime.errors import UsageError
from runtime.weights import layout as arrangement

TWO = ["--simulate-drive", "a=400MB/s", "--simulate-drive", "b=200MB/s,latency=0.1ms"]


def part(number: int, key: object = (1, 2), **facts: Any) -> Slice:
    """A slice; what is not told is of no interest."""
    known: dict[str, Any] = {
        **{"drive": "a", "file": "f", "offset": 0, "start": 0, "length": 100, "lease": number, "job_bytes": 100},
        **{"phase": 0, "bounce": False, "kind": Kind.FIRST, "priority": Priority.DEMAND, "barrier": 1},
        **{"expected_s": 0.0, "deadline": 0.0},
    }
    return Slice(id=number, key=key, **{**known, **facts})  # type: ignore[arg-type]


def rows(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """A trace read without this project."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    first, head, *table = text.splitlines()
    assert first == f"# {SCHEMA}"
    return json.loads(head.removeprefix("# ")), list(csv.DictReader(table))


def column(trace: TraceFile, name: str) -> list[str]:
    """A column of names."""
    return [trace.names[name][number] for number in trace.slices[name]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever late: a busy machine makes no faults."""
    policy = Policy(max_hedge_leases=4, deadline_floor_s=1000.0, check_timeout_s=20.0)
    monkeypatch.setattr(arrangement, "POLICY", policy)


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_what_is_noted_is_what_is_read(name: str, tmp_path: Path) -> None:
    log, at = TraceLog(), TraceLog().began
    log.begin_pass(0, 5)
    odd = 'a file, with "signs" in it\nand a line'
    log.slice(ReadRecord(part(1, drive="x"), at + 1, at + 2, at + 3.5, 4096, None, ""))
    log.slice(ReadRecord(part(2, (3, 4), file=odd, kind=Kind.RETRY), at, at + 1, at + 2, 0, Fault.SHORT, "is, short"))
    log.slice(ReadRecord(part(3, "trunk 7", length=7), at, at + 1, at + 2, 8192, None, ""))
    path = tmp_path / name
    assert log.write(path, {"model": {"fingerprint": "f"}}) == (3, 0)
    head, table = rows(path)
    assert head["model"] == {"fingerprint": "f"}
    assert (head["slices"], head["dropped"], head["keys"]) == (3, 0, ["trunk 7"])
    assert [p[1:] for p in head["passes"]] == [[0, 5]]
    trace = load(path)
    assert trace.about == head
    assert trace.slices["layer"].tolist() == [1, 3, -1]
    assert trace.slices["expert"].tolist() == [2, 4, 0]
    assert trace.slices["device_bytes"].tolist() == [4096, 0, 8192]
    assert trace.slices["length"].tolist() == [100, 100, 7]
    assert trace.slices["token"].tolist() == [0, 0, 0] or trace.slices["token"].tolist() == [0, -1, -1]
    assert np.allclose(trace.slices["landed"] - trace.slices["started"], [1.5, 1, 1], atol=1e-6)
    assert column(trace, "drive") == ["x", "a", "a"]
    assert column(trace, "kind") == ["first", "retry", "first"]
    assert column(trace, "fault") == ["", "file too short", ""]
    assert list(table[0]) == list(COLUMNS)
    whole = path.read_bytes() if name == "t.csv" else gzip.decompress(path.read_bytes())
    second = list(csv.DictReader(io.StringIO(whole.decode().split("\n", 2)[2])))[1]
    assert (second["file"], second["detail"]) == (odd, "is, short")


def test_what_there_is_no_room_for_is_counted_and_overwrites_nothing(tmp_path: Path) -> None:
    log = TraceLog(limit=100)

    def note(first: int) -> None:
        for number in range(first, first + 50):
            log.slice(ReadRecord(part(number), 1.0, 2.0, 3.0, 100, None, ""))
            log.guess((1, number), Fate.DROPPED, 1.0)

    note(0)
    threads = [threading.Thread(target=note, args=(first,)) for first in (1000, 2000, 3000, 4000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.write(tmp_path / "t.csv", {}) == (100, 150)
    head, _ = rows(tmp_path / "t.csv")
    assert (head["slices"], head["dropped"], head["dropped_guesses"]) == (100, 150, 150)
    leases = load(tmp_path / "t.csv").slices["lease"].tolist()
    assert leases[:50] == list(range(50))
    assert len(set(leases)) == 100


def test_fates_of_guesses(tmp_path: Path) -> None:
    log = TraceLog()
    at = log.began
    for number in range(6):
        guess = part(number, (9, number), priority=Priority.PREFETCH, barrier=7)
        log.slice(ReadRecord(guess, at + number, at + 10, at + 11, 100, None, ""))
    log.slice(ReadRecord(part(9, (9, 1)), at + 20, at + 21, at + 22, 100, None, ""))  # demand of the same expert, later
    log.guess((9, 0), Fate.NEEDED, at + 0, barrier=12)
    log.guess((9, 0), Fate.DROPPED, at + 0)  # the run was stopped: it was needed all the same
    log.guess((9, 1), Fate.DROPPED, at + 1)
    log.guess((9, 2), Fate.UNUSED, at + 2)
    log.guess((9, 3), Fate.TAKEN, at + 3)
    log.guess((9, 4), Fate.TAKEN, at + 4)
    log.guess((9, 4), Fate.NEEDED, barrier=13)
    log.write(tmp_path / "t.csv", {})
    head, table = rows(tmp_path / "t.csv")
    assert [row["fate"] for row in table] == ["needed", "dropped", "unused", "taken", "needed", "open", "demand"]
    assert [row["barrier"] for row in table] == ["12", "7", "7", "7", "13", "7", "1"]
    assert [bool(row["needed"]) for row in table] == [True, False, False, False, True, False, True]
    assert head["guesses"] == {"needed": 2, "dropped": 1, "unused": 1, "taken": 1}


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_file_that_is_cut_off_damaged_or_foreign_is_refused(name: str, tmp_path: Path) -> None:
    log = TraceLog()
    for number in range(200):
        log.slice(ReadRecord(part(number), 1.0, 2.0, 3.0, 100, None, ""))
    path = tmp_path / name
    log.write(path, {})
    good = path.read_bytes()
    bad = [b"", b"hello\n", b"\x1f\x8b", good[: len(good) // 2], good[:-1] if name.endswith("gz") else good[:-30]]
    bad += [b"\xff" * 999, f"# {SCHEMA}\n".encode(), f"# {SCHEMA}\n# {{}}\n".encode()]
    if name == "t.csv":
        bad += [
            good.replace(b",a,first,", b",", 1),
            good.replace(b"# {", b"# [", 1),
            good.replace(b",100,100,", b",100,1" + b"0" * 30 + b",", 1),
            good + good.splitlines()[-1] + b"\n",
        ]
        bad += [good.replace(b"demand,demand", b"demand,dem\x00and", 1).replace(b"100,100", b"1e2,x", 1)]
    for data in bad:
        path.write_bytes(data)
        with pytest.raises(UsageError, match=name):
            load(path)
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path)


# -- guesses as the reader tells them ------------------------------------------------------------------------------


class Shelf:
    """A drive of zeros that can be held up."""

    name, mode, alignment = "a", "memory", 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.gate.set()

    def read(self, file: str, offset: int, into: memoryview) -> int:
        self.begun.release()
        assert self.gate.wait(20)
        return len(into)

    def close(self) -> None:
        pass


def test_the_reader_tells_what_becomes_of_guesses() -> None:
    told: list[tuple[object, Fate, int]] = []
    shelf, queued = Shelf(), []

    def note(key: object, fate: Fate, submitted: float, barrier: int) -> None:
        queued.append(submitted)
        told.append((key, fate, barrier))

    def guess(*numbers: int) -> None:
        spans = {n: (Span("a", "f", n * 100, 100),) for n in numbers}
        reader.submit([Job((1, n), spans[n], Priority.PREFETCH, 5) for n in numbers])

    def demand(number: int) -> None:
        reader.submit([Job((1, number), (Span("a", "f", number * 100, 100),), Priority.DEMAND, 9)])

    def ended(number: int) -> None:
        while not reader._outcomes.landed((1, number)):
            threading.Event().wait(0.001)

    policy = Policy(deadline_floor_s=1000.0)
    with Reader([(shelf, DriveSpec("a", 1, 1e9, 0.0, 1))], BufferPool(MIB), policy=policy, guess=note) as reader:
        guess(0)
        ended(0)
        demand(0)
        assert [type(o) for o in reader.as_landed([(1, 0)])] == [Landed]
        assert told == [((1, 0), Fate.NEEDED, 9)], "once, although it was taken, too"
        guess(1, 2)
        ended(1)
        ended(2)
        assert [type(outcome) for outcome in reader.poll([(1, 1)])] == [Landed]
        reader.cancel([(1, 2)])
        assert told[1:] == [((1, 1), Fate.TAKEN, -1), ((1, 2), Fate.UNUSED, -1)]
        shelf.gate.clear()
        while shelf.begun.acquire(blocking=False):
            pass
        guess(3, 4)
        assert shelf.begun.acquire(timeout=20)
        demand(3)
        reader.cancel([(1, 4)])
        shelf.gate.set()
        assert [type(o) for o in reader.as_landed([(1, 3), (1, 4)])] == [Dropped, Landed]
        assert told[3:] == [((1, 3), Fate.NEEDED, 9), ((1, 4), Fate.DROPPED, 5)]
        demand(5)
        assert [type(o) for o in reader.as_landed([(1, 5)])] == [Landed]
        assert len(told) == 5, "demand is no guess"
        guess(6)
        ended(6)
    assert told[5:] == [((1, 6), Fate.UNUSED, -1)], "closing throws away what landed"
    assert all(queued)


# -- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_is_traced_to_the_byte(cli: Command, tiny: Path, tmp_path: Path) -> None:
    line = ["run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, "--json", "--logits-hash", "--expert-cache"]
    plain = cli(*line, "off").record
    ended = cli(*line, "off", *TWO, "--trace", tmp_path / "t.csv.gz")
    record = ended.record
    assert record["logits_sha256"] == plain["logits_sha256"]
    trace = load(tmp_path / "t.csv.gz")
    about, slices = trace.about, trace.slices
    experts, blocks = slices[slices["layer"] >= 0], slices[slices["layer"] < 0]
    assert about["ended"] == "done"
    assert about["model"] == record["model"]
    assert about["settings"].items() <= record["settings"].items()
    assert about["slices"] == len(slices)
    assert len(experts) == record["cache"]["misses"]
    assert f"trace    {tmp_path / 't.csv.gz'}: {len(slices):,} reads\n" in ended.err
    assert experts["length"].sum() == record["io"]["by_kind"]["demand"] == about["kinds"]["demand"]
    assert blocks["length"].sum() == record["io"]["by_kind"]["trunk"] == about["kinds"]["trunk"]
    for number, name in enumerate(trace.names["drive"]):
        mine, counts = slices[slices["drive"] == number], about["drives"][name]
        assert mine["length"].sum() == counts["requested_bytes"] - counts["checked_bytes"]
        assert len(mine) == counts["reads"] - counts["checks"] + counts["errors"] - counts["failed_checks"]
        assert record["io"]["by_drive"][name]["bytes"] == counts["requested_bytes"]
        assert counts["mode"] == record["io"]["by_drive"][name]["mode"]
    if about["process_read_bytes"] is not None and all(d["mode"] == "direct" for d in about["drives"].values()):
        assert about["process_read_bytes"] >= sum(d["device_bytes"] for d in about["drives"].values())
    assert [p[1:] for p in about["passes"]] == [[0, 3], [3, 1], [4, 1], [5, 1]]
    assert set(experts["token"].tolist()) == {0, 3, 4, 5}
    assert set(blocks["token"].tolist()) == {-1}, "before the first pass"
    by_barrier = {(int(s["barrier"]), int(s["layer"]), int(s["token"])) for s in experts}
    assert len(by_barrier) == len({barrier for barrier, _, _ in by_barrier}), "one layer and token each"
    assert np.all(slices["queued"] <= slices["started"])
    assert np.all(slices["started"] < slices["landed"])
    assert np.array_equal(slices["queued"], slices["needed"])
    assert set(Counter(slices[slices["token"] == 4]["layer"].tolist()).values()) == {4}, "top-4"


def test_small_experts_in_one_directory_are_traced_too(cli: Command, tiny: Path, tmp_path: Path) -> None:
    cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 1, "--trace", tmp_path / "t.csv")
    trace = load(tmp_path / "t.csv")
    assert trace.names["drive"] == ["model"]
    assert len(trace.slices) > 0


@pytest.mark.parametrize("survives", [4, 60], ids=["while loading", "in a pass"])
def test_a_run_that_fails_is_traced_to_its_end(
    survives: int, cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ill(RealDevice):
        count = 0

        def read(self, file: str, offset: int, into: memoryview) -> int:
            self.count += 1
            if self.count > survives:
                raise DeviceError(Fault.GONE, "no such device")
            return super().read(file, offset, into)

    monkeypatch.setattr("runtime.drives.real.RealDevice", Ill)
    path = tmp_path / "t.csv"
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--simulate-drive", "a=100MB/s", "--trace", path)
    assert ended.status == 4
    assert ("layer " in ended.err) == (survives > 9)
    head, table = rows(path)
    assert "no copy left" in head["ended"]
    faults = [row for row in table if row["fault"]]
    assert faults
    assert {(row["fault"], row["detail"]) for row in faults} == {("drive or file gone", "no such device")}
    if head.get("drives"):
        drive = head["drives"]["a"]
        assert len(faults) == drive["errors"] - drive["failed_checks"]
    assert sum(not row["fault"] for row in table) > 0


def test_a_run_that_is_stopped_is_traced_to_its_end(
    cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RealDevice.read
    reads: list[str] = []

    def count(self: RealDevice, file: str, offset: int, into: memoryview) -> int:
        moved = read(self, file, offset, into)
        reads.append(file)
        return moved

    monkeypatch.setattr(RealDevice, "read", count)
    monkeypatch.setattr(Interrupts, "cancelled", lambda self: len(reads) > 60)
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", *TWO, "--trace", tmp_path / "t.csv")
    assert ended.status == 130
    head, table = rows(tmp_path / "t.csv")
    assert head["ended"].startswith("stopped in layer")
    assert table


def test_a_conversation_is_one_trace(cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhello again\n/exit\n"))
    options = ["--backend", "cpu", "--max-new", 1, "--reasoning-effort", "low"]
    assert cli("chat", "--model", tiny, *options, "--trace", tmp_path / "t.csv").status == 0
    passes = load(tmp_path / "t.csv").about["passes"]
    assert sum(n > 1 for _, _, n in passes) == 2, "two prompts"


@pytest.mark.parametrize("where", ["model", "drive", "link", "folder", "missing", "device", "read-only"])
def test_a_place_that_cannot_be_written_is_refused_before_loading(
    where: str, cli: Command, tiny: Path, tmp_path: Path
) -> None:
    drive = tmp_path / "drive"
    (drive / "k3-experts").mkdir(parents=True)
    (tmp_path / "link.csv").symlink_to(tiny / "t.csv")
    file = {
        "model": tiny / "t.csv",
        "drive": drive / "k3-experts" / "t.csv",
        "link": tmp_path / "link.csv",
        "folder": tmp_path,
        "missing": tmp_path / "no" / "t.csv",
        "device": Path("/dev/null"),
        "read-only": Path("/proc/t.csv"),
    }[where]
    before = sorted(tiny.iterdir())
    ended = cli("run", *on(tiny), "--prompt-ids", "1", "--drive", f"d={drive}", "--trace", file)
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1
    assert ended.err.startswith("error: --trace ")
    assert sorted(tiny.iterdir()) == before
    assert list((drive / "k3-experts").iterdir()) == []


def test_without_a_model_there_is_no_place_to_keep_out_of(cli: Command, tmp_path: Path) -> None:
    ended = cli("run", *on(tmp_path / "none"), "--prompt-ids", "1", "--trace", tmp_path / "t.csv")
    assert ended.status == 3
    assert len(ended.err.splitlines()) == 1
