"""The two attentions: the gated delta rule (KDA) and latent attention in the absorbed form (MLA), head by head."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.ops.kernels.elementary import exp
from runtime.ops.kernels.formats import BF16, F32, INT8, SPLIT
from runtime.ops.kernels.jit import inline, kernel
from runtime.ops.kernels.lanes import Address, address, fma, get, hold, lanes, load, pointer, store, total
from runtime.ops.kernels.matrices import bf16_row, f32_row, int8_row, padded, panel_rows, split_matrix
from runtime.ops.kernels.rows import zero
from runtime.ops.kernels.shapes import SHAPES
from runtime.ops.kernels.tiles import mix_tile, unpack_row

SCORES_AT_ONCE = 1 << 22
"""Bound on the scores held by one call: 16 MiB, whatever the context."""
POSITIONS = 128
"""Positions summed in one chain; the chains are added in order. Keeps the error of a long context small, and lets all
heads read these cache rows before the next ones are fetched."""
HEADS = SHAPES.heads
"""Heads whose latents are mixed together."""


@kernel(
    "void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], float32[:,::1],"
    " float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], intp, intp)"
)
def delta_rule(
    q: Any, k: Any, v: Any, alpha: Any, beta: Any, state: Any, out: Any, new_state: Any, first: int, last: int
) -> None:
    """S ← diag(α) S; u = Sᵀk; S ← S + k ⊗ β(v − u); o = Sᵀq for heads first to last, all tokens.

    A column of S never meets another one: 32 of them take all tokens before the next 32 are touched, in two vectors
    that do not wait for each other. Sums run over the key channel in order.
    """
    tokens, heads, n = q.shape
    columns = np.empty((n, 32), np.float32)
    s = address(columns)
    for h in range(first, last):
        for c in range(0, n, 32):
            here, there = n - c, max(0, n - c - 16)
            matrix = 4 * ((h * n) * n + c)
            for d in range(n):
                row = address(state) + (matrix + 4 * d * n)
                store(s + 128 * d, 16, load(row, here))
                store(s + 128 * d + 64, 16, load(row + 64, there))
            for t in range(tokens):
                row = 4 * (t * heads + h) * n
                decay, key, query = address(alpha) + row, address(k) + row, address(q) + row
                values, to = address(v) + (row + 4 * c), address(out) + (row + 4 * c)
                u0, u1 = zero(), zero()
                for d in range(n):
                    u0 = fma(load(s + 128 * d, 16) * get(decay + 4 * d), get(key + 4 * d), u0)
                    u1 = fma(load(s + 128 * d + 64, 16) * get(decay + 4 * d), get(key + 4 * d), u1)
                change0 = (load(values, here) - u0) * beta[t, h]
                change1 = (load(values + 64, there) - u1) * beta[t, h]
                o0, o1 = zero(), zero()
                for d in range(n):
                    changed0 = fma(change0, get(key + 4 * d), load(s + 128 * d, 16) * get(decay + 4 * d))
                    changed1 = fma(change1, get(key + 4 * d), load(s + 128 * d + 64, 16) * get(decay + 4 * d))
                    store(s + 128 * d, 16, changed0)
                    store(s + 128 * d + 64, 16, changed1)
                    o0 = fma(changed0, get(query + 4 * d), o0)
                    o1 = fma(changed1, get(query + 4 * d), o1)
                store(to, here, o0)
                store(to + 64, there, o1)
            for d in range(n):
                row = address(new_state) + (matrix + 4 * d * n)
                store(row, here, load(s + 128 * d, 16))
                store(row + 64, there, load(s + 128 * d + 64, 16))
    hold(columns)


@kernel("void(float32[:,::1], float32[:,::1], float32[:,::1], intp)")
def append(latent: Any, key: Any, entries: Any, first: int) -> None:
    """Write cache rows from `first` on: the latent, then the key, each in split layout."""
    rank, rope = latent.shape[1], key.shape[1]
    for t in range(latent.shape[0]):
        to = address(entries) + 4 * (first + t) * entries.shape[1]
        unpack_row(F32, address(latent) + 4 * t * rank, to, rank, to, 128)
        unpack_row(F32, address(key) + 4 * t * rope, to, rope, to + 4 * padded(rank), 128)


@inline
def element_bytes(form: int) -> int:
    """Bytes of a weight in BF16, F32 or INT8."""
    return 2 if form == BF16 else 4 if form == F32 else 1


@inline
def absorb(
    q: Address, kv_b: Address, scale: Address, form: int, nope: int, rank: int, out: Address, step: int, coming: Address
) -> None:
    """out = Σ_d q[d] · key row d of kv_b: the query in the latent space, a block of 32 every `step` bytes.

    coming: the key rows of the next head, which are fetched from end to end.
    """
    size = element_bytes(form)
    for b in range(0, rank, 32):
        to, block, row = out + b // 32 * step, kv_b + size * b, size * rank
        at, by = coming + size * b * nope, 32 * size
        store(to, 16, zero())
        store(to + 64, 16, zero())
        if form == BF16:
            mix_tile(BF16, 1, block, row, scale, rank - b, nope, q, 0, to, 0, at, by)
        elif form == F32:
            mix_tile(F32, 1, block, row, scale, rank - b, nope, q, 0, to, 0, at, by)
        else:
            mix_tile(INT8, 1, block, row, scale, rank - b, nope, q, 0, to, 0, at, by)


@inline
def rows_of(weight: Address, scale: Address, form: int, count: int, columns: int, x: Address, out: Address) -> None:
    """`count` weight rows in BF16, F32 or INT8 times one row in split layout."""
    row = element_bytes(form) * columns
    if form == BF16:
        bf16_row(weight, row, scale, count, columns, x, out)
    elif form == F32:
        f32_row(weight, row, scale, count, columns, x, out)
    else:
        int8_row(weight, row, scale, count, columns, x, out)


@inline
def softmax(scores: Address, n: int, scale: float) -> Any:
    """Replace n scores by exp(scale · score − max); returns their sum: 16 lanes, POSITIONS by POSITIONS."""
    for i in range(n, (n + 15) // 16 * 16):
        store(scores + 4 * i, 1, lanes(np.float32(-np.inf)))
    largest = np.float32(-np.inf)
    for i in range(n):
        largest = max(largest, get(scores + 4 * i))
    peak = lanes(largest) * scale
    acc = zero()
    for p in range(0, n, POSITIONS):
        part = zero()
        for i in range(p, min(p + POSITIONS, n), 16):
            e = exp(load(scores + 4 * i, 16) * scale - peak)
            store(scores + 4 * i, 16, e)
            part = part + e
        acc = acc + part
    return total(acc)


@inline
def mix_latents(
    entries: Address, width: int, rank: int, n: int, scores: Address, step: int, heads: int, out: Address
) -> None:
    """out[h] = Σ_p scores[h, p] · latent_p, p after p, POSITIONS by POSITIONS, in split layout."""
    row, wide = 4 * width, 4 * padded(rank)
    for i in range(0, heads * padded(rank), 16):
        store(out + 4 * i, 16, zero())
    for p in range(0, n, POSITIONS):
        count = min(POSITIONS, n - p)
        for b in range(0, padded(rank), 32):
            block = entries + row * p + 4 * b
            h = 0
            while h + HEADS <= heads:
                at = scores + h * step + 4 * p
                to = out + h * wide + 4 * b
                mix_tile(SPLIT, HEADS, block, row, block, 32, count, at, step, to, wide, block + 128, row)
                h += HEADS
            while h < heads:
                at = scores + h * step + 4 * p
                to = out + h * wide + 4 * b
                mix_tile(SPLIT, 1, block, row, block, 32, count, at, step, to, wide, block + 128, row)
                h += 1


@kernel(
    "void(float32[:,:,::1], float32[:,::1], intp, intp, intp, intp, intp, intp, float64, float32[:,:,::1], intp, intp)"
)
def latent_attention(
    q: Any, entries: Any, length: int, kv_b: int, row_scales: int, form: int, rank: int, rope: int, scale: float,
    out: Any, first: int, last: int,
) -> None:  # fmt: skip
    """out[t, h] = W_v softmax(scale · (q W_k · latent + q_rope · key)) latent for heads first to last.

    Row t sees `length` + t + 1 cache rows. W_k and W_v: per head nope key rows, then v value rows of kv_b [.., rank],
    in BF16, F32 or INT8; only the last has scales for its rows.
    """
    tokens, heads, n_q = q.shape
    nope, n_v, width = n_q - rope, out.shape[2], entries.shape[1]
    row_bytes, scale_bytes = element_bytes(form) * rank, 4 if form == INT8 else 0
    weights, scales, wide = pointer(kv_b), pointer(row_scales), padded(rank)
    longest = (length + tokens + 15) // 16 * 16 + 16  # heads a power of two apart would share few lines of the cache
    chunk = min(last - first, max(4, SCORES_AT_ONCE // longest))
    queries = np.empty((chunk, width), np.float32)
    mixed = np.empty((chunk, wide), np.float32)
    scores = np.empty((chunk, longest), np.float32)
    sums = np.empty(chunk, np.float32)
    for t in range(tokens):
        n = length + t + 1
        for start in range(first, last, chunk):
            here = min(chunk, last - start)
            h = 0
            while h < here:
                panel = panel_rows(here - h, here)
                for i in range(panel):
                    at = address(q) + 4 * (t * heads + start + h + i) * n_q
                    to = address(queries) + 4 * h * width + 128 * i
                    k = (start + h + i) * (nope + n_v)
                    w, s = weights + k * row_bytes, scales + k * scale_bytes
                    absorb(at, w, s, form, nope, rank, to, 128 * panel, w + (nope + n_v) * row_bytes)
                    unpack_row(F32, at + 4 * nope, at, rope, to + 4 * wide * panel, 128 * panel)
                h += panel
            at, row = address(entries), 4 * width
            split_matrix(at, row, at, n, width, address(queries), here, address(scores), 4 * longest)
            for h in range(here):
                sums[h] = softmax(address(scores) + 4 * h * longest, n, scale)
            mix_latents(at, width, rank, n, address(scores), 4 * longest, here, address(mixed))
            for h in range(here):
                c = address(mixed) + 4 * h * wide
                for i in range(0, wide, 16):
                    store(c + 4 * i, 16, load(c + 4 * i, 16) / sums[h])
                v = (start + h) * (nope + n_v) + nope
                to = address(out) + 4 * (t * heads + start + h) * n_v
                rows_of(weights + v * row_bytes, scales + v * scale_bytes, form, n_v, rank, c, to)
    hold(queries)
    hold(mixed)
    hold(scores)
