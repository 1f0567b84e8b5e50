"""The arithmetic in NumPy float64, written to be read: the oracle the other backends are held against.

Every formula stands here in its plainest form. Two rules make a row's bits independent of the other rows and of
the machine: rows are taken one at a time, and sums go through `np.add.reduce` (pairwise, in an order fixed by the
length alone), never through BLAS or `einsum`; exp, tanh and log are built below from operations that IEEE 754
defines to the last bit, because NumPy's own differ between CPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from runtime import ops
from runtime.checkpoint import mxfp4
from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert
from runtime.ops import L2_EPS, RENORMALIZE_EPS, Workload, check_capacity

F64 = npt.NDArray[np.float64]

BLOCK_BYTES = 16 << 20
"""The most bytes of products that wait to be summed, or of a weight on its way from bf16 to float64."""

ELEMENTWISE = 11
"""Arrays of their argument's size that `situ` holds at one moment beside its result: most of all functions."""


def exp(x: F64) -> F64:
    """e^x within 1 ulp: e^x = 2^n · e^r with r = x − n ln 2, |r| ≤ ln(2)/2, and e^r by its Taylor series."""
    x = np.clip(x, -750.0, 710.0)
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    series = np.ones_like(r)
    for i in range(14, 0, -1):
        series = 1.0 + r * series / i
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ldexp(series, n.astype(np.int32))


def log1p(x: F64) -> F64:
    """ln(1 + x) for 0 ≤ x ≤ 1, as 2 artanh(x / (2 + x))."""
    s = x / (2.0 + x)
    series = np.zeros_like(s)
    for i in range(35, 0, -2):
        series = 1.0 / i + s * s * series
    return 2.0 * s * series


def sigmoid(x: F64) -> F64:
    """1 / (1 + e^−x), without overflow on either side."""
    e = exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, e) / (1.0 + e)


def tanh(x: F64) -> F64:
    """tanh x: Lambert's continued fraction x/(1 + x²/(3 + x²/(5 + …))) near zero, e^2x elsewhere."""
    a = np.abs(x)
    small = np.minimum(a, 0.5)
    fraction = np.full_like(a, 17.0)
    for i in range(15, 0, -2):
        fraction = i + small * small / fraction
    return np.copysign(np.where(a < 0.5, small / fraction, 1.0 - 2.0 / (exp(2.0 * a) + 1.0)), x)


def softplus(x: F64) -> F64:
    """ln(1 + e^x)."""
    return np.maximum(x, 0.0) + log1p(exp(-np.abs(x)))


def blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    """0 .. rows in slices of at most BLOCK_BYTES, at least one row each."""
    step = max(1, BLOCK_BYTES // row_bytes)
    return (slice(first, first + step) for first in range(0, rows, step))


def matvec(weight: F64, x: F64) -> F64:
    """weight [out, in] · x [in], each output one pairwise sum."""
    return np.concatenate([np.add.reduce(weight[rows] * x, axis=-1) for rows in blocks(len(weight), x.nbytes)])


def weighted_sum(weights: F64, vectors: F64) -> F64:
    """Σ_p weights[p] · vectors[p] over vectors [P, n], p after p."""
    total = np.full(vectors.shape[1], -0.0)  # what added to -0.0 leaves it so
    for rows in blocks(len(vectors), vectors[0].nbytes):
        products = weights[rows, None] * vectors[rows]
        products[0] += total
        total = np.add.reduce(products, axis=0)
    return total


def situ(g: F64, u: F64, beta: float, linear_beta: float | None) -> F64:
    """SiTU-GLU: [β tanh(g/β) σ(g)] · [β_lin tanh(u/β_lin)], the up branch unsquashed without β_lin [3.7]."""
    squashed = u if linear_beta is None else linear_beta * tanh(u / linear_beta)
    return beta * tanh(g / beta) * sigmoid(g) * squashed


class ReferenceCache:
    """MLA's cache of one layer in float64; see `LatentCache`."""

    parts: ClassVar[tuple[str, ...]] = ("latent", "key")

    def __init__(self, capacity: int, rank: int, rope: int) -> None:
        self.length = 0
        self.capacity = capacity
        self.latent = np.empty((0, rank))
        self.key = np.empty((0, rope))

    def append(self, latent: F64, key: F64) -> int:
        filled = self.length + len(latent)
        check_capacity(filled, self.capacity)
        self.latent = np.concatenate([self.latent[: self.length], latent])
        self.key = np.concatenate([self.key[: self.length], key])
        return filled

    def copy(self) -> ReferenceCache:
        return copy.copy(self)  # `append` makes new arrays


class ReferenceOps:
    """`Ops` in float64. Trunk weights are widened once, experts each time they are used."""

    name = "reference"
    memory = None

    def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def scratch_nbytes(work: Workload, threads: int) -> int:
        """One of: a weight being widened, the functions of the widest rows, a decoded expert, scores, a new state."""
        loading = 2 * work.matrix
        rows = ELEMENTWISE * 8 * work.rows * work.widest
        # Two decoded matrices of float64, and beside the third one its codes and their values before scaling.
        expert = (2 * 8 + 8 + 9) * work.latent * work.inter + ELEMENTWISE * 8 * work.rows * work.inter
        attention = ELEMENTWISE * 8 * work.context
        recurrence = 2 * 8 * work.recurrence
        return BLOCK_BYTES + max(loading, rows, expert, attention, recurrence)

    # -- weights ----------------------------------------------------------------------------------------------
    def matrix(self, weight: npt.NDArray[Any]) -> F64:
        return self.vector(weight)

    def vector(self, weight: npt.NDArray[Any]) -> F64:
        if weight.dtype != np.uint16:
            return weight.astype(np.float64)
        wide = np.empty(weight.shape)
        bits, values = weight.reshape(-1), wide.reshape(-1)
        for some in blocks(bits.size, 8):
            values[some] = (bits[some].astype(np.uint32) << 16).view(np.float32)
        return wide

    def int8_matrix(self, weight: Int8Matrix) -> F64:
        wide = weight.values.astype(np.float64)
        wide *= weight.scales.astype(np.float64)[:, None]
        return wide

    @staticmethod
    def int8_nbytes(rows: int, columns: int) -> int:
        return 8 * rows * columns

    def expert(self, packed: PackedExpert) -> PackedExpert:
        return packed

    def busy(self, expert: PackedExpert) -> bool:
        """What is computed is computed at once."""
        return False

    def finish(self, experts: Sequence[PackedExpert]) -> None:
        """None of them is busy."""

    # -- rows -------------------------------------------------------------------------------------------------
    def embed(self, table: F64, ids: npt.NDArray[np.int64]) -> F64:
        return table[ids]

    def linear(self, x: F64, weight: F64) -> F64:
        return np.stack([matvec(weight, row) for row in x])

    @staticmethod
    def block_rows(columns: int) -> int:
        return max(1, ops.BLOCK_BYTES // (2 * columns))

    def linear_in_blocks(self, x: F64, rows: int, blocks: Iterator[F64]) -> F64:
        return np.concatenate([self.linear(x, block) for block in blocks], axis=1)

    def rms_norm(self, x: F64, weight: F64, eps: float) -> F64:
        mean_square = np.add.reduce(x * x, axis=-1, keepdims=True) / x.shape[-1]
        return np.asarray(weight * (x / np.sqrt(mean_square + eps)))

    def attn_res(self, sources: Sequence[F64], norm: F64, proj: F64, eps: float) -> F64:
        scores = np.stack([np.add.reduce(self.rms_norm(v, norm * proj, eps), axis=-1) for v in sources])
        weights = exp(scores - scores.max(axis=0))
        # Python's sum, source by source: np.add.reduce over this axis would take another order for a single row.
        mixed = sum(w[:, None] * v for w, v in zip(weights, sources, strict=True))
        return np.asarray(mixed / np.asarray(sum(weights))[:, None])

    def add(self, a: F64, b: F64) -> F64:
        return a + b

    def gate(self, x: F64, g: F64) -> F64:
        return x * sigmoid(g)

    def sigmoid(self, x: F64) -> F64:
        return sigmoid(x)

    def situ(self, g: F64, u: F64, beta: float, linear_beta: float | None) -> F64:
        return situ(g, u, beta, linear_beta)

    def heads(self, x: F64, n: int) -> F64:
        return x.reshape(len(x), n, -1)

    def merge_heads(self, x: F64) -> F64:
        return x.reshape(len(x), -1)

    def columns(self, x: F64, start: int, stop: int) -> F64:
        return np.ascontiguousarray(x[:, start:stop])

    def rows(self, x: F64, index: npt.NDArray[np.int64]) -> F64:
        return x[index]

    # -- KDA --------------------------------------------------------------------------------------------------
    def zeros(self, *shape: int) -> F64:
        return np.zeros(shape)

    def short_conv(self, u: F64, weight: F64, history: F64) -> tuple[F64, F64]:
        taps = weight.shape[1]
        padded = np.concatenate([history, u])
        z = np.zeros_like(u)
        for j in range(taps):
            z = z + weight[:, j] * padded[j : j + len(u)]
        return z * sigmoid(z), padded[len(padded) - (taps - 1) :]

    def l2_norm(self, x: F64, scale: float) -> F64:
        return x / np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True) + L2_EPS) * scale

    def decay(self, u: F64, a_log: F64, lower_bound: float | None) -> F64:
        rate = exp(a_log)[:, None]
        if lower_bound is None:
            return exp(-rate * softplus(u))
        return exp(lower_bound * sigmoid(rate * u))

    def delta_rule(self, q: F64, k: F64, v: F64, alpha: F64, beta: F64, state: F64) -> tuple[F64, F64]:
        s = state
        out = np.empty_like(v)
        for t in range(len(q)):
            s = alpha[t][:, :, None] * s
            read = np.add.reduce(s * k[t][:, :, None], axis=1)
            write = beta[t][:, None] * (v[t] - read)
            s = s + k[t][:, :, None] * write[:, None, :]
            out[t] = np.add.reduce(s * q[t][:, :, None], axis=1)
        return out, s

    # -- MLA --------------------------------------------------------------------------------------------------
    def latent_cache(self, capacity: int, rank: int, rope: int) -> ReferenceCache:
        return ReferenceCache(capacity, rank, rope)

    def latent_attention(self, q: F64, cache: ReferenceCache, kv_b: F64, rank: int, rope: int, scale: float) -> F64:
        rows, n, width = q.shape
        nope = width - rope
        per_head = kv_b.reshape(n, -1, rank)
        out = np.empty((rows, n, per_head.shape[1] - nope))
        for t in range(rows):
            latent, key = cache.latent[: cache.length + t + 1], cache.key[: cache.length + t + 1]
            for h in range(n):
                w_k, w_v = per_head[h, :nope], per_head[h, nope:]
                absorbed = np.add.reduce(q[t, h, :nope, None] * w_k, axis=0)
                scores = (matvec(latent, absorbed) + matvec(key, q[t, h, nope:])) * scale
                attention = exp(scores - scores.max())
                context = weighted_sum(attention, latent) / np.add.reduce(attention)
                out[t, h] = matvec(w_v, context)
        return out

    # -- LatentMoE ----------------------------------------------------------------------------------------------
    def route(
        self, logits: F64, bias: F64, k: int, renormalize: bool, scaling: float
    ) -> tuple[npt.NDArray[np.int64], F64]:
        scores = sigmoid(logits)
        ids = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
        weights = np.take_along_axis(scores, ids, axis=-1)
        if renormalize and k > 1:
            weights = weights / (np.add.reduce(weights, axis=-1, keepdims=True) + RENORMALIZE_EPS)
        return ids, weights * scaling

    def expert_mlp(self, z: F64, expert: PackedExpert, beta: float, linear_beta: float | None) -> F64:
        w1 = mxfp4.decode(expert.w1_packed, expert.w1_scale)
        w2 = mxfp4.decode(expert.w2_packed, expert.w2_scale)
        w3 = mxfp4.decode(expert.w3_packed, expert.w3_scale)
        return self.linear(situ(self.linear(z, w1), self.linear(z, w3), beta, linear_beta), w2)

    def combine(self, outputs: Mapping[int, F64], ids: npt.NDArray[np.int64], weights: F64) -> F64:
        seen = dict.fromkeys(outputs, 0)
        mixed = []
        for row_ids, row_weights in zip(ids.tolist(), weights, strict=True):
            row = 0.0
            for e, w in zip(row_ids, row_weights, strict=True):
                row = row + w * outputs[e][seen[e]]
                seen[e] += 1
            mixed.append(row)
        return np.stack(mixed)

    # -- out --------------------------------------------------------------------------------------------------
    def numpy(self, x: F64) -> F64:
        return x
