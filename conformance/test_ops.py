"""What the operations of every backend keep to beside their formulas: memory, limits, and numbers that are none.

Run as a program with a backend's name this file prints what its calls took, as the first test compares it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint.mxfp4 import PackedExpert
from runtime.errors import UsageError
from runtime.ops import BACKENDS, Workload, make_ops, reference

CLEAR_REFS = Path("/proc/self/clear_refs")
SLACK = 1 << 20
"""Bytes that small buffers, stacks and the allocator's own books may take."""

NOTHING = Workload(rows=1, widest=32, sources=32, matrix=32, latent=32, inter=32, heads=1, context=1, recurrence=1)


THREADS = 2


def backend_ops(backend: str) -> Any:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
    return make_ops(backend, threads=THREADS)


def expert(latent: int, inter: int) -> PackedExpert:
    def part(rows: int, columns: int) -> tuple[Any, Any]:
        return np.full((rows, columns // 2), 0x21, np.uint8), np.full((rows, columns // 32), 120, np.uint8)

    return PackedExpert(*part(inter, latent), *part(latent, inter), *part(inter, latent))


def filled_cache(ops: Any, positions: int, rank: int, rope: int) -> Any:
    cache = ops.latent_cache(positions, rank, rope)
    cache.append(ops.vector(np.ones((positions, rank), np.float32)), ops.vector(np.ones((positions, rope), np.float32)))
    cache.length = positions - 1
    return cache


# -- memory ------------------------------------------------------------------------------------------------------------


def calls(ops: Any) -> Iterator[tuple[str, Workload, Callable[[], Any]]]:
    """Calls that need memory, one kind of need after the other, each with the workload it is the largest of."""

    def ones(*shape: int) -> Any:
        return ops.vector(np.ones(shape, np.float32))

    def bf16(*shape: int) -> Any:
        return np.full(shape, 0x3F80, np.uint16)

    bits = bf16(1536, 6144)
    yield "a large matrix", replace(NOTHING, matrix=bits.size), lambda: ops.matrix(bits)
    matrix, two = ops.matrix(bits), ones(2, 6144)
    yield "rows times a large matrix", replace(NOTHING, rows=2, widest=6144), lambda: ops.linear(two, matrix)
    matrix, rows = ops.matrix(bf16(512, 16384)), ones(128, 16384)
    wide = replace(NOTHING, rows=128, widest=16384)
    if ops.name != "reference":  # which would take long
        yield "many wide rows", wide, lambda: ops.linear(rows, matrix)
    yield "functions of wide rows", wide, lambda: ops.situ(rows, rows, 4.0, 25.0)
    taps, history = ones(16384, 4), ones(3, 16384)
    yield "a convolution", wide, lambda: ops.short_conv(rows, taps, history)
    sources, norm = [ones(128, 4096) for _ in range(6)], ones(4096)
    mixed = replace(NOTHING, rows=128, widest=4096, sources=6 * 4096)
    yield "sources", mixed, lambda: ops.attn_res(sources, norm, norm, 1e-5)
    packed, z = ops.expert(expert(1024, 2048)), ones(64, 1024)
    of_expert = replace(NOTHING, rows=64, widest=2048, latent=1024, inter=2048)
    yield "an expert", of_expert, lambda: ops.expert_mlp(z, packed, 4.0, 25.0)
    cache, q, kv_b = filled_cache(ops, 300_000, 16, 8), ones(1, 24, 24), ops.matrix(bf16(24 * 32, 16))
    far = replace(NOTHING, widest=1024, heads=24, context=300_000)
    yield "a long past", far, lambda: ops.latent_attention(q, cache, kv_b, 16, 8, 0.2)
    q, beta, state = ones(40, 32, 128), ones(40, 32), ones(32, 128, 128)
    yield "a state", replace(NOTHING, recurrence=32 * 128 * 128), lambda: ops.delta_rule(q, q, q, q, beta, state)


def status(key: str) -> int:
    """A number of bytes from /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{key}:")[1].split()[0])


def report(backend: str) -> dict[str, tuple[int, int]]:
    """Per call (bytes at its peak beside arguments and results, bytes that `scratch_nbytes` allows)."""
    wait: Callable[[Any], object] = id
    settle: Callable[[], object] = dict
    if backend == "mlx":
        from runtime.ops import mlx

        mlx.TILE_BYTES, mlx.FREED_BYTES = 2 << 20, 0
        wait, settle = mlx.mx.eval, mlx.mx.synchronize
    ops = make_ops(backend, threads=THREADS)
    if backend != "reference":
        for _, _, call in calls(ops):  # so that libraries have what they keep
            wait(call())
    taken = {}
    for name, work, call in calls(ops):
        settle()
        CLEAR_REFS.write_text("5")  # VmHWM starts again from what is held now
        before = status("VmRSS")
        results = call()
        wait(results)
        held = sum(getattr(part, "nbytes", 0) for part in (results if isinstance(results, tuple) else [results]))
        taken[name] = (status("VmHWM") - before - held, ops.scratch_nbytes(work, THREADS))
        del results
    return taken


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="needs Linux, which tells a process its peak memory")
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_stay_within_the_scratch_memory_they_state(backend: str) -> None:
    backend_ops(backend)
    # Else what one call has freed stays in the process, where the next call's peak cannot be told from it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, __file__, backend], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (taken, allowed) in json.loads(done.stdout).items():
        assert taken <= allowed + SLACK, f"{name}: {taken:,} bytes taken, {allowed:,} stated"


def test_the_reference_has_the_same_bits_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, rng = make_ops("reference"), np.random.default_rng(0)
    bits = (rng.standard_normal((96, 40), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    x, q = rng.standard_normal((3, 40)), rng.standard_normal((1, 4, 20))
    cache = ops.latent_cache(300, 40, 8)
    cache.append(rng.standard_normal((300, 40)), rng.standard_normal((300, 8)))
    cache.length = 299

    def outputs() -> bytes:
        matrix = ops.matrix(bits)
        found = matrix, ops.linear(x, matrix), ops.latent_attention(q, cache, matrix, 40, 8, 0.3)
        return b"".join(array.tobytes() for array in found)

    whole = outputs()
    for block_bytes in (1, 7 * 8 * 40, 64 * 8 * 40):
        monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)
        assert outputs() == whole


# -- limits and numbers that are none ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_cache_says_so_in_the_same_words(backend: str) -> None:
    cache = backend_ops(backend).latent_cache(4, 8, 4)
    row = backend_ops(backend).zeros
    with pytest.raises(
        UsageError, match="5 positions wanted, the context holds 4: ask for a longer one with --context"
    ):
        cache.append(row(5, 8), row(5, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_neither_stops_a_call_nor_names_an_expert_that_is_not_there(backend: str) -> None:
    ops = backend_ops(backend)
    nan = ops.vector(np.full((2, 64), np.nan, np.float32))
    for logits in (np.full((2, 6), np.nan), np.array([[0, np.nan, 2, 1, np.nan, 3], [1, 2, 3, 4, 5, np.nan]])):
        ids, weights = ops.route(
            ops.vector(logits.astype(np.float32)), ops.vector(np.zeros(6, np.float32)), 3, True, 1.0
        )
        assert all(len({*row}) == 3 and {*row} <= set(range(6)) for row in ids.tolist())
        assert np.isnan(ops.numpy(weights)[0]).all() == np.isnan(logits[0]).all()
    for found in (
        ops.linear(nan, ops.matrix(np.ones((3, 64), np.float32))),
        ops.expert_mlp(nan, ops.expert(expert(64, 32)), 4.0, 25.0),
        ops.decay(ops.heads(nan, 2), ops.zeros(2), -5.0),
        ops.attn_res([nan, nan], nan[0], nan[0], 1e-5),
    ):
        assert np.isnan(ops.numpy(found)).all()
    cache = filled_cache(ops, 9, 8, 4)
    q = ops.vector(np.full((1, 2, 12), np.nan, np.float32))
    out = ops.latent_attention(q, cache, ops.matrix(np.ones((32, 8), np.float32)), 8, 4, 0.3)
    assert np.isnan(ops.numpy(out)).all()


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1])))
