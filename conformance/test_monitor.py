"""Watching disks: what the counters say, windows and peaks, a sampler that keeps its deadlines, and the command."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from commandline import Command, Start, on, read_until
from loopback import ext4_image

from runtime.commands import monitor as command
from runtime.commands.monitor import sparkline
from runtime.drives import kernel
from runtime.drives.buffers import aligned
from runtime.drives.identity import identify
from runtime.drives.kernel import DiskCounters, DiskCounts, Witness
from runtime.drives.monitor import COLUMNS, SCHEMA, TOTAL, Meter, Sample, Sampler
from runtime.drives.real import RealDevice

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads the counters of Linux")
MB = 10**6


def sample(t: float, **disks: int) -> Sample:
    """Disks that have read so many MB, in reads of one MB that took 10 ms each."""
    return Sample(t, {name: DiskCounts(n, n * MB, n / 100, n // 2, n * 1000, 0.0, 3) for name, n in disks.items()})


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """The disk below the tests, where the system knows one and counts for it."""
    disks = identify(tmp_path).disks
    if len(disks) != 1 or disks[0] not in DiskCounters(disks).read():
        pytest.skip("the disk below the tests is not known, or not counted")
    return disks[0]


# -- counters ------------------------------------------------------------------------------------------------------


@LINUX
def test_the_counters_of_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SYS_BLOCK", tmp_path)
    (tmp_path / "sda" / "device").mkdir(parents=True)
    (tmp_path / "md0").mkdir()
    stat = " 648059   62384 495339203 7661319   208344  534644 308327184 1182136    7 287220 8900346 0 0 0 0 0 0\n"
    (tmp_path / "sda" / "stat").write_text(stat)
    (tmp_path / "md0" / "stat").write_text("nothing that is known\n")
    counters = DiskCounters(["sda", "sda", "md0", "gone"])
    wanted = DiskCounts(648059, 495339203 * 512, 7661.319, 208344, 308327184 * 512, 1182.136, 7)
    assert counters.read() == {"sda": wanted}
    (tmp_path / "sda" / "stat").write_text(stat.replace("648059", "648061"))
    assert counters.read()["sda"] - wanted == DiskCounts(reads=2, in_flight=7)
    assert DiskCounters.all_disks() == ("sda",), "volumes made of others are none"
    counters.close()
    assert counters.read() == {}


def test_two_disks_as_one() -> None:
    one, other = DiskCounts(1, 2, 3.0, 4, 5, 6.0, 7), DiskCounts(10, 20, 30.0, 40, 50, 60.0, 70)
    assert one + other == DiskCounts(11, 22, 33.0, 44, 55, 66.0, 77)
    assert (one + replace(other, in_flight=-1)).in_flight == -1


@LINUX
def test_what_is_read_from_a_disk_is_witnessed(disk: str, tmp_path: Path) -> None:
    path, nbytes = tmp_path / "file", 4 << 20
    path.write_bytes(os.urandom(nbytes))
    os.sync()
    device = RealDevice("d", tmp_path)
    if device.mode != "direct":
        pytest.skip(f"no direct reads here: {device.mode}")
    witness = Witness({"d": [disk], "nowhere": [], "gone": ["no such disk"]})
    moved = device.read("file", 0, aligned(nbytes, device.alignment))
    process, disks = witness.since()
    device.close()
    assert process is not None
    assert process >= moved >= nbytes
    assert disks.keys() == {disk}
    assert disks[disk].read_bytes >= moved
    assert disks[disk].reads > 0
    witness.close()


@LINUX
def test_a_device_of_our_own_counts_our_reads_and_no_others(tmp_path: Path) -> None:
    with ext4_image(tmp_path) as (_, mount):
        (mount / "file").write_bytes(os.urandom(8 << 20))
        os.sync()
        (loop,) = identify(mount).disks
        device = RealDevice("d", mount)
        into = aligned(8 << 20, device.alignment)
        device.read("file", 0, into)  # the map of the file is in memory now
        witness = Witness({"d": [loop]})
        moved = sum(device.read("file", 0, into) for _ in range(3))
        (counted,) = witness.since()[1].values()
        device.close()
        witness.close()
    assert device.mode == "direct"
    assert counted.read_bytes == moved == 3 * (8 << 20)
    assert counted.written_bytes < 1 << 20


@LINUX
def test_a_run_tells_what_the_kernel_counted(disk: str, cli: Command, tiny: Path) -> None:
    ended = cli("run", *on(tiny), "--prompt-ids", 1, "--max-new", 1, "--simulate-drive", "a=400MB/s", "--stats")
    assert re.search(rf"^disk {disk} +.* read, .* written by all, below a$", ended.err, re.MULTILINE)
    assert re.search(r"^by the kernel +.* fetched from storage by this process$", ended.err, re.MULTILINE)


# -- windows -------------------------------------------------------------------------------------------------------


def test_windows_means_and_peaks() -> None:
    meter = Meter(0.1)
    for tick in range(101):  # one second: a reads 100 MB evenly, b 60 MB in its first half
        meter.feed([sample(tick / 100, a=tick, b=min(tick, 50) * 6 // 5)])
    whole = meter.whole()
    assert whole["a"].bytes_per_s == pytest.approx(100 * MB)
    assert whole["b"].bytes_per_s == pytest.approx(60 * MB)
    assert whole[TOTAL].bytes_per_s == pytest.approx(160 * MB)
    assert whole["a"].reads_per_s == pytest.approx(100)
    assert whole["a"].mean_bytes == MB
    assert whole["a"].latency_s == pytest.approx(0.01)
    assert whole["a"].in_flight == pytest.approx(1.0)
    assert whole[TOTAL].done.in_flight == 6
    assert meter.peaks["a"] == pytest.approx(100 * MB)
    assert meter.peaks["b"] == pytest.approx(120 * MB)
    assert meter.peaks[TOTAL] == pytest.approx(220 * MB), "together, not the sum of what each did at another time"
    assert len(meter.windows["a"]) == 10
    assert (meter.samples, meter.late) == (101, 0)
    recent = meter.recent("b", 0.2)
    assert recent is not None
    assert recent.done.reads == 0
    assert recent.mean_bytes == recent.latency_s == 0.0
    assert recent.seconds == pytest.approx(0.2)


def test_a_window_that_came_late_is_no_peak() -> None:
    meter = Meter(0.1)
    meter.feed([sample(0.0, a=0), sample(0.1, a=10), sample(0.234, a=30), sample(0.37, a=80), sample(0.47, a=81)])
    assert meter.late == 1, "36 ms, and not 34"
    assert meter.peaks["a"] == pytest.approx(20 * MB / 0.134)
    assert meter.whole()["a"].done.reads == 81


def test_disks_that_come_and_go() -> None:
    meter = Meter(0.1)
    meter.feed([sample(0.0, a=5, b=5), sample(0.1, a=6), sample(0.2, a=7, b=2), sample(0.3, a=8, b=4)])
    assert meter.whole().keys() == {"a", TOTAL}, "b counts anew"
    assert [w.done.reads for w in meter.windows["b"]] == [2]
    assert Meter().whole() == {}
    assert Meter().recent("a") is None


def test_sparkline() -> None:
    assert sparkline([0, 1, 4, 8, 9], 8) == " ▁▄██"
    assert sparkline([0, 0], 0) == "  "


# -- the sampler ---------------------------------------------------------------------------------------------------


class Counter:
    """Counts its reads; holds up those it is told to."""

    def __init__(self) -> None:
        self.reads, self.hold, self.held = 0, -1, threading.Event()
        self.enough = threading.Event()

    def __call__(self, counters: DiskCounters) -> dict[str, DiskCounts]:
        self.reads += 1
        if self.reads == self.hold:
            self.held.wait(0.05)
        if self.reads >= 20:
            self.enough.set()
        return {"a": DiskCounts(self.reads)}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counting = Counter()
    monkeypatch.setattr(DiskCounters, "read", lambda self: counting(self))
    return counting


def test_samples_keep_to_their_deadlines(counter: Counter) -> None:
    counter.hold = 5
    sampler = Sampler(["a"], 0.005).start()
    assert counter.enough.wait(60)
    sampler.stop()
    samples = sampler.drain()
    assert [s.disks["a"].reads for s in samples] == list(range(1, counter.reads + 1))
    slots = [int(s.t / 0.005 + 1e-3) for s in samples[:-1]]
    assert all(before < after for before, after in pairwise(slots)), "at most one for a deadline"
    assert sampler.missed >= 9, "50 ms were slept through, and are not made up for"
    assert sampler.dropped == 0
    assert sampler.drain() == []


def test_samples_that_nobody_takes_away_are_counted(counter: Counter) -> None:
    sampler = Sampler(["a"], 0.001, buffer=7).start()
    while sampler.dropped < 3:
        threading.Event().wait(0.001)
    sampler.stop()
    assert [s.disks["a"].reads for s in sampler.drain()] == list(range(1, 8)), "the first, and nothing over them"
    assert counter.reads == 7


# -- the command ---------------------------------------------------------------------------------------------------


def table(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    first, head, *lines = path.read_text().splitlines()
    assert first == f"# {SCHEMA}"
    return json.loads(head.removeprefix("# ")), list(csv.DictReader(lines))


def test_watching_for_a_while(disk: str, cli: Command, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "m").mkdir()
    places = ["--model", tmp_path / "m", "--drive", f"d={tmp_path / 'd'}"]
    ended = cli("drives", "monitor", *places, "--seconds", 0.4, "--csv", tmp_path / "t.csv", "--pid", os.getpid())
    assert ended.status == 0
    head, rows = table(tmp_path / "t.csv")
    assert head["disks"] == {disk: ["model", "d"]}
    assert list(rows[0]) == list(COLUMNS)
    assert f"csv      {tmp_path / 't.csv'}: {len(rows)} samples\n" in ended.err
    assert f"{len(rows)} samples" in ended.out
    assert f"{tmp_path / 't.csv'} lies on {disk}" in ended.err
    assert f"{disk} (model, d)" in ended.out
    assert {row["disk"] for row in rows} == {disk}
    for name in ("t_s", "reads", "read_bytes", "writes", "written_bytes"):
        values = [float(row[name]) for row in rows]
        assert values == sorted(values)
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_interrupting_is_the_way_out(start: Start, disk: str, tmp_path: Path, signum: int, status: int) -> None:
    process = start("drives", "monitor", "--drive", f"d={tmp_path}", "--csv", tmp_path.parent / "t.csv")
    assert process.stderr is not None
    read_until(process.stderr.fileno(), b"reads/s")
    process.send_signal(signum)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == status
    assert f"{disk} (d)" in out.decode()
    assert len(table(tmp_path.parent / "t.csv")[1]) > 1


def test_a_process_is_watched_to_its_end(start: Start, disk: str, tmp_path: Path) -> None:
    watched = start("drives", "monitor", "--drive", f"d={tmp_path}")
    process = start("drives", "monitor", "--drive", f"d={tmp_path}", "--pid", watched.pid)
    assert process.stderr is not None
    read_until(process.stderr.fileno(), f" {watched.pid}: ".encode())
    watched.kill()
    watched.wait()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert str(watched.pid) in out.decode()


def test_a_process_may_go_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = command._Process(os.getpid())
    assert watched.lives

    def gone(self: psutil.Process) -> str:
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "status", gone)
    assert not watched.lives


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--interval", "10"], "--interval '10'"),
        (["--interval", "0.1ms"], "--interval"),
        (["--seconds", 0], "--seconds 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--seconds", "1e400"], "--seconds inf"),
        (["--pid", -5], "--pid -5: there is no such process"),
        (["--csv", "{d}/t.csv"], "is in the directory of drive d"),
        (["--csv", "{m}/sub/t.csv"], "is in the directory of drive model"),
        (["--csv", "{d}/../no/t.csv"], "cannot be written"),
        (["--pid", 2**22 + 1], "no such process"),
        (["--drive", "x=/no/such/place"], "/no/such/place"),
    ],
)
def test_mistakes_are_one_line(options: list[object], says: str, cli: Command, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "m" / "sub").mkdir(parents=True)
    line = [str(word).format(d=tmp_path / "d", m=tmp_path / "m") for word in options]
    ended = cli("drives", "monitor", "--model", tmp_path / "m", "--drive", f"d={tmp_path / 'd'}", "--seconds", 5, *line)
    assert ended.status == 2
    assert ended.out == ""
    assert says in ended.err.splitlines()[-1]
    assert not list((tmp_path / "d").iterdir())


def test_a_disk_that_is_not_known_cannot_be_watched(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = replace(identify(tmp_path), disks=(), filesystem="overlay")
    monkeypatch.setattr(command, "identify", lambda path: unknown)
    ended = cli("drives", "monitor", "--drive", f"d={tmp_path}", "--seconds", 1)
    assert ended.status == 2
    assert "nothing to watch: drive d: the disk below" in ended.err
    monkeypatch.setattr(command, "identify", lambda path: replace(unknown, disks=("no-such-disk",)))
    assert "does not count for no-such-disk" in cli("drives", "monitor", "--drive", f"d={tmp_path}").err
