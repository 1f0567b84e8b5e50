"""The `cpu` backend: every operation against its formula in float64, and the same bits for rows, threads and CPUs.

Run as a program this file prints one digest of all operations, which the last test compares between CPU types.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.checkpoint.int8 import Int8Matrix, quantize
from runtime.checkpoint.mxfp4 import PackedExpert, decode
from runtime.commands import loading
from runtime.errors import CheckpointError, UsageError
from runtime.generate import Engine
from runtime.ops import cpu
from runtime.ops.cpu import CpuOps
from runtime.ops.kernels import elementary, jit
from runtime.ops.kernels.lanes import address, load, store

ROUNDING = 1e-6
"""Allowed error of a result relative to its largest value: some ten units in the last place."""

BETA, LINEAR_BETA = 4.0, 25.0


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps()


def floats(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def bf16(seed: int, *shape: int, scale: float = 1.0) -> Any:
    return (floats(seed, *shape, scale=scale).view(np.uint32) >> 16).astype(np.uint16)


def int8(seed: int, *shape: int) -> Int8Matrix:
    made = Int8Matrix(np.empty(shape, np.int8), np.empty(shape[0], np.float16))
    quantize(bf16(seed, *shape), made, "made up")
    return made


def widen(weight: Any) -> Any:
    return (weight.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def packed_expert(seed: int, latent: int, inter: int, low: int = 114, high: int = 124) -> PackedExpert:
    """Random codes, scale bytes low to high − 1."""
    rng = np.random.default_rng(seed)

    def part(n: int, columns: int) -> tuple[Any, Any]:
        codes = rng.integers(0, 256, (n, columns // 2), np.uint8)
        return codes, rng.integers(low, high, (n, columns // 32), np.uint8)

    (w1, s1), (w3, s3), (w2, s2) = part(inter, latent), part(inter, latent), part(latent, inter)
    return PackedExpert(w1, s1, w2, s2, w3, s3)


def close(found: Any, wanted: Any, error: float = ROUNDING) -> None:
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= error * np.abs(wanted).max()


# -- formulas in float64 ---------------------------------------------------------------------------------------------


def sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)


def softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def situ(g: Any, u: Any, linear: float | None = LINEAR_BETA) -> Any:
    return BETA * np.tanh(g / BETA) * sigmoid(g) * (linear * np.tanh(u / linear) if linear else u)


def expert_formula(z: Any, p: PackedExpert) -> Any:
    z = z.astype(np.float64)
    hidden = situ(z @ decode(p.w1_packed, p.w1_scale).T, z @ decode(p.w3_packed, p.w3_scale).T)
    return hidden @ decode(p.w2_packed, p.w2_scale).T


def delta_formula(q: Any, k: Any, v: Any, alpha: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    q, k, v, state = (a.astype(np.float64) for a in (q, k, v, state))
    out = np.empty_like(v)
    for t in range(len(q)):
        state = state * alpha[t][:, :, None]
        u = np.einsum("hdc,hd->hc", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - u))[:, None, :]
        out[t] = np.einsum("hdc,hd->hc", state, q[t])
    return out, state


def attention_formula(q: Any, latent: Any, key: Any, kv_b: Any, scale: float) -> Any:
    """The expanded form. latent and key hold all positions, the last len(q) of them are the rows of q."""
    tokens, heads, width = q.shape
    nope = width - key.shape[1]
    weights = kv_b.reshape(heads, -1, latent.shape[1])
    q, latent, key = (a.astype(np.float64) for a in (q, latent, key))
    out = np.empty((tokens, heads, weights.shape[1] - nope))
    for t in range(tokens):
        seen = len(latent) - tokens + t + 1
        keys, values = np.split(np.einsum("pr,hdr->hpd", latent[:seen], weights), [nope], axis=2)
        scores = (np.einsum("hd,hpd->hp", q[t, :, :nope], keys) + q[t, :, nope:] @ key[:seen].T) * scale
        e = np.exp(scores - scores.max(1, keepdims=True))
        out[t] = np.einsum("hp,hpd->hd", e / e.sum(1, keepdims=True), values)
    return out


# -- elementary functions --------------------------------------------------------------------------------------------


def over_all(function: Any) -> Any:
    @numba.njit(error_model="numpy")
    def run(x: Any, out: Any) -> None:
        for i in range(0, x.size, 16):
            n = x.size - i
            store(address(out) + 4 * i, n, function(load(address(x) + 4 * i, n)))

    def apply(x: Any) -> Any:
        out = np.empty_like(x)
        run(x, out)
        return out

    return apply


def floats_of_all_sizes(step: int) -> Iterator[Any]:
    """Every `step`th of the 2³² bit patterns that is a finite float."""
    for first in range(0, 1 << 32, step << 20):
        bits = np.arange(first, min(first + (step << 20), 1 << 32), step, dtype=np.uint64)
        x = bits.astype(np.uint32).view(np.float32)
        yield x[np.isfinite(x)]


@pytest.mark.parametrize(
    ("name", "formula", "bound", "at_limits"),
    [
        ("exp", np.exp, 0.81, [0, 1, 1, np.inf]),
        ("sigmoid", sigmoid, 1.6, [0, 0.5, 0.5, 1]),
        ("tanh", np.tanh, 1.4, [-1, -0.0, 0, 1]),
        ("softplus", softplus, 1.75, [0, np.log(2), np.log(2), np.inf]),
    ],
)
def test_elementary_functions_are_right_over_the_whole_range(
    name: str, formula: Callable[[Any], Any], bound: float, at_limits: list[float]
) -> None:
    function = over_all(getattr(elementary, name))
    worst = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for x in floats_of_all_sizes(2053):
            found, wanted = function(x), formula(x.astype(np.float64))
            nearest = wanted.astype(np.float32)
            finite = np.isfinite(nearest)
            assert (found[~finite] == nearest[~finite]).all()
            unit = np.spacing(np.abs(nearest[finite])).astype(np.float64)
            worst = max(worst, float((np.abs(found[finite] - wanted[finite]) / unit).max(initial=0)))
    assert worst <= bound, f"{name}: {worst} units in the last place"
    limits = function(np.array([-np.inf, -0.0, 0.0, np.inf], np.float32))
    assert limits.tobytes() == np.array(at_limits, np.float32).tobytes()
    assert np.isnan(function(np.array([np.nan, -np.nan], np.float32))).all()


# -- matrices ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that can be divided between threads is, however little work it is."""
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)


@pytest.mark.usefixtures("divided")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(1, 60),
    columns=st.integers(1, 140),
    n_rows=st.integers(1, 19),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_linear_is_right_and_row_invariant_for_any_shape(
    count: int, columns: int, n_rows: int, threads: int, seed: int
) -> None:
    ops = CpuOps(threads)
    x, weight = floats(seed, n_rows, columns), bf16(seed + 1, count, columns)
    matrix = ops.matrix(weight)
    found = ops.linear(x, matrix)
    size = np.abs(x).astype(np.float64) @ np.abs(widen(weight)).T
    assert (np.abs(found - x.astype(np.float64) @ widen(weight).T) <= 3e-7 * size).all()
    for r in range(n_rows):
        assert ops.linear(x[r : r + 1], matrix).tobytes() == found[r].tobytes()
    as_float32 = ops.matrix(widen(weight).astype(np.float32))
    assert ops.linear(x, as_float32).tobytes() == found.tobytes()


@pytest.mark.parametrize(("count", "columns", "n_rows"), [(61, 905, 71), (13, 40_000, 27)])
def test_no_row_changes_where_columns_and_rows_are_taken_in_parts(
    ops: CpuOps, count: int, columns: int, n_rows: int
) -> None:
    """More of both than are taken at once, and some left over."""
    x = floats(0, n_rows, columns)
    expected = x.astype(np.float64) @ widen(bf16(1, count, columns)).T
    close(ops.linear(x, ops.matrix(bf16(1, count, columns))), expected)
    for matrix in (ops.matrix(bf16(1, count, columns)), ops.int8_matrix(int8(1, count, columns))):
        found = ops.linear(x, matrix)
        for r in (0, 15, 16, n_rows - 8, n_rows - 7, n_rows - 2, n_rows - 1):
            assert ops.linear(x[r : r + 1], matrix).tobytes() == found[r].tobytes()


def test_matrices_may_lie_anywhere_and_read_only(ops: CpuOps) -> None:
    weight, x = bf16(0, 9, 50), floats(1, 3, 50)
    raw = np.empty(weight.nbytes + 1, np.uint8)
    raw[1:] = weight.reshape(-1).view(np.uint8)
    raw.flags.writeable = False
    misplaced = np.ndarray(weight.shape, np.uint16, raw, offset=1)
    assert not misplaced.flags.aligned
    matrix = ops.matrix(misplaced)
    assert ops.linear(x, matrix).tobytes() == ops.linear(x, ops.matrix(weight)).tobytes()
    assert np.array_equal(ops.vector(misplaced), widen(weight))


def test_matrix_takes_bf16_where_it_lies(ops: CpuOps) -> None:
    weight = bf16(0, 8, 64)
    assert ops.matrix(weight).array is weight


def test_embed_widens_rows_exactly(ops: CpuOps) -> None:
    table = bf16(0, 11, 24)
    found = ops.embed(ops.matrix(table), np.array([10, 0, 10]))
    assert np.array_equal(found, widen(table)[[10, 0, 10]])
    assert found.dtype == np.float32


def test_linear_refuses_rows_of_another_width(ops: CpuOps) -> None:
    with pytest.raises(ValueError, match="5 channels into a matrix of 6 columns"):
        ops.linear(floats(0, 1, 5), ops.matrix(bf16(0, 3, 6)))


# -- MXFP4 -------------------------------------------------------------------------------------------------------------


def every_code_and_scale() -> PackedExpert:
    """w1 and w3 with every code in every column parity beside every scale byte 0 to 254; w2 the same, turned."""
    scales = np.minimum(np.arange(512) // 2, 254).astype(np.uint8)[:, None]  # one group a row
    codes = np.empty((512, 16), np.uint8)
    codes[0::2] = np.arange(16) * 16 + (np.arange(16) * 7) % 16
    codes[1::2] = (np.arange(16) * 11) % 16 * 16 + np.arange(16)
    w2 = np.random.default_rng(0).integers(0, 256, (32, 256), np.uint8)
    w2_scale = np.resize(np.arange(120, 130, dtype=np.uint8), (32, 16))
    return PackedExpert(codes, scales, w2, w2_scale, codes[::-1].copy(), scales[::-1].copy())


def linear_mxfp4(x: Any, codes: Any, scales: Any, edge: bool) -> Any:
    """The kernel of an expert's matrices by itself: an expert would squash the values."""
    out = np.empty((len(x), len(codes)), np.float32)
    for part in np.split(np.arange(len(x)), len(x) if edge else 1):
        rows = slice(part[0], part[-1] + 1)
        places = codes.ctypes.data, scales.ctypes.data
        cpu.matrices.linear_mxfp4(cpu._panels(x[rows]), *places, edge, out[rows], 0, len(codes))
    return out


@pytest.mark.parametrize("n_rows", [1, 2, 8, 33])
def test_every_code_at_every_scale_is_the_decoded_value(ops: CpuOps, n_rows: int) -> None:
    """One column at a time is 2⁻³, so a dot product is one weight, which must come out exactly."""
    packed = every_code_and_scale()
    regular = ((packed.w1_scale >= 2) & (packed.w1_scale <= 252))[:, 0]
    for chosen, edge in ((regular, False), (np.full(512, True), True)):
        codes, scales = packed.w1_packed[chosen].copy(), packed.w1_scale[chosen].copy()
        x = np.zeros((n_rows * -(-32 // n_rows), 32), np.float32)
        x[range(32), range(32)] = 2.0**-3  # 6 · 2¹²⁷ itself is no float32
        found = np.concatenate([linear_mxfp4(part, codes, scales, edge) for part in x.reshape(-1, n_rows, 32)])
        wanted = decode(codes, scales).T * 2.0**-3
        assert np.array_equal(found[:32], wanted.astype(np.float32))


@pytest.mark.parametrize("n_rows", [1, 2, 3, 8, 33])
@pytest.mark.parametrize(("low", "high"), [(114, 124), (0, 130)])
def test_expert_mlp(ops: CpuOps, n_rows: int, low: int, high: int) -> None:
    packed, z = packed_expert(5, 96, 160, low, high), floats(6, n_rows, 96, scale=0.1)
    expert = ops.expert(packed)
    assert expert.edge == (low == 0)
    found = ops.expert_mlp(z, expert, BETA, LINEAR_BETA)
    close(found, expert_formula(z, packed))
    for r in range(n_rows):
        assert ops.expert_mlp(z[r : r + 1], expert, BETA, LINEAR_BETA).tobytes() == found[r].tobytes()


def test_the_exact_path_has_the_bits_of_the_quick_one(ops: CpuOps) -> None:
    packed, z = packed_expert(7, 64, 96, 2, 253), floats(8, 3, 64, scale=1e-30)
    quick = ops.expert(packed)
    exact = cpu.Expert(quick.packed, quick.places, edge=True)
    assert not quick.edge
    with np.errstate(all="ignore"):
        found = [ops.expert_mlp(z, e, BETA, LINEAR_BETA) for e in (quick, exact)]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("byte", [0, 1, 253, 254])
@pytest.mark.parametrize("part", ["w1_scale", "w2_scale", "w3_scale"])
def test_one_edge_scale_anywhere_is_noticed(ops: CpuOps, part: str, byte: int) -> None:
    packed = packed_expert(9, 160, 96)
    assert not ops.expert(packed).edge
    for place in (0, 63, 64, -1):
        scale = getattr(packed, part).copy()
        scale.reshape(-1)[place] = byte
        assert ops.expert(packed._replace(**{part: scale})).edge


def test_scale_nan_is_refused(ops: CpuOps) -> None:
    packed = packed_expert(9, 64, 32)
    packed.w3_scale[3, 1] = 255
    with pytest.raises(CheckpointError, match=r"w3.weight_scale: scale byte 255 \(NaN\) at row 3, group 1"):
        ops.expert(packed)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [5, 24, 192, 97])
def test_norms_and_gates(ops: CpuOps, width: int) -> None:
    x, w, g = floats(0, 4, width), floats(1, width), floats(2, 4, width, scale=4)
    wide, gd = x.astype(np.float64), g.astype(np.float64)
    close(ops.rms_norm(x, w, 1e-5), w * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5))
    close(ops.l2_norm(x[None], 0.25), (wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6) * 0.25)[None])
    close(ops.gate(x, g), wide * sigmoid(gd))
    close(ops.sigmoid(g), sigmoid(gd))
    close(ops.situ(g, x, BETA, LINEAR_BETA), situ(gd, wide))
    close(ops.situ(g, x, BETA, None), situ(gd, wide, None))
    assert np.array_equal(ops.add(x, g), x + g)


@pytest.mark.parametrize("width", [7, 128])
@pytest.mark.parametrize("n_sources", [1, 2, 9])
def test_attn_res(ops: CpuOps, n_sources: int, width: int) -> None:
    sources = [floats(10 + j, 3, width, scale=1.0 + j) for j in range(n_sources)]
    norm, proj = floats(1, width), floats(2, 1, width, scale=width**-0.5)
    v = np.stack(sources).astype(np.float64)
    scores = (v / np.sqrt((v**2).mean(-1, keepdims=True) + 1e-5) * norm * proj[0]).sum(-1)
    a = np.exp(scores - scores.max(0))
    close(ops.attn_res(sources, norm, proj, 1e-5), ((a / a.sum(0))[..., None] * v).sum(0))


def test_shapes_are_views_of_the_same_numbers(ops: CpuOps) -> None:
    x = floats(0, 3, 24)
    heads = ops.heads(x, 4)
    assert heads.shape == (3, 4, 6)
    assert np.array_equal(ops.merge_heads(heads), x)
    assert np.array_equal(ops.columns(x, 5, 9), x[:, 5:9])
    assert np.array_equal(ops.rows(x, np.array([2, 2, 0])), x[[2, 2, 0]])
    assert np.array_equal(ops.zeros(2, 3), np.zeros((2, 3)))
    assert ops.numpy(x) is x


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("taps", [1, 4])
def test_short_conv(ops: CpuOps, tokens: int, taps: int) -> None:
    u, w, history = floats(0, tokens, 37), floats(1, 37, taps), floats(2, taps - 1, 37)
    both = np.concatenate([history, u]).astype(np.float64)
    z = sum(both[j : j + tokens] * w[:, j] for j in range(taps))
    found, new_history = ops.short_conv(u, w, history)
    close(found, z * sigmoid(z))
    assert np.array_equal(new_history, both[tokens:].astype(np.float32))


# -- KDA and MLA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 40, 128])
def test_decay(ops: CpuOps, width: int) -> None:
    u, a_log = floats(0, 3, 2, width, scale=4), floats(1, 2)
    rate, wide = np.exp(a_log.astype(np.float64))[:, None], u.astype(np.float64)
    close(ops.decay(u, a_log, -5.0), np.exp(-5 * sigmoid(rate * wide)))
    close(ops.decay(u, a_log, None), np.exp(-rate * softplus(wide)))


def delta_inputs(tokens: int, heads: int, width: int) -> tuple[Any, ...]:
    q, k, v = (floats(seed, tokens, heads, width) for seed in range(3))
    alpha = sigmoid(floats(3, tokens, heads, width) + 2).astype(np.float32)
    beta = sigmoid(floats(4, tokens, heads)).astype(np.float32)
    k = (k / np.sqrt((k**2).sum(-1, keepdims=True))).astype(np.float32)
    return q, k, v, alpha, beta, floats(5, heads, width, width)


@pytest.mark.parametrize("width", [8, 24, 128])
def test_delta_rule_leaves_its_arguments_alone(ops: CpuOps, width: int) -> None:
    inputs = delta_inputs(6, 3, width)
    before = [a.copy() for a in inputs]
    found, state = ops.delta_rule(*inputs)
    wanted, wanted_state = delta_formula(*inputs)
    close(found, wanted)
    close(state, wanted_state)
    assert all(np.array_equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_delta_rule_token_by_token_has_the_bits_of_one_call(ops: CpuOps) -> None:
    *rows, state = delta_inputs(5, 2, 40)
    found, last = ops.delta_rule(*rows, state)
    for t in range(5):
        out, state = ops.delta_rule(*(a[t : t + 1] for a in rows), state)
        assert out.tobytes() == found[t].tobytes()
    assert state.tobytes() == last.tobytes()


SHAPES = [(8, 4, 8, 8, 1, 0), (32, 16, 32, 32, 6, 3), (512, 64, 128, 128, 9, 150), (48, 5, 7, 9, 5, 70)]


@pytest.mark.parametrize(("rank", "rope", "nope", "n_v", "heads", "past"), SHAPES)
def test_latent_attention(ops: CpuOps, rank: int, rope: int, nope: int, n_v: int, heads: int, past: int) -> None:
    tokens = 5
    latent, key = floats(0, past + tokens, rank), floats(1, past + tokens, rope)
    q, weight = floats(2, tokens, heads, nope + rope), bf16(3, heads * (nope + n_v), rank, scale=rank**-0.5)
    scale = (nope + rope) ** -0.5
    cache = ops.latent_cache(past + tokens, rank, rope)
    if past:
        cache.length = cache.append(latent[:past], key[:past])
    assert cache.append(latent[past:], key[past:]) == past + tokens
    found = ops.latent_attention(q, cache, ops.matrix(weight), rank, rope, scale)
    close(found, attention_formula(q, latent, key, widen(weight), scale))
    as_float32 = ops.matrix(widen(weight).astype(np.float32))
    assert ops.latent_attention(q, cache, as_float32, rank, rope, scale).tobytes() == found.tobytes()

    steps = ops.latent_cache(past + tokens, rank, rope)
    for t in range(-past, tokens):
        end = steps.append(latent[past + t][None], key[past + t][None])
        if t >= 0:
            row = ops.latent_attention(q[t : t + 1], steps, ops.matrix(weight), rank, rope, scale)
            assert row.tobytes() == found[t].tobytes()
        steps.length = end


def test_attention_over_a_long_past(ops: CpuOps) -> None:
    """With a long past the heads go in groups, which must not change the bits; the error must not grow with it."""
    past, heads = 300_000, 9
    latent, key = floats(0, past + 1, 8), floats(1, past + 1, 4)
    cache = ops.latent_cache(past + 1, 8, 4)
    cache.length = cache.append(latent[:past], key[:past])
    cache.append(latent[past:], key[past:])
    q, weight = floats(2, 1, heads, 12), bf16(3, heads * 16, 8)
    found = ops.latent_attention(q, cache, ops.matrix(weight), 8, 4, 0.3)
    close(found, attention_formula(q, latent, key, widen(weight), 0.3))
    for h in (0, 8):
        alone, qh = ops.matrix(weight[16 * h : 16 * h + 16]), q[:, h : h + 1].copy()
        assert ops.latent_attention(qh, cache, alone, 8, 4, 0.3).tobytes() == found[0, h].tobytes()


def test_a_cache_grows_as_it_fills_and_ends_at_its_capacity(ops: CpuOps) -> None:
    cache = ops.latent_cache(1 << 20, 512, 64)
    assert cache.entries.nbytes == 0
    cache.length = cache.append(floats(0, 3, 512), floats(1, 3, 64))
    assert cache.entries.nbytes < 1 << 20
    first = cache.entries[:3].copy()
    cache.append(floats(2, 200, 512), floats(3, 200, 64))
    assert np.array_equal(cache.entries[:3], first)
    small = ops.latent_cache(4, 8, 8)
    assert small.append(floats(0, 4, 8), floats(0, 4, 8)) == 4
    assert small.length == 0
    with pytest.raises(UsageError, match="5 positions wanted, the context holds 4"):
        small.append(floats(0, 5, 8), floats(0, 5, 8))


# -- routing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("renormalize", "k"), [(True, 6), (False, 6), (True, 1), (True, 37)])
def test_route(ops: CpuOps, renormalize: bool, k: int) -> None:
    logits, bias = floats(0, 5, 37), floats(1, 37, scale=0.1)
    ids, weights = ops.route(logits, bias, k, renormalize, 2.5)
    s = sigmoid(logits.astype(np.float64))
    wanted = np.argsort(-(s + bias), axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(s, wanted, 1)
    assert ids.dtype == np.int64
    assert np.array_equal(ids, wanted)
    close(weights, (chosen / chosen.sum(1, keepdims=True) if renormalize and k > 1 else chosen) * 2.5)


def test_route_breaks_ties_by_the_lowest_id(ops: CpuOps) -> None:
    logits = np.array([[20.0, 1, 20, 19, 1, 20]], np.float32)  # σ of 17 and more is 1 in float32
    ids, _ = ops.route(logits, np.zeros(6, np.float32), 5, True, 1.0)
    assert ids.tolist() == [[0, 2, 3, 5, 1]]


def test_route_never_names_an_expert_that_is_not_there(ops: CpuOps) -> None:
    ids, _ = ops.route(np.full((1, 4), np.nan, np.float32), np.zeros(4, np.float32), 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]]


def test_combine_takes_rows_in_token_order(ops: CpuOps) -> None:
    ids = np.array([[3, 0], [0, 7], [7, 3]])
    weights = floats(0, 3, 2)
    outputs = {e: floats(e + 1, 2, 33) for e in (0, 3, 7)}
    rows = [[(3, 0), (0, 0)], [(0, 1), (7, 0)], [(7, 1), (3, 1)]]
    wanted = [sum(float(w) * outputs[e][r].astype(np.float64) for w, (e, r) in zip(ws, row, strict=True))
              for ws, row in zip(weights, rows, strict=True)]  # fmt: skip
    close(ops.combine(outputs, ids, weights), np.array(wanted))


# -- the same bits -----------------------------------------------------------------------------------------------------


def all_outputs(ops: CpuOps, tokens: int = 5) -> Iterator[tuple[str, Any]]:
    """Every operation on odd sizes, one array after the other."""
    x, w, g = floats(0, tokens, 97), floats(1, 97), floats(2, tokens, 97, scale=5)
    for name, weight in (("bf16", bf16(3, 77, 97)), ("float32", floats(3, 77, 97))):
        yield f"linear {name}", ops.linear(x, ops.matrix(weight))
    yield "linear int8", ops.linear(x, ops.int8_matrix(int8(18, 77, 97)))
    yield "rms_norm", ops.rms_norm(x, w, 1e-5)
    yield "attn_res", ops.attn_res([x, g, x[::-1].copy()], w, floats(4, 97), 1e-5)
    yield "gate", ops.gate(x, g)
    yield "situ", ops.situ(x, g, BETA, LINEAR_BETA)
    yield from zip(("conv", "history"), ops.short_conv(x, floats(5, 97, 4), floats(6, 3, 97)), strict=True)
    *rows, state = delta_inputs(tokens, 7, 40)
    yield "l2_norm", ops.l2_norm(rows[0], 0.3)
    for bound in (-5.0, None):
        yield f"decay {bound}", ops.decay(rows[0], floats(7, 7), bound)
    yield from zip(("delta rule", "state"), ops.delta_rule(*rows, state), strict=True)
    cache = ops.latent_cache(83 + tokens, 48, 20)
    cache.length = cache.append(floats(8, 83, 48), floats(9, 83, 20))
    cache.append(floats(10, tokens, 48), floats(11, tokens, 20))
    q = floats(12, tokens, 7, 44)
    for kv_b in (ops.matrix(bf16(13, 7 * 50, 48)), ops.int8_matrix(int8(13, 7 * 50, 48))):
        yield "attention", ops.latent_attention(q, cache, kv_b, 48, 20, 0.2)
    ids, weights = ops.route(floats(14, tokens, 29), floats(15, 29, scale=0.1), 4, True, 1.5)
    yield from (("ids", ids), ("weights", weights))
    outputs = {int(e): floats(int(e), int((ids == e).sum()), 64) for e in np.unique(ids)}
    yield "combine", ops.combine(outputs, ids, weights)
    for low, high in ((114, 124), (0, 130)):
        expert = ops.expert(packed_expert(16, 160, 224, low, high))
        yield f"expert {low}", ops.expert_mlp(floats(17, tokens, 160, scale=0.1), expert, BETA, LINEAR_BETA)
    special = [np.inf, -np.inf, 1e38, -1e38, 1e-40, 0.0, -0.0, 89.0, -104.0]
    yield "sigmoid", ops.sigmoid(np.array([*special, *np.linspace(-99, 99, 9991)], np.float32))


def digest(ops: CpuOps) -> str:
    """Of few rows, whose weights are decoded as they are used, and of more, for which they may be decoded before."""
    outputs = [*all_outputs(ops), *all_outputs(ops, tokens=11)]
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for _, a in outputs)).hexdigest()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_bit(ops: CpuOps, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(all_outputs(ops))
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    many = CpuOps(threads)
    with mock.patch.object(many._pool, "submit", wraps=many._pool.submit) as submit:
        for (name, a), (_, b) in zip(alone, all_outputs(many), strict=True):
            assert a.tobytes() == b.tobytes(), name
    divided = [call.args[0].__qualname__.split(".")[1] for call in submit.call_args_list]
    # The expert with scales at the edge goes row by row, two divided steps each.
    calls = {"_multiply": 3, "delta_rule": 1, "latent_attention": 2, "expert_mlp": 2 + 2 * 5}
    assert Counter(divided) == {name: n * (threads - 1) for name, n in calls.items()}


def test_rows_are_packed_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    ops = CpuOps(3)
    with mock.patch.object(cpu.matrices, "pack", wraps=cpu.matrices.pack) as pack:
        ops.linear(floats(0, 9, 97), ops.matrix(bf16(1, 77, 97)))
        assert pack.call_count == 1
        ops.expert_mlp(floats(0, 9, 96), ops.expert(packed_expert(2, 96, 160)), BETA, LINEAR_BETA)
        assert pack.call_count == 1 + 2


def test_threads_take_disjoint_parts_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)
    for threads in (2, 3, 5):
        for count in (1, 23, 24, 25, 1000):
            parts: list[tuple[int, int]] = []
            CpuOps(threads)._split(1 << 30, count, 24, lambda first, last, seen=parts: seen.append((first, last)))
            parts.sort()
            assert parts[0][0] == 0
            assert parts[-1][1] == count
            assert all(a[1] == b[0] and b[0] % 24 == 0 for a, b in pairwise(parts))


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 1)

    def part(first: int, last: int) -> None:
        if first:
            raise RuntimeError("of the second part")

    with pytest.raises(RuntimeError, match="of the second part"):
        CpuOps(2)._split(1 << 30, 100, 1, part)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_leaves_no_threads(tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr("runtime.ops.cpu.WORTH_A_THREAD", 1)
    before = set(threading.enumerate())

    def busy(ops: CpuOps) -> None:
        ops._split(100, 4, 1, lambda first, last: None)
        assert set(threading.enumerate()) - before

    def refuse(checkpoint: object, ops: CpuOps, *_: object) -> None:
        busy(ops)
        raise MemoryError

    if fails:
        monkeypatch.setattr("runtime.generate.engine.Trunk", refuse)
    with contextlib.suppress(MemoryError), Engine.load(tiny, backend="cpu", threads=3) as engine:
        assert isinstance(engine.ops, CpuOps)
        busy(engine.ops)
    assert not set(threading.enumerate()) - before


def test_zero_threads_are_refused() -> None:
    with pytest.raises(UsageError, match="0 threads wanted"):
        CpuOps(0)


LOWER: list[dict[str, str]] = [
    {"OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL"},
    {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
]
"""A CPU without AVX-512, one without fused multiply-add, and what must not matter at all."""


def run(variables: dict[str, str]) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are names of x86 CPUs")
def test_the_bits_are_the_same_on_older_cpus(ops: CpuOps) -> None:
    """All with one directory of compiled kernels, so that it would be seen if one CPU took the code of another."""
    wanted = digest(ops)
    found = [run(variables) for variables in LOWER]
    assert [bits for _, bits in found] == [wanted] * len(LOWER)
    vectors = [name for name, _ in found]
    assert vectors[0] == jit.VECTORS
    assert vectors[2] == "portable"
    assert jit.VECTORS != "avx512" or vectors[1] == "avx2"


def kernel_files(*directories: Path, name: str = "rows.rms_norm") -> jit._KernelFiles:
    return jit._KernelFiles(directories, name)


def test_a_kernel_file_is_found_by_all_it_depends_on_or_not_at_all(tmp_path: Path) -> None:
    files = kernel_files(tmp_path)
    files.save(("float32", "znver4"), [1, 2])
    assert files.load(("float32", "znver4")) == [1, 2]
    assert files.load(("float32", "haswell")) is None
    assert kernel_files(tmp_path, name="rows.l2_norm").load(("float32", "znver4")) is None
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-1])
    assert files.load(("float32", "znver4")) is None


def test_kernel_files_of_older_sources_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = kernel_files(tmp_path)
    files.save("a", 1)
    files.save("b", 2)
    monkeypatch.setattr(jit, "_SOURCES", "0123456789abcdef")
    assert files.load("a") is None
    files.save("a", 3)
    assert files.load("a") == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_left_unfinished_is_dropped_after_an_hour(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{name}{jit._UNFINISHED}" for name in ("old", "new"))
    for left in (old, new):
        left.write_bytes(b"half a kernel")
    an_hour_ago = time.time() - 3601
    os.utime(old, (an_hour_ago, an_hour_ago))
    kernel_files(tmp_path).save("a", 1)
    assert not old.exists()
    assert new.exists()


def test_a_kernel_is_written_under_a_name_that_says_it_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(temporary: str, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jit.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kernel_files(tmp_path).save("a", 1)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(jit._UNFINISHED)


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that could not be kept, none so far."""
    names: list[str] = []
    monkeypatch.setattr(jit, "_UNKEPT", names)
    return names


def read_only(monkeypatch: pytest.MonkeyPatch, *directories: Path) -> None:
    """As another user finds them: permission bits do not bind root, who may run this."""
    write = jit._write

    def refusing(path: Path, content: bytes) -> None:
        if path.parent in directories:
            raise PermissionError(13, "Permission denied", str(path))
        write(path, content)

    monkeypatch.setattr(jit, "_write", refusing)


def test_a_directory_that_can_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unkept: list[str]
) -> None:
    package, user = tmp_path / "package", tmp_path / "home" / "cache"
    kernel_files(package).save("a", 1)
    read_only(monkeypatch, package)
    files = kernel_files(package, user)
    assert files.load("a") == 1
    assert not user.exists()
    files.save("b", 2)
    assert files.load("b") == 2
    assert (len(list(package.iterdir())), len(list(user.iterdir()))) == (1, 1)
    assert unkept == []


def test_the_first_directory_that_can_be_written_takes_the_kernel(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    kernel_files(first, second).save("a", 1)
    assert len(list(first.iterdir())) == 1
    assert not second.exists()


def test_a_damaged_file_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        kernel_files(directory).save("a", 1)
    (damaged,) = first.iterdir()
    damaged.write_bytes(b"")
    assert kernel_files(first, second).load("a") == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permission bits")
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_others_may_read_a_kernel_if_the_umask_lets_them(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        kernel_files(tmp_path).save("a", 1)
    finally:
        os.umask(before)
    (kept,) = tmp_path.iterdir()
    assert kept.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("error", "message"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")]
)
def test_kernels_that_no_directory_takes_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unkept: list[str], error: int, message: str
) -> None:
    def refused(temporary: Path, path: Path) -> None:
        raise OSError(error, message)

    monkeypatch.setattr(jit.os, "replace", refused)
    files = kernel_files(tmp_path / "package", tmp_path / "user")
    files.save("a", 1)
    assert files.load("a") is None
    assert unkept == ["rows.rms_norm"]
    assert not CpuOps.keeps_kernels()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_cannot_be_a_directory_costs_time_only(tmp_path: Path, unkept: list[str]) -> None:
    (tmp_path / "file").touch()
    files = kernel_files(tmp_path / "file" / "none")
    files.save("a", 1)
    assert files.load("a") is None
    assert unkept == ["rows.rms_norm"]


def test_kernels_lie_beside_the_code_then_with_the_user_unless_a_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package, user = jit._places()
    assert package == Path(jit.__file__).parent / "__pycache__"
    assert user.name.startswith("kernels_")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "named"))
    (named,) = jit._places()
    assert named.parent == tmp_path / "named"


def test_a_process_that_can_write_nowhere_loads_every_kernel_another_kept(ops: CpuOps) -> None:
    if not ops.keeps_kernels():
        pytest.skip("no directory here takes a kernel")
    program = (
        "from runtime.ops.kernels import jit\n"
        "from runtime.ops.cpu import CpuOps\n"
        "def refused(*_): raise PermissionError\n"
        "jit._write = refused\n"
        "CpuOps()\n"
        "print(sum(sum(d.stats.cache_misses.values()) for d, _ in jit._KERNELS), jit.keeps())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "True"]), done.stderr


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], "compile  the kernels, for this machine: once, part of a minute"),
        (
            ["rows.rms_norm"],
            "compile  the kernels: they cannot be kept (no writable cache directory: set NUMBA_CACHE_DIR), "
            "so at every start, part of a minute",
        ),
    ],
)
def test_what_is_said_while_kernels_are_compiled_is_true(
    names: list[str],
    wanted: str,
    unkept: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def slow(report: Callable[[int, int], None]) -> None:
        unkept.extend(names)
        report(1, 2)
        report(2, 2)

    monkeypatch.setattr(loading, "PATIENCE_S", -1.0)
    monkeypatch.setattr(CpuOps, "warm_up", staticmethod(slow))
    loading._compile(mock.Mock())
    assert [line for line in capsys.readouterr().err.splitlines() if "compile  " in line] == [wanted]


def test_without_numbas_compiler_the_backend_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(UsageError, match="unset NUMBA_DISABLE_JIT or use --backend reference") as refused:
        CpuOps()
    assert "\n" not in str(refused.value)


def test_with_numbas_compiler_off_a_run_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "runtime", "run", "--backend", "cpu", "--prompt", "x"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "needs Numba's compiler" in done.stderr.splitlines()[-1]


if __name__ == "__main__":
    print(jit.VECTORS, digest(CpuOps()))
