"""Every operation of the mlx backend against its formula in float64, and what it promises beside the numbers.

The formulas stand here once more, written out with plain NumPy: neither another backend nor MLX is asked.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert, decode
from runtime.errors import UsageError

mx: Any = pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
backend: Any = pytest.importorskip("runtime.ops.mlx")

TOLERANCE = 2e-6
"""Relative to the largest value; float32 keeps 6e-8 and the longest sum here has 4096 terms."""

F64 = np.ndarray[Any, np.dtype[np.float64]]


@pytest.fixture
def ops() -> Any:
    return backend.MlxOps()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


def normal(rng: np.random.Generator, *shape: int) -> F64:
    """Float64 values that float32 holds exactly, so that only the operation itself can differ."""
    return rng.normal(size=shape).astype(np.float32).astype(np.float64)


def array(x: F64) -> Any:
    return mx.array(x.astype(np.float32))


def bf16(x: F64) -> tuple[np.ndarray[Any, Any], F64]:
    """x cut to bf16: the bits as uint16, and the values."""
    bits = x.astype(np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16), (bits << 16).view(np.float32).astype(np.float64)


def packed_matrix(rng: np.random.Generator, out: int, columns: int) -> tuple[Any, Any]:
    codes = rng.integers(0, 256, (out, columns // 2), dtype=np.uint8)
    return codes, rng.integers(121, 125, (out, columns // 32), dtype=np.uint8)


def an_expert(rng: np.random.Generator, latent: int, width: int) -> PackedExpert:
    return PackedExpert(
        *packed_matrix(rng, width, latent), *packed_matrix(rng, latent, width), *packed_matrix(rng, width, latent)
    )


def sigma(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def assert_close(got: Any, wanted: F64, tolerance: float = TOLERANCE) -> None:
    found = np.array(got)
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, f"relative error {error:.2e}"


# -- rows ---------------------------------------------------------------------------------------------------------


def test_float32_products_are_not_rounded_to_tf32() -> None:
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    x = mx.array([[1.0 + 2.0**-20]])
    assert (x @ mx.ones((1, 1))).item() == 1.0 + 2.0**-20


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("tile_bytes", [1, 4 * 96 * 7, 1 << 20])
def test_linear(ops: Any, rng: np.random.Generator, monkeypatch: Any, rows: int, tile_bytes: int) -> None:
    monkeypatch.setattr(backend, "TILE_BYTES", tile_bytes)
    bits, weight = bf16(normal(rng, 40, 96))
    x = normal(rng, rows, 96)
    assert_close(ops.linear(array(x), ops.matrix(bits)), x @ weight.T)


def test_linear_keeps_float32_weights(ops: Any, rng: np.random.Generator) -> None:
    x, weight = normal(rng, 3, 96), normal(rng, 40, 96)
    assert_close(ops.linear(array(x), ops.matrix(weight.astype(np.float32))), x @ weight.T)


def test_linear_never_widens_a_whole_matrix(ops: Any, rng: np.random.Generator, monkeypatch: Any) -> None:
    tile_bytes = 1 << 18
    monkeypatch.setattr(backend, "TILE_BYTES", tile_bytes)
    weight = ops.matrix(bf16(normal(rng, 4096, 1024))[0])
    x = array(normal(rng, 2, 1024))
    mx.eval(weight, x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ops.linear(x, weight))
    assert mx.get_peak_memory() - before <= 6 * tile_bytes < 4 * weight.size


@pytest.mark.parametrize("rows", [1, 40])
def test_an_int8_matrix_is_multiplied_in_one_quantized_call_and_never_widened(
    ops: Any, rng: np.random.Generator, monkeypatch: Any, rows: int
) -> None:
    values = rng.integers(-127, 128, (4096, 1024), dtype=np.int8)
    x = array(normal(rng, rows, 1024))
    weight = ops.int8_matrix(Int8Matrix(values, np.ones(4096, np.float16)))
    calls, multiply = [], mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **k: calls.append(k["bits"]) or multiply(*a, **k))
    mx.eval(*weight[:3], x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ops.linear(x, weight))
    assert calls == [8]
    assert mx.get_peak_memory() - before < 4 * rows * 4096 + 10_000


def test_embed(ops: Any, rng: np.random.Generator) -> None:
    bits, table = bf16(normal(rng, 30, 16))
    ids = np.array([29, 0, 7, 7])
    np.testing.assert_array_equal(np.array(ops.embed(ops.matrix(bits), ids)), table[ids])


def test_vector_of_any_shape(ops: Any, rng: np.random.Generator) -> None:
    bits, values = bf16(normal(rng, 3, 4))
    np.testing.assert_array_equal(np.array(ops.vector(bits)), values)
    np.testing.assert_array_equal(np.array(ops.vector(values.astype(np.float32))), values)


@pytest.mark.parametrize("shape", [(3, 64), (3, 5, 32)])
def test_rms_norm(ops: Any, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x, weight = normal(rng, *shape) * 1e-3, normal(rng, shape[-1])
    wanted = weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    assert_close(ops.rms_norm(array(x), array(weight), 1e-5), wanted)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_attn_res(ops: Any, rng: np.random.Generator, count: int) -> None:
    sources = [normal(rng, 4, 64) * 3.0**j for j in range(count)]
    norm, proj = normal(rng, 64), normal(rng, 1, 64) / 4
    scores = np.stack([(v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * norm * proj).sum(-1) for v in sources])
    shares = np.exp(scores - scores.max(0))
    shares /= shares.sum(0)
    wanted = sum(shares[j][:, None] * sources[j] for j in range(count))
    assert_close(ops.attn_res([array(v) for v in sources], array(norm), array(proj), 1e-5), np.asarray(wanted))


def test_add(ops: Any, rng: np.random.Generator) -> None:
    a, b, row = normal(rng, 3, 8), normal(rng, 3, 8), normal(rng, 8)
    assert_close(ops.add(array(a), array(b)), a + b)
    assert_close(ops.add(array(a), array(row)), a + row)


def test_gate_and_sigmoid(ops: Any, rng: np.random.Generator) -> None:
    x, g = normal(rng, 3, 50), normal(rng, 3, 50) * 10
    assert_close(ops.gate(array(x), array(g)), x * sigma(g))
    assert_close(ops.sigmoid(array(g)), sigma(g))


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(ops: Any, rng: np.random.Generator, linear_beta: float | None) -> None:
    g, u = normal(rng, 3, 50) * 6, normal(rng, 3, 50) * 30
    up = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
    wanted = 4.0 * np.tanh(g / 4.0) * sigma(g) * up
    assert_close(ops.situ(array(g), array(u), 4.0, linear_beta), wanted)


def test_shapes(ops: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 4, 6 * 5)
    index = np.array([3, 1, 1])
    np.testing.assert_array_equal(np.array(ops.heads(array(x), 6)), x.reshape(4, 6, 5))
    np.testing.assert_array_equal(np.array(ops.merge_heads(ops.heads(array(x), 6))), x)
    np.testing.assert_array_equal(np.array(ops.columns(array(x), 7, 11)), x[:, 7:11])
    np.testing.assert_array_equal(np.array(ops.rows(array(x), index)), x[index])
    assert ops.numpy(array(x)).dtype == np.float32


# -- KDA ----------------------------------------------------------------------------------------------------------


def test_short_conv(ops: Any, rng: np.random.Generator) -> None:
    u, weight = normal(rng, 7, 20), normal(rng, 20, 4)
    history = normal(rng, 3, 20)
    seen = np.concatenate([history, u])
    z = np.stack([sum(weight[:, j] * seen[t + j] for j in range(4)) for t in range(7)])
    out, kept = ops.short_conv(array(u), array(weight), array(history))
    assert_close(out, z * sigma(z))
    np.testing.assert_array_equal(np.array(kept), u[-3:])


def test_short_conv_history_of_a_single_token(ops: Any, rng: np.random.Generator) -> None:
    u, history = normal(rng, 1, 20), normal(rng, 3, 20)
    _, kept = ops.short_conv(array(u), array(normal(rng, 20, 4)), array(history))
    np.testing.assert_array_equal(np.array(kept), np.concatenate([history[1:], u]))


def test_short_conv_history_does_not_hold_the_chunk(ops: Any) -> None:
    weight, history = mx.ones((1000, 4)), ops.zeros(3, 1000)
    before = mx.get_active_memory()
    out, kept = ops.short_conv(mx.ones((500, 1000)), weight, history)
    mx.eval(out, kept)
    del out
    mx.synchronize()
    assert mx.get_active_memory() - before < 100_000


def test_l2_norm(ops: Any, rng: np.random.Generator) -> None:
    x = normal(rng, 3, 4, 32) * 1e-3  # small, so that the epsilon shows
    wanted = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) * 0.25
    assert_close(ops.l2_norm(array(x), 0.25), wanted)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_decay(ops: Any, rng: np.random.Generator, lower_bound: float | None) -> None:
    u, a_log = normal(rng, 5, 3, 16) * 3, normal(rng, 3)
    rate = np.exp(a_log)[:, None]
    g = -rate * np.log1p(np.exp(u)) if lower_bound is None else lower_bound * sigma(rate * u)
    assert_close(ops.decay(array(u), array(a_log), lower_bound), np.exp(g))


def delta_rule_by_hand(q: F64, k: F64, v: F64, alpha: F64, beta: F64, s: F64) -> tuple[F64, F64]:
    s, out = s.copy(), np.empty_like(v)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            s[h] = np.diag(alpha[t, h]) @ s[h]
            s[h] += np.outer(k[t, h], beta[t, h] * (v[t, h] - s[h].T @ k[t, h]))
            out[t, h] = s[h].T @ q[t, h]
    return out, s


@pytest.mark.parametrize("tokens", [1, 70])
def test_delta_rule(ops: Any, rng: np.random.Generator, tokens: int) -> None:
    shape = (tokens, 3, 16)
    q, k, v, state = normal(rng, *shape) / 4, normal(rng, *shape) / 4, normal(rng, *shape), normal(rng, 3, 16, 16)
    alpha, beta = rng.random(shape).astype(np.float32), rng.random(shape[:2]).astype(np.float32)
    before = array(state)
    out, after = ops.delta_rule(array(q), array(k), array(v), mx.array(alpha), mx.array(beta), before)
    wanted_out, wanted_state = delta_rule_by_hand(q, k, v, alpha.astype(np.float64), beta.astype(np.float64), state)
    assert_close(out, wanted_out)
    assert_close(after, wanted_state)
    np.testing.assert_array_equal(np.array(before), state)


def test_delta_rule_needs_no_more_memory_for_a_longer_prefill(ops: Any) -> None:
    n, d = 2, 64

    def peak(tokens: int) -> int:
        x, beta, state = mx.full((tokens, n, d), 0.1), mx.full((tokens, n), 0.5), ops.zeros(n, d, d)
        mx.eval(x, beta, state)
        mx.reset_peak_memory()
        before = int(mx.get_active_memory())
        out, _ = ops.delta_rule(x, x, x, x, beta, state)
        mx.eval(out)
        return int(mx.get_peak_memory()) - before - 2 * int(out.nbytes)

    state_bytes = n * d * d * 4
    assert peak(1024) - peak(128) < 20 * state_bytes


# -- MLA ----------------------------------------------------------------------------------------------------------

RANK, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 20, 3


def attention_by_hand(q: F64, latent: F64, key: F64, kv_b: F64, scale: float) -> F64:
    """The expanded form: keys and values per head, spelled out. The rows of q are the last positions."""
    per_head = kv_b.reshape(HEADS, NOPE + VALUE, RANK)
    out = np.empty((len(q), HEADS, VALUE))
    for t in range(len(q)):
        seen = len(latent) - len(q) + t + 1
        for h in range(HEADS):
            keys, values = latent[:seen] @ per_head[h, :NOPE].T, latent[:seen] @ per_head[h, NOPE:].T
            scores = (keys @ q[t, h, :NOPE] + key[:seen] @ q[t, h, NOPE:]) * scale
            shares = np.exp(scores - scores.max())
            out[t, h] = shares @ values / shares.sum()
    return out


@pytest.mark.parametrize("tile_bytes", [1, 4 * 2 * RANK * (NOPE + VALUE), 1 << 20])
@pytest.mark.parametrize("tokens", [1, 6])
def test_latent_attention(ops: Any, rng: np.random.Generator, monkeypatch: Any, tile_bytes: int, tokens: int) -> None:
    monkeypatch.setattr(backend, "TILE_BYTES", tile_bytes)
    past = 5
    latent, key = normal(rng, past + tokens, RANK), normal(rng, past + tokens, ROPE)
    q = normal(rng, tokens, HEADS, NOPE + ROPE)
    bits, kv_b = bf16(normal(rng, HEADS * (NOPE + VALUE), RANK) / 4)
    cache = ops.latent_cache(100, RANK, ROPE)
    cache.length = cache.append(array(latent[:past]), array(key[:past]))
    assert cache.append(array(latent[past:]), array(key[past:])) == past + tokens
    got = ops.latent_attention(array(q), cache, ops.matrix(bits), RANK, ROPE, 0.2)
    assert cache.length == past
    assert_close(got, attention_by_hand(q, latent, key, kv_b, 0.2))


def test_attention_over_a_long_past_stays_in_its_tiles(ops: Any, rng: np.random.Generator, monkeypatch: Any) -> None:
    """Scores of all heads would be six tiles, a copy of the latents without the keys four."""
    tile_bytes, past, heads = 1 << 18, 32_768, 12
    monkeypatch.setattr(backend, "TILE_BYTES", tile_bytes)
    cache = ops.latent_cache(past + 1, 8, 4)
    cache.length = cache.append(array(normal(rng, past, 8)), array(normal(rng, past, 4)))
    cache.append(array(normal(rng, 1, 8)), array(normal(rng, 1, 4)))
    q, kv_b = array(normal(rng, 1, heads, 12)), ops.matrix(bf16(normal(rng, heads * 16, 8))[0])
    mx.eval(q, kv_b, cache.rows)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ops.latent_attention(q, cache, kv_b, 8, 4, 0.3))
    assert mx.get_peak_memory() - before <= 5 * tile_bytes


def test_latent_cache_forgets_a_pass_that_failed(ops: Any, rng: np.random.Generator) -> None:
    latent, key = normal(rng, 9, RANK), normal(rng, 9, ROPE)
    rubbish = array(normal(rng, 7, RANK)), array(normal(rng, 7, ROPE))
    cache = ops.latent_cache(100, RANK, ROPE)
    cache.length = cache.append(array(latent[:5]), array(key[:5]))
    cache.append(*rubbish)  # written behind `length`, then given up
    cache.append(array(latent[5:]), array(key[5:]))
    np.testing.assert_array_equal(np.array(cache.rows[:9]), np.concatenate([latent, key], axis=1))


def test_latent_cache_grows_to_its_capacity_and_no_further(ops: Any, rng: np.random.Generator) -> None:
    positions = 3 * backend.FIRST_ROWS
    latent, key = normal(rng, positions + 1, 4), normal(rng, positions + 1, 2)
    cache = ops.latent_cache(positions, 4, 2)
    for start in range(0, positions, 100):
        stop = min(start + 100, positions)
        cache.length = cache.append(array(latent[start:stop]), array(key[start:stop]))
    assert cache.rows.shape == (positions, 6)
    np.testing.assert_array_equal(np.array(cache.rows), np.concatenate([latent, key], axis=1)[:positions])
    with pytest.raises(UsageError, match=f"{positions + 1} positions wanted, the context holds {positions}"):
        cache.append(array(latent[-1:]), array(key[-1:]))


# -- LatentMoE ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_expert_mlp(ops: Any, rng: np.random.Generator, rows: int, linear_beta: float | None) -> None:
    latent, width = 64, 96
    packed = an_expert(rng, latent, width)
    w1, w2, w3 = (decode(packed[i], packed[i + 1]) for i in (0, 2, 4))
    z = normal(rng, rows, latent)
    g, u = z @ w1.T, z @ w3.T
    up = u if linear_beta is None else linear_beta * np.tanh(u / linear_beta)
    wanted = (4.0 * np.tanh(g / 4.0) * sigma(g) * up) @ w2.T
    assert_close(ops.expert_mlp(array(z), ops.expert(packed), 4.0, linear_beta), wanted)


def lent(packed: PackedExpert, start: int) -> tuple[memoryview, PackedExpert]:
    """(memory of MLX's own, the expert's bytes in it, from `start` on)."""
    read = b"".join(part.tobytes() for part in packed)
    memory = backend.MlxOps.memory(start + len(read) + 100)
    memory[start : start + len(read)] = read
    data, ends = np.frombuffer(memory[start:], np.uint8), np.cumsum([part.size for part in packed])
    parts = zip(packed, ends.tolist(), strict=True)
    return memory, PackedExpert(*(data[end - part.size : end].reshape(part.shape) for part, end in parts))


def place(part: Any) -> int:
    """The address of an array's first byte."""
    return int(np.asarray(memoryview(part)).ctypes.data)


@pytest.mark.parametrize(("start", "alignment", "moved"), [(0, 4, 0), (4088, 4, 0), (4089, 4, 1), (4088, 16, 8)])
def test_an_expert_is_used_where_it_was_read_to(
    ops: Any, rng: np.random.Generator, monkeypatch: Any, start: int, alignment: int, moved: int
) -> None:
    monkeypatch.setattr(backend, "CODES_ALIGNMENT", alignment)
    packed, z = an_expert(rng, 64, 96), array(normal(rng, 5, 64))
    wanted = np.array(ops.expert_mlp(z, ops.expert(packed), 4.0, 25.0))
    memory, borrowed = lent(packed, start)
    places = [part.ctypes.data - moved for part in borrowed]
    expert = ops.expert(borrowed)
    assert [place(part) for part in expert[1:]] == places
    assert (places[0] - place(memory)) % alignment == 0
    np.testing.assert_array_equal(np.array(ops.expert_mlp(z, expert, 4.0, 25.0)), wanted)


def test_neither_taking_an_expert_nor_computing_with_it_copies_its_bytes(ops: Any, rng: np.random.Generator) -> None:
    z = array(normal(rng, 1, 256))
    memory, borrowed = lent(an_expert(rng, 256, 4096), 4096)
    mx.eval(z)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ops.expert_mlp(z, ops.expert(borrowed), 4.0, 25.0))
    assert mx.get_peak_memory() - before < borrowed.w2_packed.nbytes < memory.nbytes // 3


def test_the_bytes_of_an_expert_may_change_once_it_is_finished(ops: Any, rng: np.random.Generator) -> None:
    packed, z = an_expert(rng, 256, 2048), array(normal(rng, 64, 256))
    wanted = np.array(ops.expert_mlp(z, ops.expert(packed), 4.0, 25.0))
    memory, borrowed = lent(packed, 0)
    expert = ops.expert(borrowed)
    output = ops.expert_mlp(z, expert, 4.0, 25.0)  # takes milliseconds
    assert ops.busy(expert)
    ops.finish([expert])
    assert not ops.busy(expert)
    memory[:] = bytes(memory.nbytes)
    np.testing.assert_array_equal(np.array(output), wanted)
    ops.finish([expert])  # nothing is left to wait for


def test_outputs_are_kept_for_no_longer_than_something_is_under_way(ops: Any, rng: np.random.Generator) -> None:
    memory, borrowed = lent(an_expert(rng, 64, 96), 0)
    expert, z = ops.expert(borrowed), array(normal(rng, 400, 64))
    before = mx.get_active_memory()
    ops.expert_mlp(z, expert, 4.0, 25.0)
    ops.route(mx.zeros((1, 8)), mx.zeros(8), 2, True, 1.0)
    assert mx.get_active_memory() - before < 400 * 64 * 4
    assert memory.nbytes


@pytest.mark.parametrize("scale_byte", [0, 1, 2, 127, 252, 253, 254])
def test_every_scale_byte_means_what_the_format_says(rng: np.random.Generator, scale_byte: int) -> None:
    codes, _ = packed_matrix(rng, 8, 64)
    scales = np.full((8, 2), scale_byte, np.uint8)
    x = normal(rng, 3, 64) * 2.0 ** np.clip(127 - scale_byte, -100, 100)
    wanted = x @ decode(codes, scales).T
    got = backend._packed_linear(array(x), mx.array(codes).view(mx.uint32), mx.array(scales))
    gpu_flushes = scale_byte == 0 and mx.default_device() == mx.Device(mx.gpu)
    assert_close(got, wanted, 1.0 if gpu_flushes else TOLERANCE)


@pytest.mark.parametrize(("k", "renormalize", "scaling"), [(4, True, 2.5), (4, False, 1.0), (1, True, 1.0)])
def test_route(ops: Any, rng: np.random.Generator, k: int, renormalize: bool, scaling: float) -> None:
    logits, bias = normal(rng, 6, 20), normal(rng, 20) / 4
    scores = sigma(logits)
    wanted_ids = np.argsort(-(scores + bias), axis=1)[:, :k]
    wanted = np.take_along_axis(scores, wanted_ids, 1)
    if renormalize and k > 1:
        wanted = wanted / wanted.sum(1, keepdims=True)
    ids, weights = ops.route(array(logits), array(bias), k, renormalize, scaling)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, wanted_ids)
    assert_close(weights, wanted * scaling)


def test_route_gives_ties_to_the_lowest_id(ops: Any) -> None:
    logits = np.full((1, 300), 40.0)  # saturated: every score is exactly 1
    logits[0, 7] = -40.0
    ids, _ = ops.route(array(logits), mx.zeros(300), 16, True, 1.0)
    assert ids.tolist() == [[e for e in range(17) if e != 7]]


def test_combine_has_one_order_whatever_landed_first(ops: Any, rng: np.random.Generator) -> None:
    tokens, k, width = 7, 3, 32
    ids = np.stack([rng.permutation(6)[:k] for _ in range(tokens)])
    weights = rng.random((tokens, k)).astype(np.float32)
    rows = {int(e): normal(rng, int((ids == e).sum()), width) for e in np.unique(ids)}
    wanted = np.zeros((tokens, width))
    for t in range(tokens):
        for j in range(k):
            earlier = int((ids[:t] == ids[t, j]).any(1).sum())
            wanted[t] += weights[t, j] * rows[int(ids[t, j])][earlier]
    first = np.array(ops.combine({e: array(rows[e]) for e in sorted(rows)}, ids, mx.array(weights)))
    last = np.array(ops.combine({e: array(rows[e]) for e in sorted(rows, reverse=True)}, ids, mx.array(weights)))
    assert_close(first, wanted)
    np.testing.assert_array_equal(first, last)


# -- threads ------------------------------------------------------------------------------------------------------


def test_state_made_on_one_thread_serves_another(ops: Any, rng: np.random.Generator) -> None:
    u, weight = normal(rng, 5, 8), normal(rng, 8, 4)
    made: dict[str, Any] = {}

    def work() -> None:
        x, s = mx.full((5, 2, 4), 0.1), ops.zeros(2, 4, 4)
        _, made["history"] = ops.short_conv(array(u), ops.vector(weight.astype(np.float32)), ops.zeros(3, 8))
        _, made["s"] = ops.delta_rule(x, x, x, x, mx.full((5, 2), 0.5), s)
        made["cache"] = ops.latent_cache(10, 8, 4)
        made["cache"].append(mx.ones((5, 8)), mx.ones((5, 4)))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    np.testing.assert_array_equal(np.array(made["history"] + 0), u[-3:])
    assert np.isfinite(np.array(made["s"] * 2)).all()
    assert np.array(made["cache"].rows[:5].sum()) == 60
