"""The trunk in int8: how it is made, that every backend takes it for what it is, and that nobody can miss the label."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trajectory
from commandline import Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serverside import served
from trajectory import assert_same_run, feed_engine, make_prompt, reference_run

from runtime.checkpoint import Checkpoint, int8
from runtime.checkpoint.int8 import Int8Matrix, is_int8, quantize
from runtime.errors import CheckpointError
from runtime.generate import Engine
from runtime.ops import backend_type, cpu, make_ops
from runtime.ops.cpu import CpuOps
from runtime.ops.kernels.formats import BF16, INT8
from runtime.setup.synth import synthesize
from runtime.weights import trunk

LABEL = "not weight-exact"
BACKENDS = ("cpu", "mlx", "reference")


def bf16(values: Any) -> Any:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def made(bits: Any, name: str = "a.weight", first: int = 0) -> Int8Matrix:
    matrix = Int8Matrix(np.empty(bits.shape, np.int8), np.empty(len(bits), np.float16))
    quantize(bits, matrix, name, first)
    return matrix


def random(seed: int, rows: int, columns: int) -> Int8Matrix:
    return made(bf16(np.random.default_rng(seed).standard_normal((rows, columns)) / 4))


def values_of(matrix: Int8Matrix) -> Any:
    return matrix.values.astype(np.float64) * matrix.scales.astype(np.float64)[:, None]


def ops_of(backend: str) -> Any:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
    return make_ops(backend)


# -- how it is made ----------------------------------------------------------------------------------------------------


def test_a_row_has_one_scale_and_rounds_half_to_even() -> None:
    rows = [[127.0, 0.5, 1.5, -2.5, -126.5], [0.0] * 5, [-254.0, 3.0, 1.0, -1.0, 5.0]]
    matrix = made(bf16(rows))
    assert matrix.scales.tolist() == [1.0, 1.0, 2.0]
    assert matrix.values.tolist() == [[127, 0, 2, -2, -126], [0] * 5, [-127, 2, 0, 0, 2]]


def test_values_are_of_the_scale_in_float32_which_is_kept_in_float16() -> None:
    """2.125 is 117.497 of the one, 117.522 of the other."""
    matrix = made(bf16([[-2.296875, 2.125]]))
    assert matrix.scales.tolist() == [float(np.float16(np.float32(2.296875) / np.float32(127)))]
    assert matrix.values.tolist() == [[-127, 117]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_what_int8_cannot_hold_is_refused_by_name_and_row(bad: float) -> None:
    rows = np.ones((4, 8))
    rows[2, 5] = bad
    with pytest.raises(CheckpointError, match=r"^some\.weight: row 1,002 .* use --trunk bf16$"):
        made(bf16(rows), "some.weight", first=1000)


def test_a_weight_in_int8_is_exact_in_float32() -> None:
    scales = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)  # all that are positive and finite
    for value in range(-127, 128):
        wide = np.float64(value) * scales.astype(np.float64)
        assert np.array_equal(np.float32(value) * scales.astype(np.float32), wide)
        assert np.array_equal(np.float32(value << 24) * (scales.astype(np.float32) * np.float32(2.0**-24)), wide)


# -- every backend takes it for what it is -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 140),
    n_rows=st.integers(1, 19),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_linear_on_cpu_has_the_bits_of_the_same_matrix_in_float32(
    rows: int, columns: int, n_rows: int, threads: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "WORTH_A_THREAD", 1)
        ops, matrix = CpuOps(threads), random(seed, rows, columns)
        x = np.random.default_rng(seed + 1).standard_normal((n_rows, columns)).astype(np.float32)
        wanted = ops.linear(x, ops.matrix(values_of(matrix).astype(np.float32)))
        assert ops.linear(x, ops.int8_matrix(matrix)).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("columns", [5, 24, 96, 192, 512])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear(backend: str, columns: int) -> None:
    ops, matrix = ops_of(backend), random(3, 70, columns)
    x, wanted = np.random.default_rng(4).standard_normal((5, columns)).astype(np.float32), values_of(matrix)
    found = ops.numpy(ops.linear(ops.vector(x), ops.int8_matrix(matrix)))
    assert trajectory.relative_error(found, x.astype(np.float64) @ wanted.T) < 2e-6


@pytest.mark.parametrize("rank", [24, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_attention(backend: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the same matrix in float32: the same bits but on mlx, there in tiles of a head or two."""
    ops, matrix, rng = ops_of(backend), random(5, 3 * 32, rank), np.random.default_rng(6)
    as_floats = ops.matrix(values_of(matrix).astype(np.float32))
    if backend == "mlx":
        monkeypatch.setattr("runtime.ops.mlx.TILE_BYTES", 4 * 2 * 32 * rank)
    cache = ops.latent_cache(40, rank, 8)
    for t, part in enumerate(rng.standard_normal((2, 7, rank + 8)).astype(np.float32)):
        end = cache.append(ops.vector(part[:, :rank]), ops.vector(part[:, rank:]))
        cache.length = end if t == 0 else cache.length
    q = ops.vector(rng.standard_normal((7, 3, 12 + 8)).astype(np.float32))
    wanted = ops.numpy(ops.latent_attention(q, cache, as_floats, rank, 8, 0.3))
    found = ops.numpy(ops.latent_attention(q, cache, ops.int8_matrix(matrix), rank, 8, 0.3))
    assert trajectory.relative_error(found, wanted) <= (2e-6 if backend == "mlx" else 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bytes_kept_are_those_stated(backend: str) -> None:
    ops = ops_of(backend)
    for rows, columns in ((7, 40), (6, 128), (5, 192)):
        kept: Any = ops.int8_matrix(random(0, rows, columns))
        parts = {"cpu": ["array", "scales"], "mlx": ["codes", "scales", "biases"]}.get(backend)
        nbytes = kept.nbytes if parts is None else sum(getattr(kept, part).nbytes for part in parts)
        assert nbytes == ops.int8_nbytes(rows, columns)


# -- the whole model ---------------------------------------------------------------------------------------------------

SEED = 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "tiny"
    synthesize("tiny", path, seed=SEED, vocab=512)
    return path


def test_every_layer_and_every_token_as_the_reference_has_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
    monkeypatch.setattr(trajectory, "GREEDY", 16)
    wanted = reference_run(Engine.load(checkpoint, backend="reference", trunk="int8"), make_prompt(SEED, 512))
    wanted.require_margins()
    for backend in ("cpu", "mlx"):
        assert_same_run(feed_engine(Engine.load(checkpoint, backend=backend, threads=1, trunk="int8")), wanted)
    released = feed_engine(Engine.load(checkpoint, backend="cpu", threads=1))(wanted.fed[0])
    assert trajectory.relative_error(released.logits, wanted.passes[0].logits) > 1e-3  # this is another model


def test_chunk_and_threads_do_not_matter(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    prompt = make_prompt(SEED, 512).tolist()
    answers = []
    for threads, chunk in ((1, 64), (1, 5), (3, 7)):
        engine = Engine.load(checkpoint, backend="cpu", threads=threads, chunk=chunk, trunk="int8")
        answers.append([step.logits_sha256 for step in engine.session().generate(prompt, 4, logits_hash=True)])
    assert answers[0] == answers[1] == answers[2]


def test_router_embedding_and_vectors_stay_as_released(checkpoint: Path) -> None:
    engine = Engine.load(checkpoint, backend="cpu", threads=1, trunk="int8")
    weights = engine.model.trunk
    layers = [weights.layer(layer) for layer in range(engine.config.num_hidden_layers)]
    exact = {"embed_tokens"} | {f"{i} block_sparse_moe.gate" for i in engine.config.moe_layers}
    for place, home in [("", weights.top), *((f"{i} ", layer) for i, layer in enumerate(layers))]:
        for name, weight in home.items():
            if isinstance(weight, cpu.Matrix):
                assert weight.form == (BF16 if place + name in exact else INT8), place + name
    with Checkpoint.open(checkpoint) as released:
        name = "language_model.model.layers.1.block_sparse_moe.gate.weight"
        assert np.array_equal(layers[1]["block_sparse_moe.gate"].array, released.read(name))


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_original_is_never_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of 26 MB: beside what is kept there are some blocks, and every byte is read once."""
    synthesize("tiny", tmp_path / "wide", layers=2, vocab=100_000)
    monkeypatch.setattr(int8, "BLOCK_BYTES", 1 << 18)
    ops = make_ops("cpu")
    with Checkpoint.open(tmp_path / "wide") as wide:
        read = wide.bytes_read
        tracemalloc.start()
        loaded = trunk.Trunk(wide, ops, "int8")
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert wide.bytes_read - read == wide.trunk_nbytes
        assert loaded.top["lm_head"].array.nbytes > 12_000_000
        assert peak - kept < 6 * (1 << 18)
        planned = trunk.trunk_nbytes(wide, backend_type("cpu"), "int8")
        assert planned <= kept <= planned + 400_000  # objects and vectors, which are widened


def test_the_plan_counts_a_byte_for_a_weight_and_a_scale_for_a_row(checkpoint: Path) -> None:
    with Checkpoint.open(checkpoint) as opened:
        spans = [opened.span(name) for name in opened.trunk_names() if is_int8(name)]
        saved = sum(rows * columns - 4 * rows for rows, columns in (span.shape for span in spans))
        ops = backend_type("cpu")
        whole, halved = (trunk.trunk_nbytes(opened, ops, precision) for precision in ("bf16", "int8"))
        assert whole == opened.trunk_nbytes
        assert whole - halved == saved > whole // 3


# -- the label ---------------------------------------------------------------------------------------------------------


def test_nobody_can_miss_that_it_is_not_weight_exact(cli: Command, checkpoint: Path) -> None:
    options = ["run", "--model", checkpoint, "--backend", "cpu", "--prompt-ids", "1,2,3", "--max-new", "2"]
    outcome = cli(*options, "--trunk", "int8", "--json")
    assert outcome.record["model"]["trunk"] == outcome.record["settings"]["trunk"] == "int8"
    assert outcome.record["settings"]["precision"].startswith(LABEL)
    assert LABEL in outcome.err
    shown = cli(*options, "--trunk", "int8", "--stats").err
    assert any(line.startswith("precision") and LABEL in line for line in shown.splitlines())
    plain = cli(*options, "--json", "--stats")
    assert plain.record["model"]["trunk"] == plain.record["settings"]["trunk"] == "bf16"
    assert plain.record["settings"]["precision"].startswith("weight-exact")
    assert LABEL not in plain.err


def test_chat_says_it_too(cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", (tmp_path / "nothing").open("w+"))
    outcome = cli("chat", "--trunk", "int8", "--backend", "cpu")
    assert outcome.status == 0
    assert LABEL in outcome.err


def test_a_server_says_it_of_itself(checkpoint: Path) -> None:
    for precision, words in (("int8", LABEL), ("bf16", "weight-exact")):
        with Engine.load(checkpoint, backend="reference", trunk=precision) as engine, served(engine) as server:
            assert server.get("/health").json["precision"].startswith(words)


def test_a_refusal_says_what_int8_would_need(cli: Command, checkpoint: Path) -> None:
    options = ["run", "--model", checkpoint, "--backend", "cpu", "--prompt-ids", "1", "--memory", "10M"]
    refused = cli(*options)
    assert refused.status == 5
    assert "With --trunk int8, which is not weight-exact, it could run in " in refused.err
    assert LABEL not in cli(*options, "--trunk", "int8").err
    assert LABEL not in cli(*options, "--backend", "reference").err  # float64 either way
