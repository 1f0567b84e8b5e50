"""The timeline of a run: at each moment the thread is in one phase, in the order of the model, and nothing is computed
before it has been read. No test looks at how long anything took."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commandline import Command, on

from runtime.commands.arguments import parse_passes
from runtime.commands.strip import draw
from runtime.commands.timeline import SCHEMA, choose
from runtime.drives.buffers import BufferPool
from runtime.drives.jobs import DriveSpec, Job, Priority, Span
from runtime.drives.reader import Reader
from runtime.drives.trace import TraceLog
from runtime.drives.waits import Waited, Waits
from runtime.errors import Cancelled, UsageError
from runtime.generate import Engine, Step
from runtime.model import timeline as phases
from runtime.model.k3 import K3
from runtime.model.timeline import PHASES, TimedK3, Timeline

PROMPT = [1, 2, 3, 4, 5, 6, 7]
TWO = ["--simulate-drive", "a=400MB/s,latency=20ms", "--simulate-drive", "b=200MB/s,latency=20ms"]
NEAR = 1e-6
"""Times are written with seven digits."""


@pytest.fixture
def timed(tiny: Path) -> Iterator[tuple[Engine, Timeline]]:
    """An engine that keeps a timeline, and reads every expert anew."""
    timeline = Timeline()
    with Engine.load(tiny, backend="reference", reuse=False, chunk=4, trace=TraceLog(), timeline=timeline) as engine:
        yield engine, timeline


def answer(engine: Engine, new: int = 3) -> list[Step]:
    return list(engine.session().generate(PROMPT, new, logits_hash=True, stop_ids=()))


def table(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [dict(zip(record[name]["columns"], row, strict=True)) for row in record[name]["rows"]]


# -- spans -----------------------------------------------------------------------------------------------------------


def test_spans_follow_each_other_and_add_up_to_the_pass(timed: tuple[Engine, Timeline]) -> None:
    engine, timeline = timed
    answer(engine)
    assert [(p.position, p.rows) for p in timeline.passes] == [(0, 4), (4, 3), (7, 1), (8, 1)]
    for of in timeline.passes:
        ends = [of.began, *(span.ended for span in of.spans)]
        assert [span.began for span in of.spans] == ends[:-1]
        assert of.ended == ends[-1]
        assert of.seconds == pytest.approx(sum(span.seconds for span in of.spans))
        assert not of.missing


def test_every_layer_goes_through_its_phases_in_the_order_of_the_model(timed: tuple[Engine, Timeline]) -> None:
    engine, timeline = timed
    answer(engine)
    config = engine.config
    for number, of in enumerate(timeline.passes):
        layers = list(dict.fromkeys(span.layer for span in of.spans))
        assert layers == [*range(config.num_hidden_layers), -1]
        for layer in layers[:-1]:
            mine = [span for span in of.spans if span.layer == layer]
            first = list(dict.fromkeys(span.phase for span in mine))
            assert first.index(phases.RESIDUAL) < first.index(phases.ATTENTION)
            if not config.is_moe(layer):
                assert set(first) == {phases.RESIDUAL, phases.ATTENTION, phases.DENSE}
                continue
            order = [phases.ATTENTION, phases.ROUTING, phases.STORE, phases.SHARED, phases.EXPERT]
            assert [phase for phase in first if phase in order] == order
        assert of.spans[-1].phase == phases.RESIDUAL
        head = [s.phase for s in of.spans if s.layer == -1 and s.phase != phases.RESIDUAL]
        assert head == [phases.HEAD] * (number > 0), "of the prompt, the last row of the last chunk has logits"
    for of in timeline.passes[2:]:
        for layer in config.moe_layers:
            experts = {s.expert for s in of.spans if s.layer == layer and s.phase == phases.EXPERT}
            assert len(experts) == config.num_experts_per_token
    seen = {span.phase for of in timeline.passes for span in of.spans}
    assert set(PHASES) - seen == {phases.LOOK_AHEAD}, "nothing is guessed here, and everything is waited for"


def test_a_look_ahead_is_one_phase_with_all_that_is_in_it(tiny: Path) -> None:
    timeline = Timeline()
    with Engine.load(tiny, backend="reference", prefetch=True, trace=TraceLog(), timeline=timeline) as engine:
        answer(engine)
    for of in timeline.passes:
        for layer in engine.config.moe_layers:
            found = Counter(s.phase for s in of.spans if s.layer == layer)
            assert found[phases.ROUTING] == 1
            assert found[phases.LOOK_AHEAD] == 1


def test_nothing_is_computed_before_it_is_there_and_reads_begin_when_the_route_is_known(
    timed: tuple[Engine, Timeline],
) -> None:
    engine, timeline = timed
    answer(engine)
    assert engine.drives is not None
    assert engine.drives.trace is not None
    for of in timeline.passes:
        reads = [r for r in engine.drives.trace.between(of.began, of.ended) if r.layer >= 0]
        for layer in engine.config.moe_layers:
            mine = [s for s in of.spans if s.layer == layer]
            routed = next(s for s in mine if s.phase == phases.ROUTING)
            shared = next(s for s in mine if s.phase == phases.SHARED)
            computed = {s.expert: s for s in mine if s.phase == phases.EXPERT}
            here = [r for r in reads if r.layer == layer]
            assert {r.expert for r in here} == set(computed)
            assert sum(r.nbytes for r in here) == len(computed) * engine.checkpoint.expert_nbytes
            for read in here:
                assert routed.ended <= read.queued
                assert read.landed <= computed[read.expert].began
            asked_at_once = sum(r.queued <= shared.began for r in here)
            assert asked_at_once == min(len(computed), engine.plan["expert_cache"] // engine.drives.unit_bytes)


def test_a_pass_that_is_stopped_ends_and_the_next_is_whole(timed: tuple[Engine, Timeline]) -> None:
    engine, timeline = timed
    asked = iter([False] * 9 + [True])
    with pytest.raises(Cancelled):
        list(engine.session().generate(PROMPT, 3, cancelled=lambda: next(asked)))
    stopped = len(timeline.passes)
    assert timeline.passes[-1].ended == timeline.passes[-1].spans[-1].ended
    answer(engine)
    of = timeline.passes[stopped]
    assert of.spans[0].layer == 0
    assert of.seconds == pytest.approx(sum(span.seconds for span in of.spans))


def test_what_there_is_no_room_for_is_counted_and_not_shown(tiny: Path) -> None:
    timeline, log = Timeline(limit=900), TraceLog()
    with Engine.load(tiny, backend="reference", reuse=False, trace=log, timeline=timeline) as engine:
        answer(engine, 6)
    assert sum(len(of.spans) for of in timeline.passes) == 900
    missing = [of.missing for of in timeline.passes]
    assert missing[0] == 0
    assert missing[-1] > 0
    shown = [each.number for each in choose(timeline, log, None)]
    assert shown == [n for n, lost in enumerate(missing) if not lost]


def test_without_a_timeline_nothing_of_it_is_called(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("this costs something")

    for thing in (Timeline, TimedK3, phases.TimedExperts):
        for name in [name for name in vars(thing) if callable(getattr(thing, name))]:
            monkeypatch.setattr(thing, name, never)
    with Engine.load(tiny, backend="reference", reuse=False) as engine:
        answer(engine)
        assert type(engine.model) is K3
        assert engine.experts.waits.hear is None


def test_the_answer_is_the_same(tiny: Path, timed: tuple[Engine, Timeline]) -> None:
    with Engine.load(tiny, backend="reference", chunk=4) as plain:
        expected = [(step.token_id, step.logits_sha256) for step in answer(plain)]
    assert [(step.token_id, step.logits_sha256) for step in answer(timed[0])] == expected


# -- waits -----------------------------------------------------------------------------------------------------------


class Gate:
    """A drive of zeros that stands still until it is opened."""

    name, mode, alignment = "a", "memory", 1

    def __init__(self) -> None:
        self.open = threading.Event()

    def read(self, file: str, offset: int, into: memoryview) -> int:
        assert self.open.wait(20)
        return len(into)

    def close(self) -> None:
        pass


def test_a_wait_is_for_what_comes_first() -> None:
    gate, heard = Gate(), []
    spec = DriveSpec("a", 4, 1e9, 0.0, 1)
    with Reader([(gate, spec)], BufferPool(1 << 20, 1), kind_of=lambda job: "trunk" * (job.key == 7)) as reader:
        reader.waits.hear = lambda what, key, began, ended: heard.append((what, key, began <= ended))
        for key, priority in ((7, Priority.DEMAND), ((1, 2), Priority.DEMAND), ((1, 3), Priority.PREFETCH)):
            gate.open.clear()
            span = (Span("a", "f", 0, 100),)
            reader.submit([Job(key, span, priority, 1)])
            if priority is Priority.PREFETCH:
                reader.submit([Job(key, span, Priority.DEMAND, 2)])
            opener = threading.Timer(0.01, gate.open.set)
            opener.start()
            for outcome in reader.as_landed([key], 20):
                outcome.buffer.release()  # type: ignore[union-attr]
            opener.join()
        assert heard == [("trunk", 7, True), ("demand", (1, 2), True), ("late", (1, 3), True)]
        found = reader.waits.so_far
        assert min(found.demand_s, found.late_s, found.trunk_s) > 0
        reader.submit([Job((1, 4), (Span("a", "f", 0, 100),))])
        while not reader.idle:
            pass
        for outcome in reader.as_landed([(1, 4)], 20):
            outcome.buffer.release()  # type: ignore[union-attr]
        assert reader.waits.so_far == found, "what is there is not waited for"


def test_waits_add_up() -> None:
    waits = Waits()
    for what, began, ended in (("demand", 1.0, 3.0), ("late", 3.0, 3.5), ("trunk", 4.0, 8.0), ("demand", 9.0, 10.0)):
        waits.add(what, None, began, ended)
    assert waits.so_far == Waited(3.0, 0.5, 4.0)
    assert waits.so_far - Waited(1.0, 0.5, 0.0) + Waited(0.0, 0.0, 1.0) == Waited(2.0, 0.0, 5.0)
    assert waits.so_far.total_s == 7.5


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_file_and_the_record_say_the_same(cli: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = ["--prompt-ids", "1,2,3,4,5,6,7", "--max-new", 4, "--prefill-chunk", 4, "--expert-cache", "off", "--json"]
    outcome = cli("run", *on(tiny), *words, *TWO, "--timeline", path, "--timeline-passes", "all")
    assert outcome.status == 0, outcome.err
    assert f"timeline {path}: 5 of 5 passes" in outcome.err
    run, record = outcome.record, json.loads(path.read_text())
    assert record["schema"] == SCHEMA
    assert record["ended"] == "done"
    assert record["model"]["fingerprint"] == run["model"]["fingerprint"]
    passes, spans, reads = record["passes"], table(record, "spans"), table(record, "reads")
    for number, of in enumerate(passes):
        mine = [s for s in spans if s["pass"] == number]
        assert of["began"] == pytest.approx(mine[0]["began"], abs=NEAR)
        assert of["seconds"] == pytest.approx(sum(of["by_phase"].values()), abs=len(PHASES) * NEAR)
        assert of["by_phase"]["waiting"] == pytest.approx(sum(of["waiting"].values()), abs=3 * NEAR)
        assert of["seconds"] == pytest.approx(sum(s["ended"] - s["began"] for s in mine), abs=len(mine) * NEAR)
        assert {s["phase"] for s in mine} <= set(PHASES)
        assert {s["awaited"] for s in mine if s["phase"] == "waiting"} <= {"demand", "late", "trunk"}
        assert not any(s["awaited"] for s in mine if s["phase"] != "waiting")
    for stage, some in (("first_token", passes[:2]), ("decode", passes[2:])):
        told = run["timing"]["waiting"][stage]
        for what in ("demand", "late", "trunk"):
            assert told[f"{what}_s"] == pytest.approx(sum(p["waiting"][what] for p in some), abs=len(some) * NEAR)
        assert 0 < told["share"] < 1
    assert {r["drive"] for r in reads} == {"a", "b"}
    assert {r["kind"] for r in reads} == {"demand"}
    assert sum(r["bytes"] for r in reads) == run["io"]["by_kind"]["demand"]
    assert all(r["queued"] <= r["started"] <= r["landed"] for r in reads)


def test_the_usual_passes_are_the_prompts_last_and_the_median(cli: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words = ["--prompt-ids", "1,2,3,4,5,6", "--max-new", 6, "--prefill-chunk", 4]
    assert cli("run", *on(tiny), *words, "--timeline", path).status == 0
    record = json.loads(path.read_text())
    later = sorted(range(2, 7), key=lambda n: record["passes"][n]["seconds"])
    assert {s["pass"] for s in table(record, "spans")} == {1, later[2]}
    assert cli("run", *on(tiny), *words, "--timeline", path, "--timeline-passes", "0,3-4,99").status == 0
    assert {s["pass"] for s in table(json.loads(path.read_text()), "spans")} == {0, 3, 4}


def test_the_picture(cli: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    outcome = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, *TWO, "--timeline", path)
    assert outcome.status == 0, outcome.err
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "prompt, tokens 0 to 2" in text
    assert "the median of 3" in text
    shown = re.findall(r">(\d+) (KDA|MLA)<", text)
    with Engine.load(tiny, backend="reference") as engine:
        config = engine.config
    layers = [(str(n), "KDA" if config.is_kda(n) else "MLA") for n in range(config.num_hidden_layers)]
    assert shown == layers * 2
    for words in ("waiting for experts", "shared experts", "demand reads", ">head<"):
        assert words in text
    ElementTree.fromstring(draw([], config, {}))


def test_a_picture_has_only_so_many_passes(cli: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    words = ["--prompt-ids", "1,2", "--max-new", 16, "--timeline", path, "--timeline-passes", "all"]
    outcome = cli("run", *on(tiny), *words)
    assert f"timeline {path}: 12 of 16 passes, the first 12 of 16" in outcome.err
    assert path.read_text().count(">0 ms<") == 12


def test_a_run_that_fails_has_a_timeline_too(cli: Command, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(K3, "head", lambda *_: (_ for _ in ()).throw(UsageError("a reason")))
        outcome = cli("run", *on(tiny), "--prompt-ids", "1,2", "--timeline", path)
    assert outcome.status == 2
    assert "a reason" in outcome.err
    assert json.loads(path.read_text())["ended"] == "a reason"


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("t.png", [], "must end in .json or .svg"),
        ("t.json", ["--timeline-passes", "x"], "'x' is no pass"),
        ("t.json", ["--timeline-passes", "5-2"], "'5-2' is no pass"),
        ("no/t.json", [], "cannot be written"),
        ("", ["--timeline-passes", "all"], "add it, or leave this out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    cli: Command, tiny: Path, tmp_path: Path, name: str, more: list[str], says: str
) -> None:
    asked = ["--timeline", tmp_path / name] if name else []
    outcome = cli("run", *on(tiny), "--prompt-ids", "1", *asked, *more)
    assert outcome.status == 2
    assert says in outcome.err
    assert "memory" not in outcome.err
    assert not any(tmp_path.iterdir())


def test_nothing_is_written_into_the_models_directory(cli: Command, tiny: Path) -> None:
    before = sorted(tiny.iterdir())
    outcome = cli("run", *on(tiny), "--prompt-ids", "1", "--timeline", tiny / "t.svg")
    assert outcome.status == 2
    assert "where nothing is ever written" in outcome.err
    assert sorted(tiny.iterdir()) == before


def test_passes_are_read_strictly() -> None:
    assert parse_passes("all") is None
    assert parse_passes(" 0, 3-5") == [range(1), range(3, 6)]
