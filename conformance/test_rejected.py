"""The catalogue of what was rejected: each idea still loses, on the same work, to what took its place."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from benchmarks.rejected import __main__ as rejected
from benchmarks.rejected import reading, tiles
from benchmarks.rejected.caches import CACHED_TOKENS, LeastRecentlyUsed, misses
from benchmarks.rejected.dispatch import EqualStripes
from benchmarks.rejected.guesses import waited_s
from benchmarks.rejected.sums import ORDERS, in_order_of_arrival
from benchmarks.rejected.trial import EXPERT_BYTES, LAYERS, TOP_K, Outcome, Trial, machine, token_s
from runtime.cli.ending import end
from runtime.drives import real
from runtime.drives.jobs import MIB, Job, Priority
from runtime.drives.plan import fluid_bound
from runtime.drives.virtual import VirtualDrive
from runtime.errors import UsageError
from runtime.weights.worth import Worth

LEAST_RATIO = {
    "whole-reads": 1.07,
    "equal-stripes": 1.35,
    "first-holder": 2.2,
    "cumulative-clocks": 1.5,
    "rates-of-a-probe": 1.6,
    "one-read-at-a-time": 1.15,
    "unbounded-prefetch": 1.1,
    "cache-below-a-layer": 1.2,
    "least-recently-used": 1.1,
    "prefill-tiles": 6.5,
    "sums-on-arrival": ORDERS,
}
"""What the ideas cost, a little rounded down: other drawn routes must not matter. Not of those that are timed."""


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial()


def test_every_idea_stands_in_the_catalogue_in_this_order() -> None:
    text = (ROOT / "docs/rejected.md").read_text()
    assert re.findall(r"^python -m benchmarks.rejected (\S+)$", text, re.MULTILINE) == list(rejected.IDEAS)
    assert LEAST_RATIO.keys() == rejected.IDEAS.keys() - {"page-cache", "small-pages"}


@pytest.mark.parametrize("name", LEAST_RATIO)
def test_it_still_loses(name: str, trial: Trial) -> None:
    outcome = rejected.IDEAS[name](trial)
    assert outcome.kept > 0
    assert outcome.ratio >= LEAST_RATIO[name]


def test_what_is_kept_is_the_production_scheduler_near_its_bound(trial: Trial) -> None:
    rates = [drive.figures.rate for drive in machine().drives]
    everywhere = {frozenset(range(len(rates))): len(LAYERS) * TOP_K * EXPERT_BYTES}
    assert 1 < token_s(trial) / fluid_bound(everywhere, rates) < 1.05


def test_guesses_that_are_not_bounded_are_worse_than_none_and_bounded_ones_better(trial: Trial) -> None:
    none = waited_s(trial, None)
    assert none == pytest.approx(token_s(trial), rel=0.01)
    assert waited_s(trial, Priority.PREFETCH) < none < waited_s(trial, Priority.DEMAND)


@pytest.mark.parametrize("rule", [Worth, LeastRecentlyUsed])
def test_one_layers_experts_are_never_hit(rule: type[Worth], trial: Trial) -> None:
    everything = trial.routes[:CACHED_TOKENS].size
    assert misses(trial, TOP_K, rule) == everything
    assert misses(trial, 1000, LeastRecentlyUsed) == everything
    assert misses(trial, len(LAYERS) * TOP_K, rule) < 0.8 * everything


def test_equal_stripes_are_every_byte_once(trial: Trial) -> None:
    world = EqualStripes([VirtualDrive(drive.name, drive.figures.rate) for drive in machine().drives])
    job = Job((1, 0), machine().spans(0, 1, 0))
    parts = list(world.bind(job))
    assert [part.offset for part in parts] == [0, *np.cumsum([part.length for part in parts[:-1]])]
    assert sum(part.length for part in parts) == job.length
    assert max(part.length for part in parts) - min(part.length for part in parts) < 2 * MIB


def test_a_tile_ends_before_it_is_too_wide_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_EXPERTS", 4)
    monkeypatch.setattr(tiles, "TILE_ROWS", 3)
    assert tiles.tiled([[0, 1], [2, 3], [0, 3], [0, 1]]) == 4 + 2
    assert tiles.tiled([[0, 1], [2, 3], [4, 0]]) == 4 + 2
    assert tiles.tiled([[0, 1]]) == 2


def test_the_order_of_arrival_is_each_rows_own() -> None:
    ids, weights = np.array([[3, 1, 2], [2, 5, 3]]), np.array([[0.3, 0.1, 0.2], [0.2, 0.5, 0.3]])
    order, with_them = in_order_of_arrival(dict.fromkeys([5, 2, 1, 3]), ids, weights)
    assert order.tolist() == [[2, 1, 3], [5, 2, 3]]
    assert with_them.tolist() == [[0.2, 0.1, 0.3], [0.5, 0.2, 0.3]]


def test_every_way_of_reading_reads_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "EXPERT_BYTES", 3 * 4096 + 5)
    monkeypatch.setattr(reading, "ROUNDS", 2)
    read: list[tuple[str, int]] = []
    plainly = real.RealDevice.read

    def noted(device: real.RealDevice, file: str, at: int, into: memoryview) -> int:
        read.append((device.mode.partition(":")[0], at))
        return plainly(device, file, at, into)

    monkeypatch.setattr(real.RealDevice, "read", noted)
    places = [n * reading.EXPERT_BYTES for n in range(reading.FILE_EXPERTS)]
    try:
        for idea, modes in ((reading.page_cache, ("direct", "buffered")), (reading.small_pages, ("direct", "direct"))):
            read.clear()
            idea(Trial(work=tmp_path))
            assert read == [(mode, at) for mode in modes for at in places] * reading.ROUNDS
    except UsageError as error:
        pytest.skip(str(error))
    assert not list(tmp_path.iterdir())


def test_it_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "O_DIRECT", 0)
    monkeypatch.setattr(reading, "EXPERT_BYTES", 4096)
    np.save(tmp_path / "routes.npy", np.tile(np.arange(TOP_K), (20, len(LAYERS), 1)))
    line = ["prefill-tiles", "page-cache", "--routes", str(tmp_path / "routes.npy"), "--work", str(tmp_path)]
    assert rejected.main([*line, "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["schema"] == rejected.SCHEMA
    found, refused = record["ideas"]
    assert (found["name"], found["kept"], found["rejected"]) == ("prefill-tiles", 92 * TOP_K, 2 * 92 * TOP_K)
    assert found["ratio"] == Outcome("", 92 * TOP_K, 2 * 92 * TOP_K).ratio == 2
    assert re.search(r"^prefill-tiles .* 1,472 +2,944 +2\.00$", shown, re.MULTILINE)
    assert "name a directory on a drive with --work" in refused["refused"]
    assert "page-cache" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-idea"],
        ["--routes", "none.npy"],
        ["--routes", "one.npy"],
        ["--work", "none"],
        ["--work", ""],
        ["--json", "none/there.json"],
    ],
)
def test_mistakes_end_before_anything_is_measured(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("one.npy", np.tile(np.arange(TOP_K), (1, len(LAYERS), 1)))
    monkeypatch.setattr(rejected, "measure", None)
    assert end(lambda: rejected.main(words)) == 2
    assert "error: " in capsys.readouterr().err


def test_the_table_is_printed_though_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("benchmarks.records.write_whole", full)
    monkeypatch.setattr(rejected, "measure", lambda names, trial: [{"name": "this-one", "refused": "why"}])
    assert end(lambda: rejected.main(["--json", str(tmp_path / "found.json")])) == 4
    said = capsys.readouterr()
    assert "this-one" in said.out
    assert said.err == f"error: --json {tmp_path / 'found.json'} could not be written: No space left on device\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BrokenPipeError(), 141, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 4, "error: cannot write to standard output: No space"),
    ],
    ids=["pipe", "disk"],
)
def test_a_table_that_cannot_be_printed_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, status: int, said: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(rejected, "measure", lambda names, trial: [])
    monkeypatch.setattr("builtins.print", refuse)
    monkeypatch.setattr("runtime.cli.ending.abandon", lambda stream: None)
    assert end(lambda: rejected.main([])) == status
    assert capsys.readouterr().err.startswith(said)
