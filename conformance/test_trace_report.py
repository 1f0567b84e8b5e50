"""What is told of a trace: held against traces made by hand, a second way to count, and the reader's own counts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commandline import Command, on
from test_trace import TWO, part

from runtime.commands.tracing import about_run
from runtime.drives.crew import ReadRecord
from runtime.drives.jobs import Fault, Kind, Priority
from runtime.drives.outcomes import Fate
from runtime.drives.report import FATES, Analysis, report
from runtime.drives.throttled import Limit
from runtime.drives.trace import TraceLog, load
from runtime.generate import Engine
from runtime.weights import layout as arrangement
from runtime.weights.layout import Layout

PATIENT = replace(arrangement.POLICY, deadline_floor_s=1000.0, check_timeout_s=20.0)
"""Nothing is ever late: a busy machine makes no faults."""
GUESS = {"priority": Priority.PREFETCH}


class Story:
    """A trace told by hand: seconds and bytes small enough to check in the head."""

    def __init__(self) -> None:
        self.log, self.number = TraceLog(), 0

    def read(
        self, key: tuple[int, int], drive: str, started: float, landed: float, nbytes: int = 100, **facts: Any
    ) -> None:
        self.number += 1
        queued, fault = facts.pop("queued", 0.0), facts.pop("fault", None)
        of = {"lease": self.number, "job_bytes": nbytes, **facts}
        at = self.log.began
        slice_ = part(self.number, key, drive=drive, length=nbytes, **of)
        self.log.slice(ReadRecord(slice_, at + queued, at + started, at + landed, nbytes, fault, ""))

    def told(self, key: tuple[int, int], fate: Fate, queued: float, at: float, barrier: int = -1) -> None:
        self.log.guess(key, fate, self.log.began + queued, barrier, self.log.began + at)

    def analysis(self, tmp_path: Path, layer: int | None = None, **about: Any) -> Analysis:
        self.log.write(tmp_path / "t.csv", about)
        return Analysis(load(tmp_path / "t.csv"), layer)


@pytest.fixture
def story() -> Story:
    return Story()


def near(values: dict[str, float | None], **wanted: float) -> bool:
    return all(values[name] == pytest.approx(value, abs=1e-6) for name, value in wanted.items())


# -- by hand -------------------------------------------------------------------------------------------------------


def test_drives_and_who_landed_last(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 2.0, 400, barrier=1)
    story.read((1, 1), "b", 0.5, 1.5, 100, barrier=1)
    story.read((2, 0), "a", 4.0, 5.0, 100, barrier=2, queued=3.0)
    story.read((2, 1), "b", 3.0, 7.0, 300, barrier=2, queued=3.0)
    story.read((2, 2), "b", 6.0, 8.0, 100, barrier=2, queued=3.0)
    analysis = story.analysis(tmp_path)
    a, b = analysis.by_drive().values()
    assert (a["bytes"], a["reads"], b["bytes"], b["reads"]) == (500, 2, 500, 3)
    assert near(a, busy_s=3.0, bytes_per_s=500 / 3, in_flight=3 / 8, share=0.5)
    assert near(b, busy_s=6.0, bytes_per_s=500 / 6, in_flight=7 / 8, share=0.5)
    assert near(b["latency_s"], p50=2.0, p90=3.6, p99=3.96)
    first, second = analysis.barriers
    assert (first.last, first.jobs, first.bytes, second.last, second.jobs, second.bytes) == ("a", 2, 500, "b", 3, 500)
    assert [first.begin_s, first.end_s, first.gap_s] == pytest.approx([0.0, 2.0, 0.5], abs=1e-6)
    assert [second.begin_s, second.end_s, second.gap_s] == pytest.approx([3.0, 8.0, 3.0], abs=1e-6)
    assert [second.queue_s, second.service_s] == pytest.approx([3.0, 2.0], abs=1e-6)
    assert first.split_s == pytest.approx(400 / (500 / 3), abs=1e-6)
    assert second.split_s == pytest.approx(400 / (500 / 6), abs=1e-6)
    assert second.fluid_s == pytest.approx(500 / (500 / 3 + 500 / 6), abs=1e-6)
    by_a, by_b = analysis.last_by("last", ["a", "b"])
    assert (by_a["barriers"], by_b["barriers"], by_a["share"]) == (1, 1, 0.5)
    assert near(by_a["gap_s"], sum=0.5, p50=0.5)
    assert near(by_b["gap_s"], sum=3.0, p90=3.0)
    assert [row["layer"] for row in analysis.by_layer()] == [2, 1]
    assert [b.layer for b in analysis.worst(1)] == [2]
    assert near(analysis.times()["seconds"], sum=7.0, p50=3.5)
    assert [b.number for b in story.analysis(tmp_path, layer=2).barriers] == [2]


def test_an_image_on_a_disk_is_no_disk_more(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 2.0, 400)
    disks = {"sda": {"read_bytes": 900, "written_bytes": 0}, "loop4": {"read_bytes": 400, "written_bytes": 0}}
    apart = story.analysis(tmp_path, process_read_bytes=800, disks=disks)
    assert apart.accounts()["foreign_bytes"] == 500
    disks["loop4"]["on"] = ["sda"]  # type: ignore[assignment]
    assert story.analysis(tmp_path, process_read_bytes=800, disks=disks).accounts()["foreign_bytes"] == 100


def test_a_late_read_holds_nobody_up_once_another_copy_is_there(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 9.0, barrier=1, lease=7)
    story.read((1, 0), "b", 2.0, 3.0, barrier=1, lease=8, kind=Kind.HEDGE)
    story.read((1, 1), "a", 0.0, 2.5, barrier=1)
    analysis = story.analysis(tmp_path)
    (barrier,) = analysis.barriers
    assert (barrier.last, barrier.kind, barrier.jobs, barrier.bytes) == ("b", "hedge", 2, 200)
    assert [barrier.seconds, barrier.gap_s] == pytest.approx([3.0, 0.5], abs=1e-6)
    assert analysis.troubles()["a"]["unpublished_bytes"] == 100
    assert analysis.troubles()["b"] == {"failed": {}, "retries": 0, "hedges": 1, "unpublished_bytes": 0}


def test_a_buffer_that_is_not_whole_is_worth_nothing(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 1.0, 100, barrier=1, lease=5, job_bytes=200)
    story.read((1, 0), "b", 2.0, 6.0, 200, barrier=1, lease=6, kind=Kind.HEDGE)
    analysis = story.analysis(tmp_path)
    (barrier,) = analysis.barriers
    assert (barrier.last, barrier.bytes, barrier.end_s) == ("b", 200, pytest.approx(6.0, abs=1e-6))
    assert analysis.troubles()["a"]["unpublished_bytes"] == 100


def test_a_gap_does_not_begin_before_its_barrier(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 1.0, **GUESS)
    story.told((1, 0), Fate.NEEDED, 0.0, at=5.0, barrier=2)
    story.read((1, 1), "b", 5.5, 7.0, barrier=2, queued=5.0)
    (barrier,) = story.analysis(tmp_path).barriers
    assert [barrier.seconds, barrier.gap_s] == pytest.approx([2.0, 2.0], abs=1e-6)


def test_failed_reads_count_for_nothing_but_trouble(story: Story, tmp_path: Path) -> None:
    half = {"barrier": 1, "lease": 5, "job_bytes": 200}
    story.read((1, 0), "a", 0.0, 1.0, 100, **half)
    story.read((1, 0), "b", 0.0, 1.5, 100, fault=Fault.IO, start=100, **half)
    story.read((1, 0), "a", 1.5, 4.0, 100, start=100, kind=Kind.RETRY, **half)
    analysis = story.analysis(tmp_path)
    (barrier,) = analysis.barriers
    assert (barrier.last, barrier.kind, barrier.jobs, barrier.bytes) == ("a", "retry", 1, 200)
    assert barrier.gap_s != barrier.gap_s, "one drive read all"
    assert [d["bytes"] for d in analysis.by_drive().values()] == [200, 0]
    assert analysis.by_drive()["b"]["bytes_per_s"] == 0
    assert analysis.troubles()["b"]["failed"] == {"i/o error": 1}
    assert [r["barriers"] for r in analysis.last_by("kind", ["demand", "retry"])] == [0, 1]


def test_every_prefetched_byte_has_one_fate(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 1.0, 10, **GUESS, job_bytes=30, lease=1)  # in time, late, and demand by then
    story.read((1, 0), "a", 1.0, 3.0, 15, **GUESS, job_bytes=30, lease=1)
    story.read((1, 0), "b", 2.5, 4.0, 5, barrier=6, job_bytes=30, lease=1)
    story.told((1, 0), Fate.NEEDED, 0.0, at=2.0, barrier=6)
    story.read((1, 1), "a", 0.0, 1.0, 7, **GUESS)
    story.told((1, 1), Fate.UNUSED, 0.0, at=9.0)
    story.read((1, 2), "b", 0.0, 1.0, 70, **GUESS, job_bytes=90)
    story.told((1, 2), Fate.DROPPED, 0.0, at=0.5)
    story.read((1, 3), "b", 0.0, 1.0, 700, **GUESS)
    story.told((1, 3), Fate.TAKEN, 0.0, at=2.0)
    story.read((1, 4), "b", 0.0, 1.0, 7000, **GUESS)
    story.read((1, 5), "b", 0.0, 1.0, 70000, **GUESS, fault=Fault.IO)
    story.read((1, 6), "a", 0.0, 9.0, 2, **GUESS, lease=60)  # late, read again elsewhere
    story.read((1, 6), "b", 5.0, 6.0, 2, kind=Kind.HEDGE, barrier=6, lease=61)
    story.told((1, 6), Fate.NEEDED, 0.0, at=4.0, barrier=6)
    analysis = story.analysis(tmp_path)
    found = report(analysis)["prefetch_by_drive"]
    assert found["a"] == {"in_time": 10, "late": 15, "cancelled": 0, "wasted": 9, "open": 0}
    assert found["b"] == {"in_time": 0, "late": 0, "cancelled": 70, "wasted": 0, "open": 7700}
    (barrier,) = analysis.barriers
    assert (barrier.number, barrier.jobs, barrier.last, barrier.kind) == (6, 2, "b", "hedge")
    assert [barrier.begin_s, barrier.end_s] == pytest.approx([2.0, 6.0], abs=1e-6)
    assert barrier.gap_s == pytest.approx(3.0, abs=1e-6)
    assert barrier.fluid_s == pytest.approx(22 / sum(analysis.rates), abs=1e-6), "what was there is not left to read"


def test_what_is_there_in_time_is_no_wait(story: Story, tmp_path: Path) -> None:
    story.read((1, 0), "a", 0.0, 1.0, **GUESS)
    story.told((1, 0), Fate.NEEDED, 0.0, at=5.0, barrier=2)
    story.read((2, 0), "a", 6.0, 7.0, barrier=3, queued=6.0)
    analysis = story.analysis(tmp_path)
    assert len(analysis.barriers) == 2
    assert [b.number for b in analysis.waited] == [3]
    assert analysis.times()["ready"] == 1


def test_widths(story: Story, tmp_path: Path) -> None:
    for barrier, jobs in enumerate((16, 17, 48, 49, 96, 97)):
        for expert in range(jobs):
            story.read((barrier, expert), "ab"[expert % 2], 0.0, 1.0 + expert, barrier=barrier)
    rows = story.analysis(tmp_path).by_width()
    assert [(row["jobs"], row["barriers"]) for row in rows] == [("≤16", 1), ("17–48", 2), ("49–96", 2), (">96", 1)]
    assert all(row["gap_s"]["p50"] == pytest.approx(1.0, abs=1e-6) for row in rows)


def test_the_turn_of_a_layer_is_one_barrier(story: Story, tmp_path: Path) -> None:
    story.log._passes = [(story.log.began, 0, 1)]
    story.read((2, 9), "b", 0.5, 1.5, **GUESS, queued=0.5)
    story.told((2, 9), Fate.TAKEN, 0.5, at=3.5)
    story.told((2, 9), Fate.NEEDED, 0.5, at=3.9)
    for barrier, (layer, queued) in enumerate([(1, 0.0), (1, 1.0), (1, 1.5), (2, 4.0)]):
        story.read((layer, barrier), "a", queued, queued + 1, barrier=barrier, queued=queued)
    analysis = story.analysis(tmp_path)
    assert [(b.layer, b.jobs) for b in analysis.barriers] == [(1, 3), (2, 2)]
    assert [b.seconds for b in analysis.barriers] == pytest.approx([2.5, 1.1], abs=1e-6)
    assert analysis.barriers[1].gap_s == pytest.approx(1.1, abs=1e-6)


# -- another way to count ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_random_traces_counted_the_long_way(seed: int, story: Story, tmp_path: Path) -> None:
    rng = random.Random(seed)
    told: list[tuple[int, str, int, float, float]] = []
    for barrier in range(1, 40):
        queued = barrier * 10.0
        for expert in range(rng.randint(1, 30)):
            drive, started = rng.choice("abc"), queued + rng.randint(0, 400) / 100
            landed = started + rng.randint(1, 400) / 100
            nbytes = rng.randint(1, 1000)
            story.read((barrier % 7, expert), drive, started, landed, nbytes, barrier=barrier, queued=queued)
            told.append((barrier, drive, nbytes, started, landed))
    analysis = story.analysis(tmp_path)
    for name, drive in analysis.by_drive().items():
        mine = [t for t in told if t[1] == name]
        busy = {n for _, _, _, s, e in mine for n in range(round(s * 100), round(e * 100))}
        assert drive["bytes"] == sum(t[2] for t in mine)
        assert drive["busy_s"] == pytest.approx(len(busy) / 100, abs=1e-5)
    assert len(analysis.barriers) == 39
    for b in analysis.barriers:
        ends: dict[str, float] = {}
        for _, drive, _, _, landed in (t for t in told if t[0] == b.number):
            ends[drive] = max(landed, ends.get(drive, 0.0))
        ranked = sorted(ends.values())
        assert b.end_s == pytest.approx(ranked[-1], abs=1e-6)
        assert ends[b.last] == pytest.approx(ranked[-1], abs=1e-6)
        if len(ranked) > 1:
            assert b.gap_s == pytest.approx(ranked[-1] - ranked[-2], abs=1e-6)
        assert b.bytes == sum(t[2] for t in told if t[0] == b.number)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a run over two drives."""
    from runtime.cli import main

    path = tmp_path_factory.mktemp("traces") / "t.csv.gz"
    line = ["run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 5, *TWO, "--expert-cache", "off", "--trace", path]
    patch = pytest.MonkeyPatch()
    patch.setattr(arrangement, "POLICY", PATIENT)
    assert main([str(word) for word in line]) == 0
    patch.undo()
    return path


def test_the_report_of_a_run(cli: Command, traced: Path) -> None:
    record = cli("trace", "report", traced, "--json").record
    about = load(traced).about
    assert record["schema"] == "expertstream.report/1"
    assert record["model"] == about["model"]
    for name, drive in record["drives"].items():
        counts = about["drives"][name]
        assert drive["bytes"] == counts["requested_bytes"] - counts["checked_bytes"]
        assert counts["device_bytes"] >= drive["device_bytes"] >= drive["bytes"]
    assert sum(d["bytes"] for d in record["drives"].values()) == about["kinds"]["demand"] + about["kinds"]["trunk"]
    assert record["barriers"]["barriers"] == sum(r["barriers"] for r in record["last_by_drive"])
    assert record["barriers"]["barriers"] == sum(r["barriers"] for r in record["by_width"])
    assert record["barriers"]["barriers"] == 5 * len(record["by_layer"]), "one for each layer with experts and pass"
    shown = cli("trace", "report", traced, "--top", 2)
    assert shown.status == 0
    assert shown.out.count("as the reader counted") == 2
    assert "Layers with the largest gaps, 2 of" in shown.out
    one = cli("trace", "report", traced, "--layer", record["by_layer"][0]["layer"], "--json").record
    assert [row["layer"] for row in one["by_layer"]] == [record["by_layer"][0]["layer"]]
    assert one["barriers"]["barriers"] == 5


def test_what_becomes_of_guesses_is_what_the_store_counts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrangement, "POLICY", PATIENT)
    log, layout = TraceLog(), Layout(limits=(Limit("a", 4e8), Limit("b", 2e8)))
    options: dict[str, Any] = {"expert_cache": 12 << 16, "prefetch": True, "layout": layout, "trace": log}
    with Engine.load(tiny, backend="reference", **options) as engine:
        assert engine.prefetch == "on"
        list(engine.session().generate(list(range(8)), 24))
        assert engine.drives is not None
        guesses, read = engine.experts.stats.guesses, engine.drives.counts()[1]["prefetch"].requested_bytes
        log.write(tmp_path / "t.csv", about_run(engine, None, "done"))
    found = report(Analysis(load(tmp_path / "t.csv")))
    told = {fate: sum(d[fate] for d in found["prefetch_by_drive"].values()) for fate in FATES}
    assert guesses.in_time > 0
    assert sum(told.values()) == read
    assert sum(told.values()) == sum(sum(d.values()) for d in found["prefetch_by_layer"].values())
    assert told["in_time"] >= guesses.in_time, "some landed between being looked for and being asked for"
    assert told["in_time"] + told["late"] <= guesses.in_time + guesses.late, "some were asked for before they began"
    assert told["wasted"] == guesses.wasted
    assert told["cancelled"] <= guesses.cancelled
    assert told["open"] <= guesses.open


def test_the_picture(cli: Command, traced: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    assert cli("trace", "report", traced, "--svg", path, "--top", 3).status == 0
    tree = ElementTree.parse(path)
    text = path.read_text()
    assert tree.getroot().tag.endswith("svg")
    assert len(re.findall(r"[0-9]+ experts, ", text)) == 4, "three and the median"
    assert text.count('z" fill=') == 4, "one last lander in each"
    assert len(re.findall(r"<title>layer", text)) >= 4


def test_a_picture_of_strange_names_is_still_one(story: Story, tmp_path: Path) -> None:
    from runtime.commands.picture import draw

    story.read((1, 0), "<a&b>", 0.0, 1.0)
    ElementTree.fromstring(draw(story.analysis(tmp_path), 5))
    empty = Story()
    empty.read((1, 0), "a", 0.0, 1.0, **GUESS)
    ElementTree.fromstring(draw(empty.analysis(tmp_path), 5))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (lambda t, d: [d / "none"], "cannot read"),
        (lambda t, d: [Path(__file__)], "is no trace"),
        (lambda t, d: [t, "--layer", 77], "--layer 77"),
        (lambda t, d: [t, "--top", 0], "--top 0"),
        (lambda t, d: [t, "--svg", d], "is a directory"),
        (lambda t, d: [t, "--svg", d / "no" / "t.svg"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(
    line: Callable[[Path, Path], list[object]], says: str, cli: Command, traced: Path, tmp_path: Path
) -> None:
    ended = cli("trace", "report", *line(traced, tmp_path))
    assert ended.status == 2
    assert ended.out == ""
    assert len(ended.err.splitlines()) == 1
    assert says in ended.err
    ended = cli("trace", "report", *line(traced, tmp_path), "--json")
    assert says in json.loads(ended.out)["error"]["message"]
