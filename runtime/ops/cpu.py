"""The `cpu` backend: float32 NumPy arrays, Numba kernels, the weights exactly as released.

Results are the same bits for any number of rows and threads and on every CPU; `kernels` says how. This file checks
nothing about numbers: it allocates results, decides how many threads a call is worth, and calls one kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime import ops
from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert, check_scales
from runtime.errors import UsageError
from runtime.ops import L2_EPS, RENORMALIZE_EPS, Workload, check_capacity
from runtime.ops.kernels import attention, jit, matrices, rows
from runtime.ops.kernels.attention import SCORES_AT_ONCE
from runtime.ops.kernels.formats import BF16, F32, INT8
from runtime.ops.kernels.matrices import BAND
from runtime.progress import Progress

Floats: TypeAlias = npt.NDArray[np.float32]

WORTH_A_THREAD = 2 << 20
"""Bytes of weights, counted more often for many rows, that make a part for another thread: some 100 µs of work."""


def _place(array: npt.NDArray[Any]) -> int:
    """The address of the first element; three times quicker than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


def _panels(x: Floats) -> Floats:
    """The rows as the matrix kernels take them: packed once per call, read by every thread. They begin at a line of the
    caches, since a vector that lies in two lines is two loads."""
    rows, columns = x.shape
    wide = -(-columns // 32) * 32
    room = np.empty(rows * wide + 15, np.float32)
    start = -_place(room) // 4 % 16
    panels = room[start : start + rows * wide].reshape(rows, wide)
    matrices.pack(x, panels)
    return panels


@dataclass(frozen=True, slots=True)
class Matrix:
    """A trunk matrix [out, in] where it was given: bf16 as uint16, float32, or int8 with float32 scales [out]."""

    array: npt.NDArray[Any]
    place: int
    form: int
    scales: Floats | None = None
    scale_place: int = 0


@dataclass(frozen=True, slots=True)
class Expert:
    """A packed expert where it was given, and the addresses of codes and scales of w1, w2, w3."""

    packed: PackedExpert
    places: tuple[tuple[int, int], ...]
    edge: bool


class SplitCache:
    """MLA's cache of one layer: rows of latent and key in split layout, grown as positions come."""

    parts: ClassVar[tuple[str, ...]] = ("entries",)

    def __init__(self, capacity: int, rank: int, rope: int) -> None:
        self.length, self.capacity = 0, capacity
        self._width = sum((n + 31) // 32 * 32 for n in (rank, rope))
        self.entries: Floats = np.empty((0, self._width), np.float32)

    def append(self, latent: Floats, key: Floats) -> int:
        """Write T rows behind `length`; return `length` + T. Raises UsageError past `capacity`."""
        end = self.length + len(latent)
        check_capacity(end, self.capacity)
        if end > len(self.entries):
            grown = np.empty((min(self.capacity, max(end, 2 * len(self.entries), 64)), self._width), np.float32)
            grown[: self.length] = self.entries[: self.length]
            self.entries = grown
        attention.append(latent, key, self.entries, self.length)
        return end

    def copy(self) -> SplitCache:
        """The rows up to `length`, of their own."""
        other = copy.copy(self)
        other.entries = self.entries[: self.length].copy()
        return other


class CpuOps:
    """`runtime.ops.Ops` over NumPy and Numba. One object may be used by one thread at a time."""

    name = "cpu"
    memory = None

    def __init__(self, threads: int = 1) -> None:
        """Compiles the kernels (first time) or loads them. `threads` counts the calling one."""
        if threads < 1:
            raise UsageError(f"{threads} threads wanted: there must be at least one")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "ops") if threads > 1 else None
        self.warm_up()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    @staticmethod
    def warm_up(report: Progress | None = None) -> None:
        """Have every kernel ready. `report(ready, all)` is called as they come: the first time takes long."""
        jit.build(report)

    @staticmethod
    def keeps_kernels() -> bool:
        """False when a kernel was compiled and no directory could take it: the next process compiles it again."""
        return jit.keeps()

    @staticmethod
    def scratch_nbytes(work: Workload, threads: int) -> int:
        """One of: the widest rows in panels, an expert's five activations, every thread's scores and queries; and what
        every thread stages of a matrix."""
        linear = 4 * work.rows * (work.widest + 31)
        expert = 4 * work.rows * (work.latent + 4 * work.inter)
        scores = min(work.heads * work.context, max(4 * work.context, SCORES_AT_ONCE))
        attention = 4 * (threads * scores + 2 * work.heads * work.widest)
        return max(linear, expert, attention) + threads * matrices.stage_nbytes(max(work.rows, work.heads))

    def _split(self, work_bytes: int, count: int, step: int, part: Callable[[int, int], None]) -> None:
        """part(first, last) over 0 .. count, cut at multiples of `step`, on as many threads as the work is worth."""
        if self._pool is None or work_bytes < 2 * WORTH_A_THREAD:
            part(0, count)
            return
        parts = min(self.threads, work_bytes // WORTH_A_THREAD, -(-count // step))
        cuts = [min(count, -(-count * i // (parts * step)) * step) for i in range(parts + 1)]
        others = [self._pool.submit(part, first, last) for first, last in pairwise(cuts[1:])]
        part(cuts[0], cuts[1])
        for other in others:
            other.result()

    # -- weights ----------------------------------------------------------------------------------------------

    def matrix(self, weight: npt.NDArray[Any]) -> Matrix:
        """A bf16 matrix is used where it lies, no copy; anything else than uint16 is taken as float32."""
        bf16 = weight.dtype == np.uint16
        array = np.ascontiguousarray(weight, None if bf16 else np.float32)
        return Matrix(array, _place(array), BF16 if bf16 else F32)

    def int8_matrix(self, weight: Int8Matrix) -> Matrix:
        """Used where it lies; its scales are widened."""
        values, scales = np.ascontiguousarray(weight.values), weight.scales.astype(np.float32)
        return Matrix(values, _place(values), INT8, scales, _place(scales))

    @staticmethod
    def int8_nbytes(rows: int, columns: int) -> int:
        return rows * (columns + 4)

    def vector(self, weight: npt.NDArray[Any]) -> Floats:
        """Widened exactly."""
        if weight.dtype == np.uint16:
            wide = weight.astype(np.uint32)
            wide <<= np.uint32(16)
            return wide.view(np.float32)
        return np.array(weight, np.float32, order="C")

    def expert(self, packed: PackedExpert) -> Expert:
        """Used where it lies. Scale bytes outside 2 to 252 choose a slow exact path; 255 is a CheckpointError."""
        packed = PackedExpert(*(np.ascontiguousarray(part) for part in packed))
        w1, s1, w2, s2, w3, s3 = (_place(part) for part in packed)
        scales = (packed.w1_scale, packed.w2_scale, packed.w3_scale)
        edge = matrices.has_edge_scales(s1, scales[0].size, s2, scales[1].size, s3, scales[2].size)
        if edge:
            for name, scale in zip(("w1", "w2", "w3"), scales, strict=True):
                check_scales(scale, f"{name}.weight_scale")
        return Expert(packed, ((w1, s1), (w2, s2), (w3, s3)), edge)

    def busy(self, expert: Expert) -> bool:
        """What is computed is computed at once."""
        return False

    def finish(self, experts: Sequence[Expert]) -> None:
        """None of them is busy."""

    # -- rows -------------------------------------------------------------------------------------------------

    def embed(self, table: Matrix, ids: npt.NDArray[np.int64]) -> Floats:
        return self.vector(table.array[ids])

    def linear(self, x: Floats, weight: Matrix) -> Floats:
        out = np.empty((len(x), len(weight.array)), np.float32)
        self._multiply(_panels(x), x.shape[1], weight, out, 0)
        return out

    @staticmethod
    def block_rows(columns: int) -> int:
        return max(1, ops.BLOCK_BYTES // (2 * columns))

    def linear_in_blocks(self, x: Floats, rows: int, blocks: Iterator[Matrix]) -> Floats:
        out, panels, done = np.empty((len(x), rows), np.float32), _panels(x), 0
        for block in blocks:
            self._multiply(panels, x.shape[1], block, out, done)
            done += len(block.array)
        return out

    def _multiply(self, panels: Floats, channels: int, weight: Matrix, out: Floats, start: int) -> None:
        """The columns of `out` from `start` on that belong to these weight rows."""
        count, columns = weight.array.shape
        if columns != channels:
            raise ValueError(f"{channels} channels into a matrix of {columns} columns")
        # where row 0 of the matrix would lie whose row `start` is the first of these
        place, scale_place = weight.place - start * weight.array.strides[0], weight.scale_place - 4 * start

        def part(first: int, last: int) -> None:
            first, last = start + first, start + last
            if weight.form == INT8:
                matrices.linear_int8(panels, columns, place, scale_place, out, first, last)
            elif weight.form == BF16:
                matrices.linear_bf16(panels, columns, place, out, first, last)
            else:
                matrices.linear_f32(panels, columns, place, out, first, last)

        self._split(weight.array.nbytes * (1 + len(out) // 4), count, BAND, part)

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        out = np.empty_like(x)
        n = x.shape[-1]
        rows.rms_norm(x.reshape(-1, n), weight, eps, out.reshape(-1, n))
        return out

    def attn_res(self, sources: Sequence[Floats], norm: Floats, proj: Floats, eps: float) -> Floats:
        out = np.empty_like(sources[0])
        places = np.array([_place(source) for source in sources], np.intp)
        rows.attn_res(places, norm.reshape(-1), proj.reshape(-1), eps, out)
        return out

    def add(self, a: Floats, b: Floats) -> Floats:
        return np.add(a, b)

    def gate(self, x: Floats, g: Floats) -> Floats:
        out = np.empty_like(x)
        rows.gate(x.reshape(-1), g.reshape(-1), out.reshape(-1))
        return out

    def sigmoid(self, x: Floats) -> Floats:
        out = np.empty_like(x)
        rows.sigmoid(x.reshape(-1), out.reshape(-1))
        return out

    def situ(self, g: Floats, u: Floats, beta: float, linear_beta: float | None) -> Floats:
        out = np.empty_like(g)
        rows.situ(g.reshape(-1), u.reshape(-1), beta, linear_beta or 0.0, out.reshape(-1))
        return out

    def heads(self, x: Floats, n: int) -> Floats:
        return x.reshape(len(x), n, -1)

    def merge_heads(self, x: Floats) -> Floats:
        return x.reshape(len(x), -1)

    def columns(self, x: Floats, start: int, stop: int) -> Floats:
        return np.ascontiguousarray(x[:, start:stop])

    def rows(self, x: Floats, index: npt.NDArray[np.int64]) -> Floats:
        return x[index]

    # -- KDA ----------------------------------------------------------------------------------------------------

    def zeros(self, *shape: int) -> Floats:
        return np.zeros(shape, np.float32)

    def short_conv(self, u: Floats, weight: Floats, history: Floats) -> tuple[Floats, Floats]:
        out, new_history = np.empty_like(u), np.empty_like(history)
        rows.short_conv(u, weight, history, out, new_history)
        return out, new_history

    def l2_norm(self, x: Floats, scale: float) -> Floats:
        out = np.empty_like(x)
        n = x.shape[-1]
        rows.l2_norm(x.reshape(-1, n), L2_EPS, scale, out.reshape(-1, n))
        return out

    def decay(self, u: Floats, a_log: Floats, lower_bound: float | None) -> Floats:
        out = np.empty_like(u)
        rows.decay(u, a_log, lower_bound is not None, lower_bound or 0.0, out)
        return out

    def delta_rule(
        self, q: Floats, k: Floats, v: Floats, alpha: Floats, beta: Floats, state: Floats
    ) -> tuple[Floats, Floats]:
        out, new_state = np.empty_like(v), np.empty_like(state)

        def part(first: int, last: int) -> None:
            attention.delta_rule(q, k, v, alpha, beta, state, out, new_state, first, last)

        self._split(state.nbytes * (1 + len(q)), len(state), 1, part)
        return out, new_state

    # -- MLA ------------------------------------------------------------------------------------------------

    def latent_cache(self, capacity: int, rank: int, rope: int) -> SplitCache:
        return SplitCache(capacity, rank, rope)

    def latent_attention(
        self, q: Floats, cache: SplitCache, kv_b: Matrix, rank: int, rope: int, scale: float
    ) -> Floats:
        tokens, heads, width = q.shape
        out = np.empty((tokens, heads, len(kv_b.array) // heads - (width - rope)), np.float32)
        entries, length = cache.entries, cache.length
        weights = kv_b.place, kv_b.scale_place, kv_b.form

        def part(first: int, last: int) -> None:
            attention.latent_attention(q, entries, length, *weights, rank, rope, scale, out, first, last)

        work = tokens * (kv_b.array.nbytes + heads * (length + tokens) * (rank + rope))
        self._split(work, heads, 1, part)
        return out

    # -- LatentMoE --------------------------------------------------------------------------------------------

    def route(
        self, logits: Floats, bias: Floats, k: int, renormalize: bool, scaling: float
    ) -> tuple[npt.NDArray[np.int64], Floats]:
        ids, weights = np.empty((len(logits), k), np.int64), np.empty((len(logits), k), np.float32)
        rows.route(logits, bias, renormalize, RENORMALIZE_EPS, scaling, ids, weights)
        return ids, weights

    def expert_mlp(self, z: Floats, expert: Expert, beta: float, linear_beta: float | None) -> Floats:
        if expert.edge and len(z) > 1:
            return np.concatenate([self.expert_mlp(row[None], expert, beta, linear_beta) for row in z])
        width = len(expert.packed.w1_packed)
        g, u = (np.empty((len(z), width), np.float32) for _ in range(2))
        out = np.empty_like(z)
        (w1, s1), (w2, s2), (w3, s3) = expert.places

        def up(first: int, last: int) -> None:
            matrices.linear_mxfp4(latent, w1, s1, expert.edge, g, first, last)
            matrices.linear_mxfp4(latent, w3, s3, expert.edge, u, first, last)

        def down(first: int, last: int) -> None:
            matrices.linear_mxfp4(hidden, w2, s2, expert.edge, out, first, last)

        work = expert.packed.w2_packed.nbytes * (2 + len(z))
        latent = _panels(z)
        self._split(2 * work, width, BAND, up)
        hidden = _panels(self.situ(g, u, beta, linear_beta))
        self._split(work, z.shape[1], BAND, down)
        return out

    def combine(self, outputs: Mapping[int, Floats], ids: npt.NDArray[np.int64], weights: Floats) -> Floats:
        next_row = {expert: _place(rows_of_expert) for expert, rows_of_expert in outputs.items()}
        n = next(iter(outputs.values())).shape[1]
        places = np.empty(ids.shape, np.intp)
        for t, chosen in enumerate(ids.tolist()):
            for j, expert in enumerate(chosen):
                places[t, j] = next_row[expert]
                next_row[expert] += 4 * n
        out = np.empty((len(ids), n), np.float32)
        rows.weighted_sum(places, weights, out)
        return out

    # -- out --------------------------------------------------------------------------------------------------

    def numpy(self, x: Floats) -> Floats:
        return x
