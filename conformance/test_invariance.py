"""The answer does not depend on how it was computed: bits, not tolerances, on `reference` and `cpu`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import shapes

from runtime.generate import Engine, Step
from runtime.ops import cpu

SHAPE = "released-proportions"
PROMPT = np.random.default_rng(11).integers(0, 512, 75).tolist()
NEW = 16

Outcome = list[tuple[int, str | None]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("invariance") / SHAPE
    shapes.write_checkpoint(SHAPE, shapes.SEEDS[SHAPE], path)
    return path


def outcome(steps: list[Step]) -> Outcome:
    return [(step.token_id, step.logits_sha256) for step in steps]


def answer(engine: Engine, prompt: list[int] = PROMPT, new: int = NEW) -> Outcome:
    return outcome(list(engine.session().generate(prompt, new, logits_hash=True)))


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> dict[str, Outcome]:
    """What each backend answers with the prompt in one chunk and one thread."""
    return {backend: answer(Engine.load(checkpoint, backend=backend, threads=1)) for backend in ("reference", "cpu")}


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_prefill_chunk_does_not_matter(
    backend: str, chunk: int, checkpoint: Path, whole: dict[str, Outcome]
) -> None:
    assert answer(Engine.load(checkpoint, backend=backend, threads=1, chunk=chunk)) == whole[backend]


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_matter(
    threads: int, chunk: int, checkpoint: Path, whole: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that can be divided is, however little work it is: this shape is too small for a thread."""
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    engine = Engine.load(checkpoint, backend="cpu", threads=threads, chunk=chunk)
    with mock.patch.object(engine.ops._pool, "submit", wraps=engine.ops._pool.submit) as submit:  # type: ignore[attr-defined]
        assert answer(engine) == whole["cpu"]
    kernels = {call.args[0].__qualname__.split(".")[1] for call in submit.call_args_list}
    assert kernels == {"_multiply", "expert_mlp", "delta_rule", "latent_attention"}
    assert submit.call_count >= (threads - 1) * NEW * engine.config.num_hidden_layers


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_expert_cache_does_not_matter(backend: str, checkpoint: Path, whole: dict[str, Outcome]) -> None:
    engine = Engine.load(checkpoint, backend=backend)
    expert, config = engine.checkpoint.expert_nbytes, engine.config
    floor = config.num_experts_per_token * expert
    everything = len(config.moe_layers) * config.num_experts * expert
    for budget in (floor, floor + expert, everything // 4):
        small = Engine.load(checkpoint, backend=backend, expert_cache=budget)
        assert answer(small) == whole[backend]
        assert small.experts.stats.peak_bytes <= budget
    unused = Engine.load(checkpoint, backend=backend, reuse=False)
    assert answer(unused) == whole[backend]
    assert unused.experts.stats.hits == 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_prompt_that_extends_the_session_costs_only_its_new_part(
    backend: str, checkpoint: Path, whole: dict[str, Outcome]
) -> None:
    session = Engine.load(checkpoint, backend=backend).session()
    for split in (20, 50, len(PROMPT)):
        steps = list(session.generate(PROMPT[:split], NEW if split == len(PROMPT) else 1, logits_hash=True))
    assert session.prefill.rows == len(PROMPT) - 50
    assert outcome(steps) == whole[backend]


def test_an_edited_or_repeated_prompt_is_computed_anew(checkpoint: Path, whole: dict[str, Outcome]) -> None:
    session = Engine.load(checkpoint, backend="cpu").session()
    for prompt in ([*PROMPT[:10], 5, *PROMPT[11:]], PROMPT, PROMPT):
        steps = list(session.generate(prompt, NEW, logits_hash=True))
        assert session.prefill.rows == len(PROMPT)
    assert outcome(steps) == whole["cpu"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_cancelled_pass_leaves_the_session_as_it_was(
    backend: str, checkpoint: Path, whole: dict[str, Outcome]
) -> None:
    from runtime.errors import Cancelled

    engine = Engine.load(checkpoint, backend=backend)
    session = engine.session()
    list(session.generate(PROMPT[:40], 1))
    layers = []
    for asked in range(0, 60, 4):
        countdown = iter([False] * asked + [True])
        with pytest.raises(Cancelled, match="stopped in layer") as stopped:
            list(session.generate(PROMPT, 1, cancelled=lambda: next(countdown)))  # noqa: B023
        layers.append(int(str(stopped.value).split()[3].strip(",")))
        assert session.processed == PROMPT[:40]
    assert layers == sorted(layers)
    assert 2 < len(set(layers)) < len(layers), "it stops in the middle of layers, too"
    assert outcome(list(session.generate(PROMPT, NEW, logits_hash=True))) == whole[backend]


def dispatched_features() -> str:
    """What NumPy would use of this processor beyond its baseline."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])


BLAS = {"OPENBLAS_CORETYPE": "Nehalem"}
NUMPY = {"NPY_DISABLE_CPU_FEATURES": dispatched_features()}
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx,+sse4.2"}
NO_FMA = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}


@pytest.mark.parametrize(
    ("backend", "older"),
    [
        pytest.param("reference", {**BLAS, **NUMPY}, id="reference, older BLAS and NumPy features"),
        pytest.param("cpu", {**BLAS, **NUMPY}, id="cpu, older BLAS and NumPy features"),
        pytest.param("cpu", AVX2, id="cpu, kernels for AVX2"),
        pytest.param("cpu", NO_FMA, id="cpu, kernels without FMA instructions"),
    ],
)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names older x86 processors")
def test_the_processor_does_not_matter(
    backend: str, older: dict[str, str], checkpoint: Path, whole: dict[str, Outcome]
) -> None:
    command = [sys.executable, "-m", "runtime", "run", "--model", str(checkpoint), "--backend", backend]
    command += ["--prompt-ids", ",".join(map(str, PROMPT)), "--max-new", str(NEW), "--json", "--logits-hash"]
    done = subprocess.run(command, env={**os.environ, **older}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert list(zip(record["token_ids"], record["logits_sha256"], strict=True)) == whole[backend]
