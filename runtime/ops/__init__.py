"""The arithmetic of Kimi K3, three times: `reference`, `cpu` and `mlx`, behind one protocol.

The forward pass in `runtime.model.k3` is written once over `Ops`; a backend decides precision and speed, never
meaning. Rules that every backend keeps:

* an `Array` is the backend's own type; only `numpy()` and the ids of `route()` leave it;
* no argument is modified: state comes in and new state goes out, so a cancelled pass leaves nothing half done;
* on `reference` and `cpu` the result of a row does not depend on how many rows are computed together, on the
  number of threads, or on the CPU's vector width: the same bits, always.

T is the number of rows (tokens) of a call, H the hidden size, n heads of D channels, Z the latent width.
Matrices are `[out, in]` as released. Formulas: Kimi K3 model specification, section in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert
from runtime.drives.buffers import Make
from runtime.errors import UsageError

Array: TypeAlias = Any
"""A backend's own array: float64 NumPy, float32 NumPy or an MLX array."""

Weight: TypeAlias = Any
"""A backend's own form of a weight, made once by `matrix`, `int8_matrix`, `vector` or `expert`."""

BACKENDS = ("cpu", "mlx", "reference")

L2_EPS = 1e-6
"""Added to the sum of squares, not to the mean, of KDA's q and k [3.3]."""

RENORMALIZE_EPS = 1e-20
"""Added to the sum of the chosen experts' scores [3.5]."""


BLOCK_BYTES = 16 << 20
"""The most bf16 bytes of a matrix that are there at once where it comes in blocks of rows, but for a longer row."""


def check_capacity(filled: int, capacity: int) -> None:
    """Raise UsageError when `filled` positions are more than a latent cache of `capacity` holds."""
    if filled > capacity:
        raise UsageError(
            f"{filled:,} positions wanted, the context holds {capacity:,}: ask for a longer one with --context"
        )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest of everything that a backend's calls will be given."""

    rows: int
    """Rows computed together."""
    widest: int
    """Columns or rows of the widest matrix; not the vocabulary's, whose logits are wanted for one row."""
    sources: int
    """Channels of all sources of `attn_res` together."""
    matrix: int
    """Elements of the largest trunk matrix."""
    latent: int
    """Z, the columns of a routed expert's w1 and w3."""
    inter: int
    """Rows of a routed expert's w1 and w3."""
    heads: int
    """Heads of latent attention."""
    context: int
    """Positions in a latent cache."""
    recurrence: int
    """Elements n·D·D of a KDA state."""


class LatentCache(Protocol):
    """MLA's cache of one layer: per position the latent [r] and the shared key part [rope].

    Rows past `length` may hold rubbish: `append` writes behind `length` and returns the number of rows then
    present, without moving `length`; the model moves it when the whole pass has succeeded.
    """

    length: int
    capacity: int

    def append(self, latent: Array, key: Array) -> int:
        """Write T rows behind `length`; return `length` + T. Raises UsageError past `capacity`."""
        ...

    parts: ClassVar[tuple[str, ...]]
    """The attributes that are arrays [at least `length`, …]; rows up to `length` are what is remembered."""

    def copy(self) -> LatentCache:
        """The rows up to `length`, of their own: appending to one leaves the other as it is."""
        ...


class Ops(Protocol):
    """One backend."""

    name: str

    @property
    def memory(self) -> Make | None:
        """Makes the memory that `expert` uses where it is; None where any will do."""
        ...

    @staticmethod
    def scratch_nbytes(work: Workload, threads: int) -> int:
        """Bytes that calls may hold at one moment beside their arguments and results, some 100 kB left out.

        That includes what a backend keeps of freed memory, and the NumPy original that `matrix` is given.
        `threads` is what the backend would be made with.
        """
        ...

    def close(self) -> None:
        """Let go of threads, and of results that are held. Computing afterwards is an error."""
        ...

    # -- weights, once at load ------------------------------------------------------------------------------
    def matrix(self, weight: npt.NDArray[Any]) -> Weight:
        """A trunk matrix [out, in] for `linear`, `embed` and `latent_attention`; bf16 comes as uint16."""
        ...

    def int8_matrix(self, weight: Int8Matrix) -> Weight:
        """A trunk matrix [out, in] for `linear` and `latent_attention` that stays int8; may take `weight` over.

        A weight is int8 · scale, exactly: at most 18 significant bits. So on `cpu` and `reference` the results have
        the bits that `matrix` would give of the same numbers in float32.
        """
        ...

    @staticmethod
    def int8_nbytes(rows: int, columns: int) -> int:
        """Bytes that the backend keeps of an int8 matrix."""
        ...

    def vector(self, weight: npt.NDArray[Any]) -> Array:
        """A small tensor of any shape as an Array of that shape; bf16 comes as uint16, else float32."""
        ...

    def expert(self, packed: PackedExpert) -> Weight:
        """A routed expert for `expert_mlp`, still packed. May alias the bytes it is given.

        In memory of `memory` it always does, where the six parts lie there back to back, and may move them by a few
        bytes towards the beginning of that memory.
        """
        ...

    def busy(self, expert: Weight) -> bool:
        """Whether something that was computed with the expert may still look at its bytes. Never waits."""
        ...

    def finish(self, experts: Sequence[Weight]) -> None:
        """Return when none of these is busy: their bytes may change from then on. Waits once, if at all."""
        ...

    # -- rows -------------------------------------------------------------------------------------------------
    def embed(self, table: Weight, ids: npt.NDArray[np.int64]) -> Array:
        """Rows `ids` of the table [V, H]: [T, H]."""
        ...

    def linear(self, x: Array, weight: Weight) -> Array:
        """x · weightᵀ: [T, in] → [T, out]."""
        ...

    @staticmethod
    def block_rows(columns: int) -> int:
        """How many rows of a matrix with so many columns make a block for `linear_in_blocks`."""
        ...

    def linear_in_blocks(self, x: Array, rows: int, blocks: Iterator[Weight]) -> Array:
        """x · weightᵀ: [T, in] → [T, rows], of a matrix in blocks of `block_rows` rows, the last one perhaps shorter.

        The same bits as `linear` with the whole. A block is used no more when the next one is taken.
        """
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """weight ⊙ x / sqrt(mean(x²) + eps) over the last axis; any leading shape [3]."""
        ...

    def attn_res(self, sources: Sequence[Array], norm: Array, proj: Array, eps: float) -> Array:
        """Attention over the residual stream's depth: softmax-weighted mix of the sources [T, H] [3.2].

        s_j = Σ_i v_ji / sqrt(mean(v_j²) + eps) · norm_i · proj_i; the mix is over the raw sources.
        """
        ...

    def add(self, a: Array, b: Array) -> Array:
        """a + b: b has a's shape, or is one row [C] added to every row of a [T, C]."""
        ...

    def gate(self, x: Array, g: Array) -> Array:
        """x ⊙ σ(g), same shape."""
        ...

    def sigmoid(self, x: Array) -> Array:
        """σ(x)."""
        ...

    def situ(self, g: Array, u: Array, beta: float, linear_beta: float | None) -> Array:
        """[β tanh(g/β) σ(g)] · [β_lin tanh(u/β_lin)]; without β_lin the second factor is u [3.7]."""
        ...

    def heads(self, x: Array, n: int) -> Array:
        """[T, n·D] → [T, n, D]."""
        ...

    def merge_heads(self, x: Array) -> Array:
        """[T, n, D] → [T, n·D]."""
        ...

    def columns(self, x: Array, start: int, stop: int) -> Array:
        """x[:, start:stop] of [T, C]."""
        ...

    def rows(self, x: Array, index: npt.NDArray[np.int64]) -> Array:
        """x[index] of [T, C]: [len(index), C]."""
        ...

    # -- KDA [3.3] ------------------------------------------------------------------------------------------
    def zeros(self, *shape: int) -> Array:
        """An Array of zeros: the state before the first token."""
        ...

    def short_conv(self, u: Array, weight: Array, history: Array) -> tuple[Array, Array]:
        """Causal depthwise convolution of width K, then SiLU.

        u [T, P], weight [P, K] (last tap: the current token), history [K-1, P], oldest row first.
        Returns ([T, P], the new history).
        """
        ...

    def l2_norm(self, x: Array, scale: float) -> Array:
        """x / sqrt(Σ x² + L2_EPS) · scale over the last axis of [T, n, D]."""
        ...

    def decay(self, u: Array, a_log: Array, lower_bound: float | None) -> Array:
        """α = exp(g) of u [T, n, D] (dt_bias already added), a_log [n].

        g = lower_bound · σ(exp(a_log) u), or −exp(a_log) softplus(u) without a bound.
        """
        ...

    def delta_rule(self, q: Array, k: Array, v: Array, alpha: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        """The gated delta rule, token by token. q, k, v, alpha [T, n, D], beta [T, n], state [n, D, D].

        S ← diag(α) S;  u = Sᵀk;  S ← S + k ⊗ β(v − u);  o = Sᵀq. Returns (o [T, n, D], the new state).
        """
        ...

    # -- MLA [3.4] ------------------------------------------------------------------------------------------
    def latent_cache(self, capacity: int, rank: int, rope: int) -> LatentCache:
        """An empty cache for `capacity` positions."""
        ...

    def latent_attention(self, q: Array, cache: Any, kv_b: Weight, rank: int, rope: int, scale: float) -> Array:
        """Causal attention in the absorbed form. q [T, n, nope+rope] → [T, n, v].

        `cache` is the backend's own, from `latent_cache`.
        The T rows are the ones just appended: row t sees positions 0 .. cache.length + t.
        kv_b is [n·(nope+v), rank], per head key rows then value rows.
        """
        ...

    # -- LatentMoE [3.5, 3.6] ---------------------------------------------------------------------------------
    def route(
        self, logits: Array, bias: Array, k: int, renormalize: bool, scaling: float
    ) -> tuple[npt.NDArray[np.int64], Array]:
        """The k experts with the largest σ(logits) + bias per row, ties to the lowest id, best first.

        Returns (ids [T, k] in NumPy, weights [T, k]): the unbiased σ, divided by their sum + RENORMALIZE_EPS
        when renormalised.
        """
        ...

    def expert_mlp(self, z: Array, expert: Weight, beta: float, linear_beta: float | None) -> Array:
        """SiTU(z·w1ᵀ, z·w3ᵀ)·w2ᵀ in the latent space: [R, Z] → [R, Z]."""
        ...

    def combine(self, outputs: Mapping[int, Array], ids: npt.NDArray[np.int64], weights: Array) -> Array:
        """Σ_j weights[t, j] · outputs[ids[t, j]] in the order of j: [T, Z].

        outputs[e] has one row per token that chose e, in token order.
        """
        ...

    # -- out --------------------------------------------------------------------------------------------------
    def numpy(self, x: Array) -> npt.NDArray[Any]:
        """x in NumPy: float64 on `reference`, else float32. Evaluates what is pending."""
        ...


def backend_type(backend: str) -> type[Ops]:
    """The class of the backend by name. Raises UsageError when it is unknown or not installed."""
    if backend == "reference":
        from runtime.ops.reference import ReferenceOps

        return ReferenceOps
    if backend == "cpu":
        try:
            from runtime.ops.cpu import CpuOps
        except (ImportError, OSError) as error:
            raise UsageError(
                f"the cpu backend cannot be loaded ({error}): install expertstream again, or lift the limit on "
                "address space (ulimit -v) if there is one"
            ) from None
        return CpuOps
    if backend == "mlx":
        from runtime.ops.mlx import MlxOps

        return MlxOps
    raise UsageError(f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}")


def make_ops(backend: str, threads: int = 1) -> Ops:
    """The backend by name, ready: `cpu` compiles its kernels. Only `cpu` has threads of its own.

    Raises UsageError when it is unknown or not installed.
    """
    arguments = (threads,) if backend == "cpu" else ()
    return backend_type(backend)(*arguments)
