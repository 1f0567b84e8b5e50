"""`benchmarks.replay`: the routes are replayed as they are, and the store reads each of their experts once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import replay as bench
from runtime.checkpoint import Checkpoint
from runtime.drives.device import Device
from runtime.drives.probe import Ceiling
from runtime.drives.throttled import Limit, ThrottledDevice
from runtime.setup.synth import synthesize
from runtime.weights.layout import Layout

NUMBERS = ("--turn", "--seconds", "--ahead")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MoE layers of four experts as released."""
    path = tmp_path_factory.mktemp("large") / "model"
    synthesize("ladder", path, layers=3, experts=4, top_k=2, vocab=512)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes are read of each drive, by name; no read takes time."""
    counted: Counter[str] = Counter()

    def read(self: Device, file: str, offset: int, into: memoryview) -> int:
        counted[self.name] += len(into)
        return len(into)

    monkeypatch.setattr(ThrottledDevice, "read", read)
    return counted


def test_rows_of_a_recording_go_over_the_layers_there_are(tiny: Path, tmp_path: Path) -> None:
    recorded = np.arange(2 * 5 * 3).reshape(2, 5, 3)
    np.save(tmp_path / "routes.npy", recorded.astype(np.int16))
    with Checkpoint.open(tiny) as checkpoint:
        experts, layers = checkpoint.config.num_experts, checkpoint.config.moe_layers
        rows = list(islice(bench.Routes(checkpoint, tmp_path / "routes.npy").rows(0), 12))
    assert [layer for layer, _ in rows] == (list(layers) * 12)[:12]
    flat = recorded.reshape(-1, 3)
    assert [ids.tolist() for _, ids in rows[:10]] == [sorted({int(i) % experts for i in ids}) for ids in flat]
    assert [ids.tolist() for _, ids in rows[10:]] == [ids.tolist() for _, ids in rows[:2]]


def test_drawn_rows_are_the_models_own(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        config, routes = checkpoint.config, bench.Routes(checkpoint, None)
        rows, again, other = (list(islice(routes.rows(stream), 20)) for stream in (0, 0, 1))
    assert [layer for layer, _ in rows] == (list(config.moe_layers) * 20)[:20]
    assert all(len(set(ids.tolist())) == config.num_experts_per_token for _, ids in rows)
    assert [ids.tolist() for _, ids in rows] == [ids.tolist() for _, ids in again]
    assert [ids.tolist() for _, ids in rows] != [ids.tolist() for _, ids in other]


def test_the_ceiling_is_read_where_the_experts_lie(large: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        routes = bench.Routes(checkpoint, None)
        replay = bench.Replay(checkpoint, Layout(), routes)
        room, span = replay._rooms[0], replay.drives.placement.spans
        wanted = [span(layer, e)[0] for layer, ids in islice(routes.rows(1), 6) for e in ids.tolist()]
        for expert in wanted:
            for number in range(2):
                file, at = room.take()
                assert file == expert.file
                assert at % room.device.alignment == 0
                assert 0 <= at - number * room.block_bytes - expert.offset < room.device.alignment
                assert at + room.block_bytes <= expert.offset + expert.length
        replay.close()


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_expert_of_every_barrier_is_read_once(large: Path, reads: Counter[str], ahead: int) -> None:
    with Checkpoint.open(large) as checkpoint:
        layout = Layout(limits=(Limit("a", 1e9), Limit("b", 1e9)))
        replay = bench.Replay(checkpoint, layout, bench.Routes(checkpoint, None), ahead)
        stretch = replay.stretch(0.05)
        counts, kinds, _ = replay.drives.counts()
        assert stretch.barriers
        assert all(nbytes == 2 * checkpoint.expert_nbytes for nbytes, _ in stretch.barriers)
        assert stretch.nbytes == sum(nbytes for nbytes, _ in stretch.barriers) == kinds["demand"].requested_bytes
        assert sum(reads.values()) == sum(c.requested_bytes for c in counts.values())
        assert 0 < stretch.busy <= 1
        assert replay.drives.reader is not None
        assert replay.drives.reader.pool.in_use == 0
        replay.close()


def test_time_in_which_anything_is_read_counts_once() -> None:
    assert bench.covered([]) == 0
    assert bench.covered([(5, 6), (0, 2), (1, 3), (1.5, 1.75), (3, 4)]) == 5


def test_it_prints_what_it_found(
    large: Path, reads: Counter[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(rooms: list[bench.Routed], depths: dict[str, int], *_: float) -> list[Ceiling]:
        return [Ceiling((room.device.name,), depths[room.device.name], 10**9, 0.1, None) for room in rooms]

    monkeypatch.setattr(bench, "measure", measured)
    line = ["--model", str(large), "--simulate-drive", "a=1GB/s", "--seconds", "0.05", "--turn", "0.01"]
    assert bench.main([*line, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "expertstream.replay/1"
    assert record["ratio"] > 0
    assert record["ceiling_bytes_per_s"] == 10e9
    assert len(record["turns"]) >= 1
    assert record["ceiling_depths"].keys() == record["drives"].keys() == {"a"}
    assert bench.main(line) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in shown] == ["store", "ceiling", "ratio", "busy", "barriers", "each"]
    assert "10.000 GB/s" in shown[1]


def test_what_cannot_be_replayed_is_refused(
    large: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no routes")
    np.save(tmp_path / "flat.npy", np.arange(4))
    np.save(tmp_path / "below.npy", np.full((1, 1, 1), -1))
    for options in (
        ["--model", str(large), "--routes", str(tmp_path / "none.npy")],
        ["--model", str(large), "--routes", str(tmp_path / "text")],
        ["--model", str(large), "--routes", str(tmp_path / "flat.npy")],
        ["--model", str(large), "--routes", str(tmp_path / "below.npy")],
        ["--model", str(tiny), "--simulate-drive", "a=1GB/s"],
        *(["--model", str(large), "--turn", text] for text in ("0", "-1", "nan", "1e-9", "inf")),
        *(["--model", str(large), "--seconds", text] for text in ("-1", "nan", "inf")),
        *(["--model", str(large), "--ahead", text] for text in ("-1", "2")),
    ):
        assert bench.main(options) == 2
        assert capsys.readouterr().err.startswith(f"error: {options[-2] if options[-2] in NUMBERS else ''}")
