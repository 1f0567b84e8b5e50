"""The trunk through the drives: resident or read in every pass, the same bits, and every byte accounted for."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commandline import Command, on
from trajectory import same_weight
from trouble import HANGS_S, Doings, Read, lost, lost_on_the_way, trouble

from runtime import ops
from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import is_vector
from runtime.drives.kernel import device_bytes_read
from runtime.drives.throttled import Limit
from runtime.errors import Cancelled, DoesNotFitError, StorageError
from runtime.generate import Engine, MemoryPlan
from runtime.ops import backend_type
from runtime.setup.synth import synthesize
from runtime.weights import layout as arrangement
from runtime.weights.ahead import row_blocks
from runtime.weights.division import EMBEDDING, IN_A_PASS, Divider
from runtime.weights.layout import Layout
from runtime.weights.stream import HEAD

PROMPT = np.random.default_rng(7).integers(0, 512, 24).tolist()
NEW = 3
Outcome = list[tuple[int, str | None]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever late: a busy machine makes no faults, and every read is counted once."""
    policy = replace(arrangement.POLICY, deadline_floor_s=1000.0, check_timeout_s=20.0)
    monkeypatch.setattr(arrangement, "POLICY", policy)


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not grow from one plan to the next, matrices in several blocks, few buffers for rows."""
    held = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=10**8))
    monkeypatch.setattr("psutil.Process", lambda: held)
    monkeypatch.setattr(ops, "BLOCK_BYTES", 1 << 15)
    for room in ("division", "stream"):
        monkeypatch.setattr(f"runtime.weights.{room}.ROWS_AT_ONCE", 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trunk") / "tiny"
    synthesize("tiny", made, vocab=512)
    return made


def limits(count: int) -> Layout:
    return Layout(limits=tuple(Limit(f"s{i}", 4e8) for i in range(count)))


class _Planned(Exception):
    """Stops the loading when the plan is there."""


def planned(path: Path, memory: int | None = None, **options: Any) -> MemoryPlan:
    plans: list[MemoryPlan] = []

    def announce(_: object, plan: MemoryPlan, *__: object) -> None:
        plans.append(plan)
        raise _Planned

    with pytest.raises(_Planned):
        Engine.load(path, memory=memory, announce=announce, **options)
    return plans[0]


def least_cache(path: Path, options: dict[str, Any]) -> int:
    """Bytes of one layer's top-k of experts: what a token needs where nothing is kept."""
    return planned(path, 10**12, **options | {"reuse": False, "chunk": 1})["expert_cache"]


def memory_for(path: Path, share: float, **options: Any) -> int:
    """What leaves room for so much of the matrices that can be streamed, and for one layer's top-k of experts."""
    roomy = planned(path, 10**12, **options)
    with Checkpoint.open(path) as checkpoint:
        hedges = 4 * (len(options["layout"].limits) > 1)
        precision = options.get("trunk", "bf16")
        least = Divider(checkpoint, backend_type(options["backend"]), precision, 4096, hedges).divide(0)
    rest = roomy.total - roomy["trunk"] - roomy["staging"] - roomy["expert_cache"]
    streamed = least.whole_bytes - least.resident_bytes
    return rest + least_cache(path, options) + least.resident_bytes + least.staging_bytes + int(share * streamed)


@contextmanager
def loaded(path: Path, share: float | None = None, drives: int = 1, **options: Any) -> Iterator[Engine]:
    """With the whole trunk in memory, or with this share of what could be read in every pass."""
    options = {"backend": "cpu", "chunk": 64, "context": 64, "threads": 1, "layout": limits(drives)} | options
    memory = None if share is None else memory_for(path, share, **options)
    with Engine.load(path, memory=memory, **options) as engine:
        assert (share is not None) == bool(engine.plan.trunk.room_bytes)
        yield engine


def answer(engine: Engine, prompt: list[int] = PROMPT, new: int = NEW) -> Outcome:
    return [(s.token_id, s.logits_sha256) for s in engine.session().generate(prompt, new, logits_hash=True)]


def settled(engine: Engine) -> None:
    """Nothing is read; every buffer is an expert's, or a block's that was read ahead."""
    assert engine.drives is not None
    reader, stream = engine.drives.reader, engine.model.trunk.stream
    assert reader is not None
    for _ in range(500):
        if reader.idle:
            break
        time.sleep(0.01)
    reader.audit()
    experts = engine.experts.stats.bytes_held
    assert 0 <= reader.pool.in_use - experts <= engine.plan.trunk.room_bytes
    if stream is not None:
        stream.close()
    assert reader.pool.in_use == experts


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("backend", ["cpu", "mlx", "reference"])
def test_every_weight_is_there_as_if_read_plainly(backend: str, precision: Any, path: Path, small: None) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    threads = 1
    with (
        Engine.load(path, backend=backend, threads=threads, trunk=precision) as plain,
        loaded(path, backend=backend, drives=2, trunk=precision) as engine,
    ):
        assert plain.drives is None
        assert engine.drives is not None
        assert engine.drives.reader is not None
        assert engine.drives.reader.pool.in_use == 0, "what stays is the backend's"
        here, there = engine.model.trunk, plain.model.trunk
        homes = [(here.top, there.top)] + [(here.layer(i), there.layer(i)) for i in range(9)]
        for home, other in homes:
            assert home.keys() == other.keys()
            for name, weight in home.items():
                assert same_weight(weight, other[name]), name
        counts, kinds, _ = engine.drives.counts()
        assert kinds["trunk"].requested_bytes == engine.checkpoint.trunk_nbytes
        assert all(drive.requested_bytes for drive in counts.values()), "all drives that hold it take part"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most matrices of the small model are large, and are read in several slices."""
    monkeypatch.setattr("runtime.weights.trunk.NEIGHBOUR_BYTES", 1 << 13)


def test_a_large_matrix_stays_where_it_was_read(path: Path, small: None) -> None:
    with loaded(path) as engine:
        assert engine.drives is not None
        q = engine.model.trunk.layer(0)["self_attn.q_proj"].array
        offset = engine.checkpoint.span("language_model.model.layers.0.self_attn.q_proj.weight").offset
        assert not q.flags.owndata
        assert q.ctypes.data % 4096 == offset % 4096, "no byte of it was copied"


def test_what_is_read_is_what_the_kernel_saw(tmp_path: Path, path: Path) -> None:
    if device_bytes_read() is None:
        pytest.skip("the system does not say what a process reads")
    copy = write_copy(path, tmp_path / "copy")
    with loaded(copy) as engine:
        assert engine.drives is not None
        drives, _, modes = engine.drives.counts()
        if modes["s0"] != "direct":
            pytest.skip(modes["s0"])
        counts = drives["s0"]
        blocks = 2 * 4096 * counts.reads
        assert counts.requested_bytes <= counts.device_bytes <= counts.requested_bytes + blocks
        process, _ = engine.drives.witnessed()
        assert process is not None
        assert process >= counts.device_bytes


def write_copy(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to))


def test_tensors_under_other_names(path: Path, tmp_path: Path, whole: Any) -> None:
    """Without the prefix, as some files have them: the same sizes, so that nothing else changes."""
    renamed = write_copy(path, tmp_path / "renamed")
    (renamed / "model.safetensors.index.json").unlink()
    for file in renamed.glob("*.safetensors"):
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = re.sub(rb'"language_model\.([^"]*)"', rb'               "\1"', data[8:end])
        file.write_bytes(data[:8] + header + data[end:])
    with loaded(renamed, 0.5) as engine:
        assert answer(engine) == whole["cpu", "bf16"]


def test_a_stop_while_loading_is_prompt(path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stopped

    begun, others = time.monotonic(), threading.enumerate()
    with pytest.raises(Stopped), loaded(path, layout=Layout(limits=(Limit("slow", 20_000.0),)), progress=stop):
        pass
    assert time.monotonic() - begun < 60, "all of it would take minutes"
    assert not [t for t in threading.enumerate() if t.name == "drives-clock" and t not in others]


# -- streaming ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(path: Path) -> dict[tuple[str, str], Outcome]:
    """The answers with everything in memory, read plainly."""
    answers = {}
    for backend, precision in (("cpu", "bf16"), ("cpu", "int8"), ("reference", "bf16"), ("reference", "int8")):
        with Engine.load(path, backend=backend, threads=1, trunk=precision) as engine:  # type: ignore[arg-type]
            answers[backend, precision] = answer(engine)
    return answers


@pytest.mark.parametrize(
    ("backend", "share", "drives", "options"),
    [
        ("cpu", 0.0, 1, {}),
        ("cpu", 0.0, 2, {"threads": 3, "chunk": 7}),
        ("cpu", 0.5, 2, {"prefetch": True, "chunk": 5}),
        ("cpu", 0.9, 1, {"reuse": False}),
        ("cpu", 0.3, 2, {"trunk": "int8"}),
        ("reference", 0.2, 2, {"chunk": 9}),
        ("reference", 0.6, 1, {"trunk": "int8"}),
    ],
)
def test_the_same_bits(
    backend: str, share: float, drives: int, options: dict[str, Any], path: Path, whole: Any, small: None
) -> None:
    with loaded(path, share, drives, backend=backend, **options) as engine:
        assert answer(engine) == whole[backend, options.get("trunk", "bf16")]
        assert engine.model.trunk.streamed_bytes > 0
        settled(engine)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_same_bits_on_mlx(precision: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="needs MLX")
    monkeypatch.setattr("runtime.ops.mlx.TILE_BYTES", 1 << 14)
    with Engine.load(path, backend="mlx", trunk=precision, chunk=64, context=64) as engine:
        wanted = answer(engine)
    with loaded(path, 0.0, 2, backend="mlx", trunk=precision) as engine:
        assert answer(engine) == wanted
        settled(engine)


def test_a_pass_reads_each_block_once_and_in_its_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "BLOCK_BYTES", 1 << 18)  # blocks of several sizes
    with loaded(path, 0.4) as engine:
        plan, trunk = engine.plan, engine.model.trunk
        assert engine.drives is not None
        assert engine.drives.reader is not None
        pool, made, steps = engine.drives.reader.pool, 0, []
        for step in engine.session().generate(PROMPT, 8):
            made = pool.made if len(steps) < 3 else made
            steps.append(step)
        assert pool.made == made, "buffers serve each other, whatever block they were for"
        assert trunk.stream is not None
        assert trunk.stream.restarts == 0
        rows = len(set(PROMPT)) - 1
        row = 2 * engine.config.hidden_size
        assert trunk.streamed_bytes == 8 * plan.trunk.read_bytes + rows * row
        stays = [name for name in engine.checkpoint.trunk_names() if name not in plan.trunk.streamed]
        assert plan["trunk"] == sum(engine.checkpoint.span(name).nbytes for name in stays)
        expected = steps[-1].expert_misses * engine.checkpoint.expert_nbytes + plan.trunk.read_bytes
        assert steps[-1].bytes_read == expected
        assert engine.drives is not None
        read = engine.drives.counts()[1]["trunk"].requested_bytes
        ahead = read - plan["trunk"] - trunk.streamed_bytes
        assert 0 <= ahead <= plan.trunk.room_bytes, "what was read for a pass that did not come"


def test_a_prompt_in_chunks_does_not_read_the_head_but_once(path: Path) -> None:
    with loaded(path, 0.0, chunk=8) as engine:
        list(engine.session().generate(PROMPT, 1))
        head = engine.checkpoint.span(HEAD).nbytes
        rows = sum(len(set(PROMPT[i : i + 8])) for i in range(0, 24, 8)) * 2 * engine.config.hidden_size
        matrices = engine.plan.trunk.read_bytes - 2 * engine.config.hidden_size
        assert engine.model.trunk.streamed_bytes == 3 * (matrices - head) + head + rows


# -- which stay --------------------------------------------------------------------------------------------------------


def test_what_stays(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        divider = Divider(checkpoint, backend_type("cpu"), "bf16", 4096)
        least = divider.divide(0)
        names = set(checkpoint.trunk_names()) - set(least.streamed)
        short = {name.removesuffix(".weight").split(".", 4)[-1] for name in names if ".layers." in name}
        assert {name for name in short if not name.endswith(VECTOR_ENDINGS)} == {
            "self_attn.kv_b_proj",
            "block_sparse_moe.gate",
        }
        assert all(is_vector(name) for name in names if ".layers." not in name)
        assert least.streamed[0] == EMBEDDING
        assert least.streamed[-1] == HEAD
        before = least
        for share in (0.2, 0.5, 0.8):
            room = least.resident_bytes + least.staging_bytes + int(share * (least.whole_bytes - least.resident_bytes))
            found = divider.divide(room)
            assert found.resident_bytes + found.staging_bytes <= room
            assert found.read_bytes < before.read_bytes
            assert set(found.streamed) <= set(before.streamed)
            per_layer = [sum(f".{i}." in name for name in found.streamed) for i in range(1, 9)]
            assert max(per_layer) - min(per_layer) <= 3, "as much between any two layers' experts"
            before = found
        everything = divider.divide(10**9)
        assert everything.streamed == (EMBEDDING,)
        assert divider.whole().streamed == ()


VECTOR_ENDINGS = ("norm", "res_proj", "conv1d", "A_log", "dt_bias", "bias")


def test_the_order_of_a_pass_names_every_matrix_that_linear_is_given(path: Path) -> None:
    with Engine.load(path, backend="reference") as engine:
        asked: list[str] = []
        trunk = engine.model.trunk
        names = {id(w): f"{i}.{n}" for i in range(9) for n, w in trunk.layer(i).items()}
        linear = trunk.linear

        def noted(x: Any, weight: Any) -> Any:
            asked.append(names.get(id(weight), ""))
            return linear(x, weight)

        trunk.linear = noted  # type: ignore[method-assign]
        list(engine.session().generate([1], 1))
    for layer in range(9):
        used = [name.split(".", 1)[1] for name in asked if name.startswith(f"{layer}.")]
        listed = [name for name in used if name in IN_A_PASS]
        assert listed == sorted(listed, key=IN_A_PASS.index)
        assert set(used) - set(listed) <= {"block_sparse_moe.gate"}


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def doings() -> Iterator[Doings]:
    with trouble() as doings:
        yield doings


def test_a_drive_lost_while_the_trunk_is_streamed(path: Path, whole: Any, doings: Doings) -> None:
    with loaded(path, 0.0, 2) as engine:
        assert lost_on_the_way(engine, PROMPT, NEW, doings) == whole["cpu", "bf16"]
        assert engine.drives is not None
        counts, _, _ = engine.drives.counts()
        assert counts["s1"].errors > counts["s0"].errors == 0


def test_with_no_copy_left_the_request_ends_and_the_session_lives_on(path: Path, whole: Any, doings: Doings) -> None:
    with loaded(path, 0.0, 1) as engine:
        session = engine.session()
        first = next(session.generate(PROMPT, 1, logits_hash=True))
        doings["s0"] = lost
        with pytest.raises(StorageError, match=r"language_model\.model\..*: no copy left .*drive s0: .*no such device"):
            list(session.generate([*PROMPT, first.token_id], 1))
        assert len(session.processed) == len(PROMPT)
        del doings["s0"]
        for _ in range(200):  # the drive sits out for a while
            try:
                steps = list(session.generate([*PROMPT, first.token_id], NEW - 1, logits_hash=True))
            except StorageError:
                time.sleep(0.05)
            else:
                break
        outcome = [(step.token_id, step.logits_sha256) for step in (first, *steps)]
        assert outcome == whole["cpu", "bf16"]
        settled(engine)


def test_a_stop_in_the_middle_of_a_layer_leaves_the_session_as_it_was(path: Path, whole: Any) -> None:
    with loaded(path, 0.3) as engine:
        session = engine.session()
        list(session.generate(PROMPT[:10], 1))
        for asked in range(0, 40, 3):
            countdown = iter([False] * asked + [True])
            with pytest.raises(Cancelled):
                list(session.generate(PROMPT, 1, cancelled=lambda: next(countdown)))  # noqa: B023
            assert session.processed == PROMPT[:10]
        assert engine.model.trunk.stream is not None
        assert engine.model.trunk.stream.restarts > 3, "what was read ahead was of no use"
        steps = list(session.generate(PROMPT, NEW, logits_hash=True))
        assert [(step.token_id, step.logits_sha256) for step in steps] == whole["cpu", "bf16"]
        settled(engine)


def test_a_stop_does_not_wait_for_a_matrix(path: Path, doings: Doings) -> None:
    gate, waiting = threading.Event(), threading.Event()

    def hold(read: Read, into: memoryview) -> int:
        waiting.set()
        gate.wait(HANGS_S)
        return read()

    with loaded(path, 0.0) as engine:
        session = engine.session()
        list(session.generate(PROMPT[:10], 1))
        doings["s0"] = hold
        with pytest.raises(Cancelled, match="stopped in layer"):
            list(session.generate(PROMPT, 1, cancelled=waiting.is_set))
        gate.set()
        assert session.processed == PROMPT[:10]


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_the_floor_runs_and_a_byte_less_is_refused(cli: Command, path: Path, whole: Any) -> None:
    options = {"backend": "cpu", "chunk": 64, "context": 64, "threads": 1, "layout": limits(1)}
    floor = memory_for(path, 0.0, **options)
    with Engine.load(path, memory=floor, **options) as engine:  # type: ignore[arg-type]
        assert engine.plan.total == floor
        assert answer(engine) == whole["cpu", "bf16"]
    with pytest.raises(DoesNotFitError, match=r"The least it can run in is [\d.]+ MB") as refused:
        planned(path, floor - 1, **options)
    assert "\n" not in str(refused.value)
    line = ["run", *on(path), "--prompt-ids", "1", "--simulate-drive", "a=400MB/s", "--memory", "120M"]
    assert cli(*line).err.count("\n") == 1


def test_an_expert_counts_once_on_every_backend(path: Path) -> None:
    pytest.importorskip("mlx.core", reason="needs MLX")
    options = {"chunk": 64, "context": 64, "threads": 1, "layout": limits(2), "prefetch": True}
    cpu, mlx = (planned(path, 10**12, backend=backend, **options) for backend in ("cpu", "mlx"))
    assert (cpu["expert_cache"], cpu["reading"]) == (mlx["expert_cache"], mlx["reading"])


def test_what_streaming_costs_is_said_before_loading(path: Path) -> None:
    options = {"backend": "cpu", "chunk": 64, "context": 64, "threads": 1, "layout": limits(1)}
    plan = planned(path, memory_for(path, 0.3, **options), **options)
    said = plan.streaming
    assert re.match(r"[\d.]+ MB of [\d.]+ MB resident, [\d.]+ MB read per token; with --trunk int8, which is not", said)
    assert plan.as_dict()["trunk_read_per_token"] == plan.trunk.read_bytes
    assert planned(path, 10**12, **options).streaming == ""


def test_the_trunk_gets_memory_before_the_cache_unless_that_was_asked_for(path: Path) -> None:
    options: dict[str, Any] = {"backend": "cpu", "chunk": 64, "context": 64, "threads": 1, "layout": limits(1)}
    memory = memory_for(path, 0.5, **options)
    floor = least_cache(path, options)
    plan = planned(path, memory, **options)
    assert floor <= plan["expert_cache"] < floor + 60_000, "less than the smallest matrix would have taken"
    asked = planned(path, memory, **options, expert_cache=floor + 200_000)
    assert asked["expert_cache"] == floor + 200_000
    assert asked.trunk.read_bytes > plan.trunk.read_bytes
    roomy = planned(path, 10**12, **options)
    less = planned(path, roomy.total - 1, **options)
    assert roomy.trunk.streamed == ()
    assert less.trunk.streamed == (EMBEDDING,)
    assert less["expert_cache"] == roomy["expert_cache"]


def test_blocks_cover_a_matrix(path: Path) -> None:
    with Checkpoint.open(path) as checkpoint:
        for name in (HEAD, "language_model.model.layers.0.mlp.down_proj.weight"):
            at = 0
            for block in row_blocks(name, checkpoint.span(name), backend_type("cpu")):
                assert block.start == at
                assert block.nbytes <= ops.BLOCK_BYTES
                at += block.nbytes
            assert at == checkpoint.span(name).nbytes
