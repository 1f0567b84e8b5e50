"""What happens to rows between the matrices: norms, gates, convolution, depth attention, routing, weighted sums.

Sums over a row are 16 lanes (column mod 16) and a fixed tree; sums over sources, taps and experts go in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.ops.kernels import elementary
from runtime.ops.kernels.elementary import exp, softplus
from runtime.ops.kernels.jit import inline, kernel
from runtime.ops.kernels.lanes import (
    Address,
    address,
    fma,
    get,
    hold,
    lane0,
    lanes,
    load,
    pointer,
    sqrt,
    store,
    total,
)


@inline
def zero() -> Any:
    """Sixteen zeros."""
    return lanes(np.float32(0.0))


@inline
def squares(x: Address, n: int) -> Any:
    """Σ x² over n floats."""
    acc = zero()
    for i in range(0, n, 16):
        v = load(x + 4 * i, n - i)
        acc = fma(v, v, acc)
    return total(acc)


@kernel("void(float32[:,::1], float32[::1], float64, float32[:,::1])")
def rms_norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    """out = weight ⊙ x / sqrt(mean(x²) + eps)."""
    n = x.shape[1]
    for r in range(x.shape[0]):
        row, to = address(x) + 4 * r * n, address(out) + 4 * r * n
        inverse = 1.0 / sqrt(lanes(squares(row, n)) / n + eps)
        for i in range(0, n, 16):
            store(to + 4 * i, n - i, load(row + 4 * i, n - i) * inverse * load(address(weight) + 4 * i, n - i))


@kernel("void(float32[:,::1], float64, float64, float32[:,::1])")
def l2_norm(x: Any, eps: float, scale: float, out: Any) -> None:
    """out = x / sqrt(Σ x² + eps) · scale."""
    n = x.shape[1]
    for r in range(x.shape[0]):
        row, to = address(x) + 4 * r * n, address(out) + 4 * r * n
        inverse = 1.0 / sqrt(lanes(squares(row, n)) + eps)
        for i in range(0, n, 16):
            store(to + 4 * i, n - i, load(row + 4 * i, n - i) * inverse * scale)


@inline
def mix_rows(places: Any, weights: Address, out: Address, n: int) -> None:
    """out = Σ_j weights[j] · (the n floats at places[j]), j after j."""
    for i in range(0, n, 16):
        acc = zero()
        for j in range(places.size):
            acc = fma(get(weights + 4 * j), load(pointer(places[j]) + 4 * i, n - i), acc)
        store(out + 4 * i, n - i, acc)


@kernel("void(intp[::1], float32[::1], float32[::1], float64, float32[:,::1])")
def attn_res(sources: Any, norm: Any, proj: Any, eps: float, out: Any) -> None:
    """out[t] = Σ_j softmax_j(Σ_i v_ji norm_i proj_i / sqrt(mean(v_j²) + eps)) v_j; sources: addresses of [T, H]."""
    rows, n = out.shape
    scores = np.empty(sources.size, np.float32)
    places = np.empty(sources.size, np.intp)
    for t in range(rows):
        largest = np.float32(-np.inf)
        for j in range(sources.size):
            places[j] = sources[j] + 4 * t * n
            v = pointer(places[j])
            dot, square = zero(), zero()
            for i in range(0, n, 16):
                x = load(v + 4 * i, n - i)
                folded = load(address(norm) + 4 * i, n - i) * load(address(proj) + 4 * i, n - i)
                dot = fma(x, folded, dot)
                square = fma(x, x, square)
            scores[j] = lane0(lanes(total(dot)) / sqrt(lanes(total(square)) / n + eps))
            largest = max(largest, scores[j])
        weight_sum = np.float32(0.0)
        for j in range(sources.size):
            scores[j] = lane0(exp(lanes(scores[j] - largest)))
            weight_sum += scores[j]
        for j in range(sources.size):
            scores[j] /= weight_sum
        mix_rows(places, address(scores), address(out) + 4 * t * n, n)
    hold(scores)


@kernel("void(intp[:,::1], float32[:,::1], float32[:,::1])")
def weighted_sum(places: Any, weights: Any, out: Any) -> None:
    """out[t] = Σ_j weights[t, j] · row at places[t, j]."""
    k, n = places.shape[1], out.shape[1]
    for t in range(out.shape[0]):
        mix_rows(places[t], address(weights) + 4 * t * k, address(out) + 4 * t * n, n)


@kernel("void(float32[::1], float32[::1])")
def sigmoid(x: Any, out: Any) -> None:
    """out = σ(x)."""
    n = x.size
    for i in range(0, n, 16):
        store(address(out) + 4 * i, n - i, elementary.sigmoid(load(address(x) + 4 * i, n - i)))


@kernel("void(float32[::1], float32[::1], float32[::1])")
def gate(x: Any, g: Any, out: Any) -> None:
    """out = x ⊙ σ(g)."""
    n = x.size
    for i in range(0, n, 16):
        opening = elementary.sigmoid(load(address(g) + 4 * i, n - i))
        store(address(out) + 4 * i, n - i, load(address(x) + 4 * i, n - i) * opening)


@kernel("void(float32[::1], float32[::1], float64, float64, float32[::1])")
def situ(g: Any, u: Any, beta: float, linear_beta: float, out: Any) -> None:
    """out = SiTU(g, u); linear_beta 0: u is not squashed."""
    n = g.size
    for i in range(0, n, 16):
        a, b = load(address(g) + 4 * i, n - i), load(address(u) + 4 * i, n - i)
        store(address(out) + 4 * i, n - i, elementary.situ(a, b, beta, linear_beta))


@inline
def input_row(u: Any, history: Any, row: int) -> Address:
    """Address of row `row` of u; negative ones lie in the history, -1 is its last."""
    n = u.shape[1]
    return address(u) + 4 * n * row if row >= 0 else address(history) + 4 * n * (row + history.shape[0])


@kernel("void(float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1], float32[:,::1])")
def short_conv(u: Any, weight: Any, history: Any, out: Any, new_history: Any) -> None:
    """Depthwise causal convolution, oldest tap first, then z σ(z). weight [P, K], history [K-1, P]."""
    tokens, n = u.shape
    before = history.shape[0]
    taps = np.zeros(16 * (before + 1), np.float32)
    for c in range(0, n, 16):
        here = min(16, n - c)
        for i in range(here):
            for j in range(before + 1):
                taps[16 * j + i] = weight[c + i, j]
        for t in range(tokens):
            acc = zero()
            for j in range(before + 1):
                x = load(input_row(u, history, t + j - before) + 4 * c, here)
                acc = fma(load(address(taps) + 64 * j, 16), x, acc)
            store(address(out) + 4 * (t * n + c), here, acc * elementary.sigmoid(acc))
        for j in range(before):
            x = load(input_row(u, history, tokens + j - before) + 4 * c, here)
            store(address(new_history) + 4 * (j * n + c), here, x)
    hold(taps)


@kernel("void(float32[:,:,::1], float32[::1], boolean, float64, float32[:,:,::1])")
def decay(u: Any, a_log: Any, bounded: bool, bound: float, out: Any) -> None:
    """out = exp(bound · σ(e^a u)), or exp(−e^a softplus(u)), per head."""
    heads, n = u.shape[1], u.shape[2]
    for h in range(heads):
        rate = exp(lanes(a_log[h]))
        for t in range(u.shape[0]):
            offset = 4 * (t * heads + h) * n
            for i in range(0, n, 16):
                x = load(address(u) + offset + 4 * i, n - i)
                exponent = elementary.sigmoid(rate * x) * bound if bounded else rate * softplus(x) * -1.0
                store(address(out) + offset + 4 * i, n - i, exp(exponent))


@kernel("void(float32[:,::1], float32[::1], boolean, float64, float64, int64[:,::1], float32[:,::1])")
def route(logits: Any, bias: Any, renormalize: bool, eps: float, scaling: float, ids: Any, weights: Any) -> None:
    """The largest σ + bias per row, ties to the lowest id, best first; weights are the unbiased σ, over their
    sum + eps when renormalised.
    """
    n, k = logits.shape[1], ids.shape[1]
    scores = np.empty(n, np.float32)
    best = np.empty(k, np.float32)
    for t in range(logits.shape[0]):
        for i in range(0, n, 16):
            s = elementary.sigmoid(load(address(logits) + 4 * (t * n + i), n - i))
            store(address(scores) + 4 * i, n - i, s)
        for e in range(n):
            choice = scores[e] + bias[e]
            if not choice >= -np.inf:  # NaN loses against everything
                choice = np.float32(-np.inf)
            j = min(e, k)
            if j == k and not choice > best[k - 1]:
                continue
            j = min(j, k - 1)
            while j > 0 and choice > best[j - 1]:
                best[j], ids[t, j] = best[j - 1], ids[t, j - 1]
                j -= 1
            best[j], ids[t, j] = choice, e
        chosen_sum = np.float32(0.0)
        for j in range(k):
            weights[t, j] = scores[ids[t, j]]
            chosen_sum += weights[t, j]
        for j in range(k):
            if renormalize and k > 1:
                weights[t, j] /= chosen_sum + np.float32(eps)
            weights[t, j] *= np.float32(scaling)
    hold(scores)
