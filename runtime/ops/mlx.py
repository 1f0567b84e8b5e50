"""The `mlx` backend: float32 activations on whatever device MLX calls its default (Metal, CUDA, CPU).

Rules of this file:

* Weights stay as given. A routed expert is its MXFP4 bytes, reinterpreted and never decoded, where they were read
  to: MLX copies whatever memory it is shown, but lets others write into its own (`memory`). A bf16 matrix is
  widened to float32 only in row tiles of at most TILE_BYTES, because MLX's own mixed matmul would widen it whole; an
  int8 matrix is MLX's affine form of 8 bits, which has its values exactly.
* float32 means float32: TF32, which MLX uses by default where the hardware has it, is switched off below. It has
  to happen before MLX computes anything, so this file sets it before importing MLX.
* Shapes of all calls follow from the token rows and the routing, never from which expert landed first. The bits
  of a row may depend on the number of rows; how far is for conformance to measure.
* MLX is lazy, and an array not yet computed belongs to the thread that described it. Whatever outlives a call
  (weights, state, expert outputs) is therefore handed to the device at once (`mx.async_eval`), which keeps graphs
  short. Nobody waits for the device but `route`, whose ids say what to read, `numpy`, `finish`, whose bytes are to
  be read over, and a product in more than three tiles.
* No kernels of our own and no `mx.compile`, which on the CPU runs a C++ compiler while the model waits.

Section numbers are those of the Kimi K3 model specification; shapes are those of `runtime.ops.Ops`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert
from runtime.config import MXFP4_GROUP
from runtime.drives.buffers import address
from runtime.errors import UsageError
from runtime.ops import L2_EPS, RENORMALIZE_EPS, Array, Weight, Workload, check_capacity

os.environ["MLX_ENABLE_TF32"] = "0"

try:
    import mlx.core as mx
except ImportError as missing:
    raise UsageError(
        "the mlx backend needs MLX, which cannot be imported here "
        f"({missing}): install it with `pip install mlx` on a Mac, `pip install 'mlx[cpu]'` on Linux or "
        "`pip install 'mlx[cuda]'` for an NVIDIA GPU, or choose another backend"
    ) from missing

TILE_BYTES = 32 << 20
"""The most float32 bytes of a bf16 matrix, or of attention scores, that one tile holds."""

FREED_BYTES = 512 << 20
"""How many freed bytes MLX may keep for reuse on a GPU, where it would otherwise keep all it ever used."""

RECURRENCE_TOKENS = 32
"""Steps of the delta rule described before they are handed to the device."""

FIRST_ROWS = 256
"""Positions a latent cache allocates at first; it doubles from there."""

CODES_ALIGNMENT = 16 if mx.cuda.is_available() else 4
"""Codes begin at a multiple of this: they are uint32, and CUDA kernels sum in an order that depends on it up to 16."""

AFFINE_GROUPS = (128, 64, 32)
"""Columns that share a scale in MLX's affine form, the most first."""


class MlxInt8(NamedTuple):
    """An int8 matrix [out, columns] in affine form: (int8 + 128) · scale − 128 · scale, the row's scale in every group.

    codes uint32 [out, padded / 4], scales and biases float32 [out, padded / group]; padded by zeros to whole groups.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return int(self.codes.shape[0]), self.columns

    def part(self, first: int, last: int) -> Array:
        """Rows first to last in float32."""
        codes, scales, biases = self.codes[first:last], self.scales[first:last], self.biases[first:last]
        return mx.dequantize(codes, scales, biases, group_size=self.group, bits=8)[:, : self.columns]


class MlxExpert(NamedTuple):
    """One routed expert: codes as uint32 [out, in/8], scales as uint8 [out, in/32]. lent: they are not its own."""

    lent: bool
    w1: mx.array
    s1: mx.array
    w2: mx.array
    s2: mx.array
    w3: mx.array
    s3: mx.array


class MlxLatentCache:
    """MLA's cache of one layer, one row [rank + rope] per position, in an array that doubles as it fills."""

    parts: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(self, capacity: int, rank: int, rope: int) -> None:
        self.length = 0
        self.capacity = capacity
        self.rows = _ready(mx.zeros((min(FIRST_ROWS, capacity), rank + rope)))

    def append(self, latent: Array, key: Array) -> int:
        """Write T rows behind `length`; return `length` + T. Raises UsageError past `capacity`."""
        total = self.length + int(latent.shape[0])
        check_capacity(total, self.capacity)
        rows = self.rows
        if total > rows.shape[0]:
            more = min(max(total, 2 * rows.shape[0]), self.capacity) - rows.shape[0]
            rows = mx.concatenate([rows, mx.zeros((more, rows.shape[1]))])
        rows[self.length : total] = mx.concatenate([latent, key], axis=1)
        self.rows = _ready(rows)
        return total

    def copy(self) -> MlxLatentCache:
        """The rows up to `length`, of their own."""
        other = copy.copy(self)
        other.rows = _ready(mx.array(self.rows[: self.length]))
        return other


class MlxOps:
    """The Ops protocol on MLX."""

    name = "mlx"

    def __init__(self) -> None:
        mx.set_cache_limit(FREED_BYTES)
        self._outputs: dict[int, Array] = {}
        """What may still be under way with experts whose bytes are lent, by the expert's `id`."""

    def close(self) -> None:
        """Let go of outputs; what is under way ends by itself."""
        self._outputs.clear()

    @staticmethod
    def memory(nbytes: int) -> memoryview:
        """The memory of an array. Made from NumPy's, since `mx.zeros` gives every thread that asks a stream."""
        return memoryview(mx.array(np.zeros(nbytes, np.uint8)))  # type: ignore[arg-type]

    @staticmethod
    def scratch_nbytes(work: Workload, threads: int) -> int:
        """What is kept of freed memory, and one of: the NumPy original of a matrix, tiles and rows, the delta rule.

        MLX decides what it has under way; the factors are the most that was seen, rounded up: arrays of a tile's
        size in `latent_attention`, of the widest rows in `short_conv`, of each source in `attn_res`, of a state.
        """
        tiles = 10 * max(TILE_BYTES, 4 * work.context)
        rows = 4 * work.rows * max(6 * work.widest, 2 * work.sources)
        return FREED_BYTES + max(2 * work.matrix, tiles + rows, 40 * 4 * work.recurrence)

    # -- weights --------------------------------------------------------------------------------------------------
    def matrix(self, weight: npt.NDArray[Any]) -> Weight:
        return _ready(_bf16(weight) if weight.dtype == np.uint16 else mx.array(weight))

    def int8_matrix(self, weight: Int8Matrix) -> Weight:
        """Copies the bytes. The scales are laid out for every group: what only repeats, each product would copy."""
        columns = weight.values.shape[1]
        padded, group = _affine(columns)
        codes = weight.values.view(np.uint8)
        codes ^= 128
        if padded > columns:
            codes = np.pad(codes, ((0, 0), (0, padded - columns)), constant_values=128)
        scales = mx.contiguous(mx.repeat(mx.array(weight.scales).astype(mx.float32)[:, None], padded // group, axis=1))
        parts = _ready(mx.array(codes).view(mx.uint32), scales, -128.0 * scales)
        return MlxInt8(parts[0], parts[1], parts[2], group, columns)

    @staticmethod
    def int8_nbytes(rows: int, columns: int) -> int:
        padded, group = _affine(columns)
        return rows * (padded + 8 * padded // group)

    def vector(self, weight: npt.NDArray[Any]) -> Array:
        return _ready(_bf16(weight).astype(mx.float32) if weight.dtype == np.uint16 else mx.array(weight))

    def expert(self, packed: PackedExpert) -> Weight:
        """Copies bytes that lie elsewhere than in `memory`. Every scale byte but 255 means what the format says, 0
        and 254 included; on a GPU that flushes subnormals byte 0 gives zeros, which no float32 sum could tell from
        2^-127."""
        home = _home(packed.w1_packed)
        parts = [mx.array(part) for part in packed] if home is None else _windows(home, packed)
        parts[0::2] = [codes.view(mx.uint32) for codes in parts[0::2]]
        return MlxExpert(home is not None, *_ready(*parts))

    def busy(self, expert: MlxExpert) -> bool:
        return id(expert) in self._outputs

    def finish(self, experts: Sequence[MlxExpert]) -> None:
        busy = [id(expert) for expert in experts if self.busy(expert)]
        if busy:
            mx.eval(*(self._outputs[each] for each in busy))
        for each in busy:
            del self._outputs[each]

    def _finish_all(self) -> None:
        """Where everything has been waited for anyway: outputs need not be kept for `finish`."""
        mx.eval(*self._outputs.values())
        self._outputs.clear()

    # -- rows -----------------------------------------------------------------------------------------------------
    def embed(self, table: Weight, ids: npt.NDArray[np.int64]) -> Array:
        return table[_index(ids)].astype(mx.float32)

    def linear(self, x: Array, weight: Weight) -> Array:
        out, columns = weight.shape
        if isinstance(weight, MlxInt8):
            return _int8_linear(x, weight)
        step = self.block_rows(columns)
        if step >= out or weight.dtype == mx.float32:
            return x @ weight.astype(mx.float32).T
        tiles = (x @ weight[row : row + step].astype(mx.float32).T for row in range(0, out, step))
        return mx.concatenate(_in_turn(tiles), axis=1)

    @staticmethod
    def block_rows(columns: int) -> int:
        """As many as make a tile in float32: the calls are the same wherever the matrix is."""
        return max(1, TILE_BYTES // (4 * columns))

    def linear_in_blocks(self, x: Array, rows: int, blocks: Iterator[Weight]) -> Array:
        """A matrix in int8 is put together first: it is multiplied in one call."""
        first = next(blocks)
        if isinstance(first, MlxInt8):
            codes, scales, biases = (
                list(parts) for parts in zip(*(part[:3] for part in [first, *blocks]), strict=True)
            )
            whole = mx.concatenate(codes), mx.concatenate(scales), mx.concatenate(biases)
            return _ready(_int8_linear(x, MlxInt8(*whole, first.group, first.columns)))
        tiles = _in_turn(x @ block.astype(mx.float32).T for block in chain([first], blocks))
        return tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        return mx.fast.rms_norm(x, weight, eps)

    def attn_res(self, sources: Sequence[Array], norm: Array, proj: Array, eps: float) -> Array:
        direction = norm * proj.reshape(-1)
        scores = [(v * direction).sum(-1) * mx.rsqrt(mx.square(v).mean(-1) + eps) for v in sources]
        shares = mx.softmax(mx.stack(scores), axis=0, precise=True)[:, :, None]
        mixed = shares[0] * sources[0]
        for share, source in zip(shares[1:], sources[1:], strict=True):
            mixed = mixed + share * source
        return mixed

    def add(self, a: Array, b: Array) -> Array:
        return a + b

    def gate(self, x: Array, g: Array) -> Array:
        return x * mx.sigmoid(g)

    def sigmoid(self, x: Array) -> Array:
        return mx.sigmoid(x)

    def situ(self, g: Array, u: Array, beta: float, linear_beta: float | None) -> Array:
        up = u if linear_beta is None else linear_beta * mx.tanh(u / linear_beta)
        return beta * mx.tanh(g / beta) * mx.sigmoid(g) * up

    def heads(self, x: Array, n: int) -> Array:
        return x.reshape(x.shape[0], n, -1)

    def merge_heads(self, x: Array) -> Array:
        return x.reshape(x.shape[0], -1)

    def columns(self, x: Array, start: int, stop: int) -> Array:
        return x[:, start:stop]

    def rows(self, x: Array, index: npt.NDArray[np.int64]) -> Array:
        return x[_index(index)]

    # -- KDA [3.3] ------------------------------------------------------------------------------------------------
    def zeros(self, *shape: int) -> Array:
        return _ready(mx.zeros(shape))

    def short_conv(self, u: Array, weight: Array, history: Array) -> tuple[Array, Array]:
        """The new history is a copy of K-1 rows: a slice would keep the whole chunk's rows in memory."""
        tokens, taps = u.shape[0], weight.shape[1]
        seen = mx.concatenate([history, u])
        z = seen[:tokens] * weight[:, 0]
        for tap in range(1, taps):
            z = z + seen[tap : tap + tokens] * weight[:, tap]
        return z * mx.sigmoid(z), _ready(mx.contiguous(seen[tokens:]))

    def l2_norm(self, x: Array, scale: float) -> Array:
        return x * (scale * mx.rsqrt(mx.square(x).sum(-1, keepdims=True) + L2_EPS))

    def decay(self, u: Array, a_log: Array, lower_bound: float | None) -> Array:
        rate = mx.exp(a_log)[:, None]
        if lower_bound is None:
            return mx.exp(-rate * mx.logaddexp(u, mx.array(0.0)))
        return mx.exp(lower_bound * mx.sigmoid(rate * u))

    def delta_rule(self, q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        """Row vectors against the state, [n, 1, D] @ [n, D, D], one token after the other."""
        q, k, v = q[:, :, None, :], k[:, :, None, :], v[:, :, None, :]
        outputs = []
        for t in range(q.shape[0]):
            state = alpha[t, :, :, None] * state
            change = beta[t, :, None, None] * (v[t] - k[t] @ state)
            state = state + k[t].swapaxes(1, 2) * change
            outputs.append((q[t] @ state)[:, 0])
            if t % RECURRENCE_TOKENS == RECURRENCE_TOKENS - 1:
                _ready(state, *outputs[-RECURRENCE_TOKENS:])
        o, state = _ready(mx.stack(outputs), state)
        return o, state

    # -- MLA [3.4] ------------------------------------------------------------------------------------------------
    def latent_cache(self, capacity: int, rank: int, rope: int) -> MlxLatentCache:
        return MlxLatentCache(capacity, rank, rope)

    def latent_attention(self, q: Array, cache: Any, kv_b: Weight, rank: int, rope: int, scale: float) -> Array:
        """In tiles of rows and heads: kv_b in float32 and the scores stay within TILE_BYTES, or are one head's."""
        tokens, n, width = q.shape
        nope, present = width - rope, cache.length + tokens
        per_head = kv_b.shape[0] // n
        keys = cache.rows[:present]
        heads = max(1, min(n, TILE_BYTES // (4 * per_head * rank), TILE_BYTES // (4 * present)))
        rows = max(1, min(tokens, TILE_BYTES // (4 * heads * present)))

        def tile(row: int, head: int) -> Array:
            some = head * per_head, min(head + heads, n) * per_head
            up = kv_b.part(*some) if isinstance(kv_b, MlxInt8) else kv_b[slice(*some)].astype(mx.float32)
            up = up.reshape(-1, per_head, rank)
            asked = q[row : row + rows, head : head + heads].swapaxes(0, 1)
            absorbed = mx.concatenate([asked[..., :nope] @ up[:, :nope], asked[..., nope:]], axis=-1)
            last = mx.arange(cache.length + row, cache.length + row + asked.shape[1])
            visible = mx.arange(present) <= last[:, None]
            scores = mx.where(visible, absorbed @ keys.T * scale, -mx.inf)
            latent = (mx.softmax(scores, axis=-1, precise=True) @ keys)[..., :rank]  # keys[:, :rank] would be copied
            return (latent @ up[:, nope:].swapaxes(1, 2)).swapaxes(0, 1)

        bands = [
            mx.concatenate(_in_turn(tile(row, head) for head in range(0, n, heads)), axis=1)
            for row in range(0, tokens, rows)
        ]
        return mx.concatenate(bands)

    # -- LatentMoE [3.5, 3.6] -------------------------------------------------------------------------------------
    def route(
        self, logits: Array, bias: Array, k: int, renormalize: bool, scaling: float
    ) -> tuple[npt.NDArray[np.int64], Array]:
        """The choice is made in NumPy from the float32 scores: MLX promises no stable sort on every device."""
        scores = mx.sigmoid(logits)
        choice = np.array(scores + bias)
        self._finish_all()
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :k]
        weights = mx.take_along_axis(scores, _index(ids), axis=1)
        if renormalize and k > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + RENORMALIZE_EPS)
        return ids, weights * scaling

    def expert_mlp(self, z: Array, expert: MlxExpert, beta: float, linear_beta: float | None) -> Array:
        gate, up = _packed_linear(z, expert.w1, expert.s1), _packed_linear(z, expert.w3, expert.s3)
        output = _ready(_packed_linear(self.situ(gate, up, beta, linear_beta), expert.w2, expert.s2))
        if expert.lent:
            self._outputs[id(expert)] = output
        return output

    def combine(self, outputs: Mapping[int, Array], ids: npt.NDArray[np.int64], weights: Array) -> Array:
        """The outputs are laid one after the other by expert id, so the order of their arrival leaves no trace."""
        place = np.empty(ids.size, np.int64)
        place[np.argsort(ids, axis=None, kind="stable")] = np.arange(ids.size)
        index = place.reshape(ids.shape)
        laid = mx.concatenate([outputs[expert] for expert in sorted(outputs)])
        total = weights[:, :1] * laid[_index(index[:, 0])]
        for j in range(1, ids.shape[1]):
            total = total + weights[:, j : j + 1] * laid[_index(index[:, j])]
        return total

    # -- out ------------------------------------------------------------------------------------------------------
    def numpy(self, x: Array) -> npt.NDArray[Any]:
        values = np.array(x)
        self._finish_all()
        return values


def _ready(*arrays: Array) -> Any:
    """Hand the arrays to the device now; they no longer depend on this thread or on the graph behind them."""
    start: Callable[..., None] = mx.async_eval
    start(*arrays)
    return arrays[0] if len(arrays) == 1 else arrays


def _in_turn(tiles: Iterable[Array]) -> list[Array]:
    """Compute tiles one after the other, at most three under way: left alone, MLX would start twenty or more."""
    done: list[Array] = []
    for tile in tiles:
        done.append(_ready(tile))
        if len(done) > 2:
            mx.eval(done[-3])
    return done


def _home(part: npt.NDArray[np.uint8]) -> mx.array | None:
    """The array in whose memory these bytes lie, None where that is not MLX's."""
    base: Any = part
    while isinstance(base, np.ndarray):
        base = base.base
    owner = base.obj if isinstance(base, memoryview) else None
    return owner if isinstance(owner, mx.array) else None


def _windows(home: mx.array, packed: PackedExpert) -> list[mx.array]:
    """The six parts as uint8 arrays in the memory of `home`; nothing is copied, all is moved where codes are askew."""
    memory: memoryview = memoryview(home)  # type: ignore[arg-type]
    nbytes = sum(part.nbytes for part in packed)
    start = packed.w1_packed.ctypes.data - address(memory)
    at = start - start % CODES_ALIGNMENT
    if at < start:
        memory[at : at + nbytes] = memory[start : start + nbytes]
    windows = []
    for part in packed:
        windows.append(home[at : at + part.nbytes].reshape(part.shape))
        at += part.nbytes
    return windows


def _bf16(bits: npt.NDArray[Any]) -> Array:
    """uint16 bits as the bfloat16 values they are."""
    return mx.array(bits).view(mx.bfloat16)


def _affine(columns: int) -> tuple[int, int]:
    """(columns padded to whole groups, columns of a group) of an int8 matrix."""
    padded = -(-columns // AFFINE_GROUPS[-1]) * AFFINE_GROUPS[-1]
    return padded, next(group for group in AFFINE_GROUPS if padded % group == 0)


def _int8_linear(x: Array, weight: MlxInt8) -> Array:
    """x · weightᵀ: [R, in] → [R, out]."""
    padding = 4 * weight.codes.shape[1] - weight.columns
    if padding:
        x = mx.pad(x, [(0, 0), (0, padding)])
    return mx.quantized_matmul(
        x, weight.codes, weight.scales, weight.biases, transpose=True, group_size=weight.group, bits=8
    )


def _index(ids: npt.NDArray[np.int64]) -> Array:
    return mx.array(ids.astype(np.int32))


def _packed_linear(x: Array, codes: Array, scales: Array) -> Array:
    """x · weightᵀ for a matrix in MXFP4: [R, in] → [R, out]."""
    return mx.quantized_matmul(x, codes, scales, transpose=True, group_size=MXFP4_GROUP, bits=4, mode="mxfp4")
