"""Whole runs over several drives: wherever the experts lie and whatever the drives do, the same logits, bit for bit."""

from __future__ import annotations

import errno
import io
import json
import random
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from commandline import Command, Start, on
from copies import rewrite, write_experts

from runtime.checkpoint import Checkpoint
from runtime.drives.device import DeviceError
from runtime.drives.jobs import Fault, Policy, Span
from runtime.drives.real import RealDevice
from runtime.drives.throttled import Limit
from runtime.errors import CheckpointError, DoesNotFitError, StorageError, UsageError
from runtime.generate import Engine, Step
from runtime.ops.reference import ReferenceOps
from runtime.weights import layout as arrangement
from runtime.weights.experts import ExpertStore, staging_floor
from runtime.weights.layout import Drives, Layout
from runtime.weights.placement import ExpertFiles, Gathering, Placement, Shards

NEW = 6
Outcome = list[tuple[int, str | None]]


def outcome(steps: Iterable[Step]) -> Outcome:
    return [(step.token_id, step.logits_sha256) for step in steps]


def answer(engine: Engine) -> Outcome:
    tokens = engine.tokenizer
    assert tokens is not None
    return outcome(engine.session().generate(tokens.encode("The capital of France is"), NEW, logits_hash=True))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever late: a busy machine makes no faults, and every read is counted once."""
    monkeypatch.setattr(
        arrangement, "POLICY", replace(arrangement.POLICY, deadline_floor_s=1000.0, check_timeout_s=20.0)
    )


@pytest.fixture(scope="module")
def alone(embedded: Path) -> Outcome:
    """The answer with the model directory alone, read plainly."""
    with Engine.load(embedded, backend="cpu") as engine:
        assert engine.drives is None
        return answer(engine)


def limits(*rates: float, latency_s: float = 0.0) -> Layout:
    return Layout(limits=tuple(Limit(f"s{i}", rate, latency_s) for i, rate in enumerate(rates)))


@pytest.fixture(scope="module")
def even(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experts of even number, in `k3-experts`."""
    root = tmp_path_factory.mktemp("even")
    write_experts(embedded, root / "k3-experts", lambda _, expert: expert % 2 == 0)
    return root


@pytest.fixture(scope="module")
def odd(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experts of odd number, at the top of a directory."""
    return write_experts(embedded, tmp_path_factory.mktemp("odd") / "o", lambda _, expert: expert % 2 == 1)


@pytest.fixture(scope="module")
def bare(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its routed experts."""
    return rewrite(embedded, tmp_path_factory.mktemp("bare") / "model", lambda name: ".experts." not in name)


@pytest.fixture(scope="module")
def scattered(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the tensors of its experts anywhere."""
    return rewrite(embedded, tmp_path_factory.mktemp("scattered") / "model")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[int], None]]:
    """By name of a drive, what is done before each of its reads, which are counted from 0. It may raise, or wait."""
    doings: dict[str, Callable[[int], None]] = {}

    class Ill(RealDevice):
        def __init__(self, name: str, root: Path, **others: Any) -> None:
            self.count, self.lock = 0, threading.Lock()
            super().__init__(name, root, **others)

        def read(self, file: str, offset: int, into: memoryview) -> int:
            with self.lock:
                number, self.count = self.count, self.count + 1
            doings.get(self.name, lambda _: None)(number)
            return super().read(file, offset, into)

    monkeypatch.setattr("runtime.drives.real.RealDevice", Ill)
    return doings


def lost_after(count: int) -> Callable[[int], None]:
    """A drive that is unplugged after so many reads."""

    def unplugged(number: int) -> None:
        if number >= count:
            raise DeviceError(Fault.GONE, "no such device")

    return unplugged


def slow(_: int) -> None:
    """A drive that leaves most of the work to others."""
    time.sleep(0.005)


def settled(engine: Engine) -> None:
    """Nothing is under way and every buffer is an expert's."""
    drives, store = engine.drives, engine.experts
    assert drives is not None
    assert drives.reader is not None
    for _ in range(200):
        if drives.reader.idle:
            break
        time.sleep(0.01)
    drives.reader.audit()
    assert drives.reader.pool.in_use == store.stats.bytes_held
    assert store.stats.peak_bytes <= store.budget_bytes


# -- the same logits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(4e8,), (4e8, 2e8), (4e8, 4e8, 4e8, 2e7)], ids=len)
def test_simulated_drives(rates: tuple[float, ...], embedded: Path, alone: Outcome) -> None:
    with Engine.load(embedded, backend="cpu", layout=limits(*rates, latency_s=1e-4)) as engine:
        assert answer(engine) == alone
        settled(engine)
        assert engine.drives is not None
        counts, kinds, _ = engine.drives.counts()
        assert list(counts) == [f"s{i}" for i in range(len(rates))]
        nbytes = engine.checkpoint.expert_nbytes
        assert kinds["demand"].requested_bytes == engine.experts.stats.reads * nbytes
        assert kinds["demand"].reads == engine.experts.stats.misses
        assert sum(c.requested_bytes for c in counts.values()) == sum(k.requested_bytes for k in kinds.values())


def test_partial_and_split_directories(embedded: Path, even: Path, odd: Path, bare: Path, alone: Outcome) -> None:
    for model, places in ((embedded, {"e": even}), (embedded, {"e": even, "o": odd}), (bare, {"e": even, "o": odd})):
        layout = Layout(directories=tuple(places.items()))
        with Engine.load(model, backend="cpu", layout=layout) as engine:
            assert answer(engine) == alone
            settled(engine)
            assert engine.drives is not None
            counts, _, _ = engine.drives.counts()
            assert set(counts) == {*places, "model"}
            assert all(c.reads for c in counts.values()), "the trunk is in the model's directory"


def test_files_and_simulated_drives_together(embedded: Path, even: Path, alone: Outcome) -> None:
    layout = Layout((("e", even),), (Limit("slow", 5e7), Limit("slower", 3e7)))
    with Engine.load(embedded, backend="cpu", layout=layout) as engine:
        assert answer(engine) == alone


def test_experts_whose_tensors_are_anywhere(scattered: Path, even: Path, alone: Outcome) -> None:
    with Engine.load(scattered, backend="cpu", layout=Layout((("e", even),))) as engine:
        assert engine.checkpoint.scattered > 200
        assert answer(engine) == alone
        settled(engine)


def test_any_part_of_an_expert_is_gathered(scattered: Path) -> None:
    chance = random.Random(5)
    with Checkpoint.open(scattered) as checkpoint:
        device = Gathering(RealDevice("model", scattered), checkpoint)
        whole = b"".join(part.tobytes() for part in checkpoint.read_expert(3, 7))
        assert Shards("model", checkpoint).span(3, 7) == Span("model", "L3-E7.bin", 0, len(whole))
        for _ in range(50):
            first, last = sorted(chance.sample(range(len(whole) + 1), 2))
            into = bytearray(last - first)
            assert device.read("L3-E7.bin", first, memoryview(into)) >= len(into)
            assert into == whole[first:last]
        device.close()


@pytest.mark.parametrize("top_ks", [1, 2])
def test_the_smallest_caches(top_ks: int, embedded: Path, alone: Outcome) -> None:
    with Engine.load(embedded, backend="cpu", layout=limits(4e8, 4e8)) as engine:
        assert engine.drives is not None
        budget = top_ks * staging_floor(engine.checkpoint, engine.drives.unit_bytes)
    with Engine.load(embedded, backend="cpu", layout=limits(4e8, 4e8), expert_cache=budget) as engine:
        assert answer(engine) == alone
        settled(engine)
        assert engine.experts.stats.evictions > 0
    with Engine.load(embedded, backend="cpu", layout=limits(4e8, 4e8), reuse=False) as engine:
        assert answer(engine) == alone
        settled(engine)
        assert engine.experts.stats.hits == engine.experts.stats.bytes_held == 0
    with pytest.raises(DoesNotFitError, match="--expert-cache"):
        Engine.load(embedded, backend="cpu", layout=limits(4e8), expert_cache=budget // top_ks - 1)


@pytest.mark.parametrize("backend", ["mlx", "reference"])
def test_on_the_other_backends(backend: str, tiny: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    answers = []
    for layout in (None, limits(4e8, 2e8)):
        with Engine.load(tiny, backend=backend, layout=layout) as engine:
            answers.append(outcome(engine.session().generate([1, 2, 3, 4, 5], 4, logits_hash=True)))
            if engine.drives is not None:
                assert engine.drives.reader is not None
                assert engine.drives.reader.pool.in_use == engine.experts.stats.bytes_held, "a buffer is an expert's"
    assert answers[0] == answers[1]


def test_random_delays(embedded: Path, odd: Path, alone: Outcome, devices: dict[str, Callable[[int], None]]) -> None:
    for seed in range(3):
        chance = random.Random(seed)
        for name in ("model", "o"):
            devices[name] = lambda _, chance=chance: time.sleep(chance.random() * 0.002)  # type: ignore[misc]
        with Engine.load(embedded, backend="cpu", layout=Layout((("o", odd),))) as engine:
            assert answer(engine) == alone


def test_a_drive_lost_in_the_middle_of_an_answer(
    embedded: Path, odd: Path, alone: Outcome, devices: dict[str, Callable[[int], None]]
) -> None:
    devices["o"], devices["model"] = lost_after(10), slow
    with Engine.load(embedded, backend="cpu", layout=Layout((("o", odd),))) as engine:
        assert answer(engine) == alone
        assert engine.drives is not None
        counts, _, _ = engine.drives.counts()
        assert counts["o"].errors >= 1
        assert counts["model"].errors == 0


def test_files_that_vanish_or_are_cut_short(embedded: Path, odd: Path, alone: Outcome, tmp_path: Path) -> None:
    copies = shutil.copytree(odd, tmp_path / "o")
    with Engine.load(embedded, backend="cpu", layout=Layout((("o", copies),))) as engine:
        for number, file in enumerate(sorted(copies.iterdir())):
            if number % 2:
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:100])
        assert answer(engine) == alone
        settled(engine)


def test_a_drive_that_cannot_even_be_opened(
    embedded: Path, bare: Path, even: Path, odd: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = ExpertFiles._files

    def failing(files: ExpertFiles, folder: Path) -> Any:
        if files.name == "o":
            raise StorageError("drive o: cannot list it: Input/output error")
        return listed(files, folder)

    monkeypatch.setattr(ExpertFiles, "_files", failing)
    with Engine.load(embedded, backend="cpu", layout=Layout((("o", odd), ("e", even)))) as engine:
        assert answer(engine) == alone
        assert engine.drives is not None
        assert "drive o: cannot list it: Input/output error; it is not used" in engine.drives.notes
    with pytest.raises(StorageError, match=r"drive o: cannot list it: .*; without it, .* experts are on none of"):
        Engine.load(bare, backend="cpu", layout=Layout((("o", odd), ("e", even))))


def test_a_drive_that_fails_while_it_is_listed(bare: Path, even: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = mock.Mock(stat=mock.Mock(side_effect=FileNotFoundError))
    failing = mock.Mock(stat=mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    gone.name, failing.name = sorted(path.name for path in even.rglob("*.bin"))[:2]
    with Checkpoint.open(bare, experts_elsewhere=True) as checkpoint:
        monkeypatch.setattr("os.scandir", lambda folder: nullcontext([gone, failing]))
        with pytest.raises(StorageError, match=r"drive e: cannot list .*: Input/output error"):
            ExpertFiles("e", even, checkpoint)
        monkeypatch.setattr("os.scandir", lambda folder: nullcontext([gone]))
        assert not ExpertFiles("e", even, checkpoint).here.any()


def test_a_lone_drive_that_falls_silent_for_a_while_is_waited_for(
    embedded: Path,
    alone: Outcome,
    devices: dict[str, Callable[[int], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than a check may take where there are other drives."""
    monkeypatch.setattr(arrangement, "PLAIN_BYTES", 1)
    policy = Policy(max_hedge_leases=4, deadline_floor_s=0.02, back_off_s=0.02, check_timeout_s=0.1)
    monkeypatch.setattr(arrangement, "POLICY", policy)
    silent = threading.Event()

    def fall_silent(number: int) -> None:
        if number >= 20:
            silent.wait(1.0)
            silent.set()

    devices["model"] = fall_silent
    with Engine.load(embedded, backend="cpu") as engine:
        assert answer(engine) == alone
        assert engine.drives is not None
        assert engine.drives.reader is not None


def test_scales_that_no_weight_has_are_wrong_bytes(
    embedded: Path, bare: Path, even: Path, odd: Path, alone: Outcome, tmp_path: Path
) -> None:
    copies = shutil.copytree(odd, tmp_path / "o")
    with Checkpoint.open(embedded) as checkpoint:
        name, _, end = checkpoint.scale_ranges[1]
    assert name == "w2.weight_scale"
    for file in copies.iterdir():
        data = bytearray(file.read_bytes())
        data[end - 1] = 255
        file.write_bytes(data)
    with Engine.load(embedded, backend="cpu", layout=Layout((("o", copies),))) as engine:
        assert answer(engine) == alone
        assert engine.drives is not None
        assert engine.drives.counts()[0]["o"].errors >= 1
    with (
        Engine.load(bare, backend="cpu", layout=Layout((("e", even), ("o", copies)))) as engine,
        pytest.raises(StorageError, match=r"drive o: wrong bytes: L\d+-E\d+.bin: w2.weight_scale has .*255 \(NaN\)"),
    ):
        answer(engine)


def test_large_experts_are_read_by_drive_without_being_asked(
    embedded: Path, alone: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrangement, "PLAIN_BYTES", 1)
    with Engine.load(embedded, backend="cpu") as engine:
        assert answer(engine) == alone
        settled(engine)
        assert engine.drives is not None
        assert list(engine.drives.counts()[0]) == ["model"]


# -- no copy -------------------------------------------------------------------------------------------------------


def test_with_no_copy_left_the_request_ends_and_the_engine_lives_on(
    bare: Path, even: Path, odd: Path, alone: Outcome, devices: dict[str, Callable[[int], None]]
) -> None:
    with Engine.load(bare, backend="cpu", layout=Layout((("e", even), ("o", odd)))) as engine:
        devices["o"] = lost_after(0)
        with pytest.raises(StorageError, match=r"layer \d+ expert \d*[13579]: .*drive o: .*no such device"):
            answer(engine)
        settled(engine)
        del devices["o"]
        for _ in range(100):  # the drive sits out for a while
            try:
                again = answer(engine)
            except StorageError:
                time.sleep(0.05)
            else:
                break
        assert again == alone


def test_on_the_command_line_it_is_one_line_and_status_4(
    cli: Command, bare: Path, even: Path, odd: Path, devices: dict[str, Callable[[int], None]]
) -> None:
    devices["o"] = lost_after(3)
    ended = cli(
        *("run", *on(bare), "--prompt", "The capital of France is", "--max-new", 2),
        *("--drive", f"e={even}", "--drive", f"o={odd}"),
    )
    assert ended.status == 4
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: layer ")
    assert re.search(r"expert \d*[13579]: no copy left .*drive o: .*no such device", last)


def test_the_census_names_what_nobody_holds(bare: Path, even: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"112 of 224 experts are on none of the drives model, e: layer 1 exp"):
        Engine.load(bare, backend="cpu", layout=Layout((("e", even),)))
    with Checkpoint.open(bare, experts_elsewhere=True) as checkpoint:
        files = ExpertFiles("e", even, checkpoint)
        files.here[:] = True
        files.here[2, 5:9] = files.here[3, 31] = False
        with pytest.raises(CheckpointError, match=r"5 of 224 .*: layer 3 experts 5 to 8, layer 4 expert 31; name"):
            Placement(checkpoint, [Shards("model", checkpoint), files])
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoint.open(bare)


def test_only_regular_files_of_the_right_length_count(embedded: Path, tmp_path: Path) -> None:
    with Checkpoint.open(embedded) as checkpoint:
        right = b"x" * checkpoint.expert_nbytes
        for name, data in {
            "L1-E0.bin": right,
            "L1-E1.bin": right[:-1],
            "L1-E2.bin": right + b"x",
            "L1-E32.bin": right,
            "L0-E0.bin": right,
            "L01-E3.bin": right,
            "L1-E4.bin.part": right,
        }.items():
            (tmp_path / name).write_bytes(data)
        (tmp_path / "L1-E5.bin").symlink_to(tmp_path / "L1-E0.bin")
        (tmp_path / "L1-E6.bin").mkdir()
        found = ExpertFiles("d", tmp_path, checkpoint)
        assert np.argwhere(found.here).tolist() == [[0, 0]]
        assert "4 files are not used" in found.notes[0]
        assert "drive d holds no expert" in " ".join(
            Placement(checkpoint, [Shards("model", checkpoint), Empty()]).notes
        )


class Empty:
    name = "d"
    here = np.zeros((7, 32), np.bool_)
    notes: list[str] = []  # noqa: RUF012

    def span(self, layer: int, expert: int) -> Any:
        raise AssertionError("nothing is here")


def test_drives_that_are_none(tmp_path: Path, cli: Command, tiny: Path) -> None:
    for layout in (
        lambda: Layout((("a", tmp_path / "nowhere"),)),
        lambda: Layout((("model", tmp_path),)),
        lambda: Layout((("a", tmp_path),), (Limit("a", 1e6),)),
    ):
        with pytest.raises(UsageError, match="drive"):
            layout()
    for option in (["--drive", "a"], ["--drive", "=x"], ["--simulate-drive", "a=fast"]):
        assert cli("run", *on(tiny), "--prompt-ids", "1", *option).status == 2


def test_reads_begin_with_the_plan_and_end_with_it(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        drives = Drives(checkpoint, limits(1e8))
        store = ExpertStore(checkpoint, ReferenceOps(), 4 * drives.unit_bytes, True, drives.start(2**24))
        plan = store.plan(1, np.array([[0, 1, 2, 3]]))
        assert drives.reader is not None
        assert not drives.reader.idle
        assert store.stats.bytes_held == 4 * drives.unit_bytes
        plan.close()
        assert store.stats.bytes_held == store.stats.reads == 0
        while not drives.reader.idle:
            time.sleep(0.001)
        assert drives.reader.pool.in_use == 0
        drives.close()


# -- what the store does with what lands ---------------------------------------------------------------------------


def test_a_plan_left_in_the_middle_gives_every_buffer_back(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        drives = Drives(checkpoint, limits(1e8, 1e8))
        budget = 8 * drives.unit_bytes
        store = ExpertStore(checkpoint, ReferenceOps(), budget, True, drives.start(budget))
        assert drives.reader is not None
        for taken in range(9):
            plan = store.plan(1 + taken % 8, np.arange(16)[None])
            for _ in range(taken):
                expert, packed = next(plan)
                wanted = checkpoint.read_expert(1 + taken % 8, expert)
                assert all(map(np.array_equal, packed, wanted))
                store.release(1 + taken % 8, expert)
            plan.close()
            while not drives.reader.idle:
                time.sleep(0.001)
            assert drives.reader.pool.in_use == store.stats.bytes_held <= budget
        drives.close()


def test_hits_come_first_and_misses_as_they_land(tiny: Path, devices: dict[str, Callable[[int], None]]) -> None:
    gate = threading.Event()
    with Checkpoint.open(tiny) as checkpoint:
        drives = Drives(checkpoint, Layout((("d", write_experts(tiny, tiny.parent / "files", lambda *_: True)),)))
        store = ExpertStore(checkpoint, ReferenceOps(), 16 * drives.unit_bytes, True, drives.start(2**24))
        for expert, _ in store.plan(1, np.array([[4, 7]])):
            store.release(1, expert)
        devices["model"] = devices["d"] = lambda _: gate.wait(20) and None
        plan = store.plan(1, np.array([[1, 4, 7, 9]]))
        assert [next(plan)[0], next(plan)[0]] == [4, 7], "while the others are being read"
        gate.set()
        assert sorted(expert for expert, _ in plan) == [1, 9]
        drives.close()


# -- what is told --------------------------------------------------------------------------------------------------


def test_the_record_adds_up(cli: Command, tiny: Path) -> None:
    line = ["run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, "--json", "--logits-hash"]
    plain = cli(*line).record
    ended = cli(*line, "--simulate-drive", "a=400MB/s", "--simulate-drive", "b=200MB/s,latency=0.1ms")
    record = ended.record
    assert record["logits_sha256"] == plain["logits_sha256"]
    moved, cache = record["io"], record["cache"]
    assert set(moved["by_drive"]) == {"a", "b"}
    assert moved["requested_bytes"] == sum(drive["bytes"] for drive in moved["by_drive"].values())
    assert moved["requested_bytes"] == sum(moved["by_kind"].values())
    assert moved["by_kind"]["demand"] == plain["io"]["by_kind"]["demand"]
    with Checkpoint.open(tiny) as checkpoint:
        assert moved["by_kind"]["trunk"] == checkpoint.trunk_nbytes <= plain["io"]["by_kind"]["trunk"]
    assert sum(drive["landed_last"] for drive in moved["by_drive"].values()) > 0
    reads = sum(drive["reads"] for drive in moved["by_drive"].values())
    assert moved["requested_bytes"] <= moved["device_bytes"] <= moved["requested_bytes"] + 2 * 65536 * reads
    assert all(drive["errors"] == drive["retries"] == 0 for drive in moved["by_drive"].values())
    assert cache["peak_bytes"] <= cache["budget_bytes"] == record["memory"]["plan"]["expert_cache"]
    assert record["memory"]["plan"]["reading"] > 0
    assert record["settings"]["drives"]["b"]["limit_bytes_per_s"] == 2e8
    assert plain["settings"]["drives"] is None
    head = ended.err.splitlines()
    drives = next(
        number for number, text in enumerate(head) if text.startswith("drives   a: 128 of 128 experts, the trunk, ")
    )
    assert head[drives + 1].startswith("         b: 128 of 128 experts, the trunk, ")
    assert head[drives + 2].startswith("verify   off: no manifest; ")
    assert head[drives + 3].startswith("memory ")


def test_failures_made_good_are_told(
    cli: Command, tiny: Path, tmp_path: Path, devices: dict[str, Callable[[int], None]]
) -> None:
    write_experts(tiny, tmp_path / "d", lambda *_: True)
    devices["d"], devices["model"] = lost_after(2), slow
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4, "--drive", f"d={tmp_path / 'd'}", "--stats")
    assert ended.status == 0
    assert "note     drive d: " in ended.err


def test_a_conversation_tells_of_each_failure_once(
    cli: Command,
    embedded: Path,
    odd: Path,
    devices: dict[str, Callable[[int], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nhello again\n"))

    def third_fails(number: int) -> None:
        if number == 2:
            raise DeviceError(Fault.IO, "input/output error")

    devices["o"], devices["model"] = third_fails, slow
    ended = cli("chat", "--max-new", 4, "--drive", f"o={odd}")
    assert ended.status == 0
    told = r"^note     drive o: 1 reads failed; other copies were read; the last: layer \d+ expert \d+: i/o error: .+$"
    (line,) = re.findall(told, ended.err, re.MULTILINE)
    assert line.endswith("input/output error")


@pytest.mark.parametrize("name", ["a b", "a\n\x1b[31m", "ä", "a/b"])
def test_a_drive_name_is_plain(cli: Command, tiny: Path, name: str) -> None:
    outcome = cli("run", *on(tiny), "--prompt", "a", "--simulate-drive", f"{name}=400MB/s")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert "\x1b" not in outcome.err


def test_a_run_in_sixty_four_descriptors(start: Start, bare: Path, even: Path, odd: Path, alone: Outcome) -> None:
    """A file per expert on two drives, many more files than may be open."""
    process = start(
        *("run", "--model", bare, "--backend", "cpu", "--prompt", "The capital of France is", "--max-new", NEW),
        *("--json", "--logits-hash", "--drive", f"e={even}", "--drive", f"o={odd}", "--expert-cache", "off"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    out, _ = process.communicate(timeout=120)
    record = json.loads(out)
    assert list(zip(record["token_ids"], record["logits_sha256"], strict=True)) == alone
    assert all(drive["errors"] == 0 for drive in record["io"]["by_drive"].values())
