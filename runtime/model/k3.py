"""Kimi K3's text model: the forward pass, once, over the arithmetic of `ops` and the weights of `weights`.

Read it beside the model specification; the section of each part is in brackets, and every weight goes by its
released name. Shapes: T tokens of the call, H hidden size, Z latent width of the routed experts. There is no
position anywhere: order enters through KDA's recurrence and MLA's causal mask alone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.errors import Cancelled
from runtime.model.state import KdaState, LayerState, State, new_state
from runtime.ops import Array, LatentCache, Ops, Weight
from runtime.progress import Pulse
from runtime.weights.prefetch import Prefetch
from runtime.weights.trunk import LayerWeights, Trunk

Tap = Callable[[int, Array], None]
"""Called with each layer's index and output h [T, H], the running sum as it leaves the layer."""


class Experts(Protocol):
    """Where routed experts come from: `weights.experts.ExpertStore`."""

    def plan(
        self, layer: int, ids: npt.NDArray[np.int64], pulse: Pulse | None = None
    ) -> Generator[tuple[int, Weight], None, None]: ...

    def release(self, layer: int, expert: int) -> None: ...

    def end_of_token(self) -> None: ...


class K3:
    """The model: holds no state of a sequence, so one instance serves many."""

    def __init__(
        self, config: ModelConfig, ops: Ops, trunk: Trunk, experts: Experts, prefetch: Prefetch | None = None
    ) -> None:
        """Without `prefetch`, nothing is guessed."""
        self.config = config
        self.ops = ops
        self.trunk = trunk
        self.experts = experts
        self.prefetch = prefetch

    def new_state(self, capacity: int) -> State:
        """The state before the first token, with room for `capacity` tokens."""
        return new_state(self.config, self.ops, capacity)

    def forward(
        self,
        ids: npt.NDArray[np.int64],
        state: State,
        *,
        logits: Literal["none", "last", "all"] = "last",
        tap: Tap | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Array | None:
        """Run the tokens `ids` [T] through all layers and advance `state` by T [3.1].

        Returns the logits of the last row [1, V], of all rows [T, V], or None.
        Raises Cancelled when `cancelled()` says so, which is asked between layers and experts and while reads are
        waited for; `state` is then as it was.
        """
        config, ops, trunk = self.config, self.ops, self.trunk
        eps = config.rms_norm_eps
        snapshots: list[Array] = []
        new_layers: list[LayerState] = []
        layer = 0

        def pulse() -> None:
            if cancelled is not None and cancelled():
                raise Cancelled(f"stopped in layer {layer}, as asked")

        trunk.begin_pass(logits != "none", pulse)
        h = trunk.embed(ids)
        for layer in range(config.num_hidden_layers):
            pulse()
            w = trunk.layer(layer)
            p = h
            m = self.attn_res([*snapshots, p], w, "self_attention_res") if snapshots else p
            restart = config.is_snapshot(layer)
            if restart:
                snapshots.append(p)  # the running sum as it entered the layer, not the mixture
            x = ops.rms_norm(m, w["input_layernorm"], eps)
            y, new_layer = self.attention(layer, x, w, state.layers[layer])
            new_layers.append(new_layer)
            p = y if restart else ops.add(p, y)
            m = self.attn_res([*snapshots, p], w, "mlp_res")
            x = ops.rms_norm(m, w["post_attention_layernorm"], eps)
            f = self.feed_forward(layer, x, w, [*snapshots, p], pulse)
            h = ops.add(p, f)  # the mixtures are only ever inputs
            if tap is not None:
                tap(layer, h)
        out = None if logits == "none" else self.head([*snapshots, h], last_only=logits == "last")
        state.commit(new_layers, len(ids))
        self.experts.end_of_token()
        return out

    def head(self, sources: Sequence[Array], last_only: bool) -> Array:
        """The output mix over depth, the final norm and the vocabulary: [T or 1, V]."""
        ops, trunk = self.ops, self.trunk
        if last_only:
            last = np.array([len(sources[-1]) - 1])
            sources = [ops.rows(v, last) for v in sources]
        m = self.attn_res(sources, trunk.top, "output_attn_res")
        return trunk.linear(ops.rms_norm(m, trunk.top["norm"], self.config.rms_norm_eps), trunk.top["lm_head"])

    def attn_res(self, sources: Sequence[Array], w: LayerWeights, site: str) -> Array:
        """Attention residual: a softmax mix of the snapshots and the running sum [3.2]."""
        return self.ops.attn_res(sources, w[f"{site}_norm"], w[f"{site}_proj"], self.config.rms_norm_eps)

    def attention(self, layer: int, x: Array, w: LayerWeights, state: LayerState) -> tuple[Array, LayerState]:
        """The layer's sequence mixer, KDA or MLA: ([T, H], the layer's new state)."""
        if isinstance(state, KdaState):
            return self.kda(x, w, state)
        return self.mla(x, w, state), state

    def kda(self, x: Array, w: LayerWeights, state: KdaState) -> tuple[Array, KdaState]:
        """Kimi Delta Attention: a gated delta rule with per-channel decay [3.3]."""
        ops, linear, config = self.ops, self.trunk.linear, self.config.linear_attn_config
        n, d = config.num_heads, config.head_dim

        def mixed(name: str, history: Array) -> tuple[Array, Array]:
            u = linear(x, w[f"self_attn.{name}_proj"])
            u, history = ops.short_conv(u, w[f"self_attn.{name}_conv1d"], history)
            return ops.heads(u, n), history

        q, q_history = mixed("q", state.q_history)
        k, k_history = mixed("k", state.k_history)
        v, v_history = mixed("v", state.v_history)
        q = ops.l2_norm(q, d**-0.5)
        k = ops.l2_norm(k, 1.0)

        u = linear(linear(x, w["self_attn.f_a_proj"]), w["self_attn.f_b_proj"])
        u = ops.add(u, w["self_attn.dt_bias"])
        alpha = ops.decay(ops.heads(u, n), w["self_attn.A_log"], config.gate_lower_bound)
        beta = ops.sigmoid(linear(x, w["self_attn.b_proj"]))
        o, s = ops.delta_rule(q, k, v, alpha, beta, state.s)

        o = ops.merge_heads(ops.rms_norm(o, w["self_attn.o_norm"], self.config.rms_norm_eps))
        if config.use_full_rank_gate:
            g = linear(x, w["self_attn.g_proj"])
        else:
            g = linear(linear(x, w["self_attn.g_a_proj"]), w["self_attn.g_b_proj"])
        y = linear(ops.gate(o, g), w["self_attn.o_proj"])
        return y, KdaState(s, q_history, k_history, v_history)

    def mla(self, x: Array, w: LayerWeights, cache: LatentCache) -> Array:
        """Multi-head latent attention, gated, without positions, in the absorbed form [3.4]."""
        ops, linear, config = self.ops, self.trunk.linear, self.config
        rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        eps = config.mla_norm_eps
        if config.q_lora_rank is None:
            q = linear(x, w["self_attn.q_proj"])
        else:
            q = ops.rms_norm(linear(x, w["self_attn.q_a_proj"]), w["self_attn.q_a_layernorm"], eps)
            q = linear(q, w["self_attn.q_b_proj"])
        q = ops.heads(q, config.num_attention_heads)

        c = linear(x, w["self_attn.kv_a_proj_with_mqa"])
        latent = ops.rms_norm(ops.columns(c, 0, rank), w["self_attn.kv_a_layernorm"], eps)
        cache.append(latent, ops.columns(c, rank, rank + rope))
        # The rope channels take part although nothing is rotated: the scale counts them too.
        o = ops.latent_attention(q, cache, w["self_attn.kv_b_proj"], rank, rope, (nope + rope) ** -0.5)
        o = ops.merge_heads(o)
        if config.mla_use_output_gate:
            o = ops.gate(o, linear(x, w["self_attn.g_proj"]))
        return linear(o, w["self_attn.o_proj"])

    def feed_forward(self, layer: int, x: Array, w: LayerWeights, sources: Sequence[Array], pulse: Pulse) -> Array:
        """The dense MLP of the first layers, or the stable LatentMoE [3.5, 3.6]."""
        if not self.config.is_moe(layer):
            return self.mlp(x, w, "mlp")
        return self.latent_moe(layer, x, w, sources, pulse)

    def mlp(self, x: Array, w: LayerWeights, prefix: str) -> Array:
        """SiTU(x·gateᵀ, x·upᵀ)·downᵀ [3.7]."""
        ops, linear, config = self.ops, self.trunk.linear, self.config
        g = linear(x, w[f"{prefix}.gate_proj"])
        u = linear(x, w[f"{prefix}.up_proj"])
        a = ops.situ(g, u, config.activation_situ_beta, config.activation_situ_linear_beta)
        return linear(a, w[f"{prefix}.down_proj"])

    def route(self, x: Array, w: LayerWeights) -> tuple[npt.NDArray[np.int64], Array]:
        """The experts of each row, best first, and their weights: (ids [T, k], weights [T, k]) [3.5]."""
        return self.ops.route(
            self.trunk.linear(x, w["block_sparse_moe.gate"]),
            w["block_sparse_moe.gate.e_score_correction_bias"],
            self.config.num_experts_per_token,
            self.config.moe_renormalize,
            self.config.routed_scaling_factor,
        )

    def look_ahead(self, layer: int, sources: Sequence[Array]) -> npt.NDArray[np.int64] | None:
        """What a layer would route to if nothing were added before it: ids [T, k], or None where it does not route."""
        if layer == self.config.num_hidden_layers or not self.config.is_moe(layer):
            return None
        w = self.trunk.layer(layer)
        m = self.attn_res(sources, w, "mlp_res")
        return self.route(self.ops.rms_norm(m, w["post_attention_layernorm"], self.config.rms_norm_eps), w)[0]

    def latent_moe(self, layer: int, x: Array, w: LayerWeights, sources: Sequence[Array], pulse: Pulse) -> Array:
        """Routed experts in the latent space, beside the shared ones, which are computed while the others are read.

        Each distinct expert is asked for once and serves all its rows. `sources` are what x was mixed from: enough to
        guess what the next layer will route to, once this layer's own reads have begun.
        """
        ops, linear, config = self.ops, self.trunk.linear, self.config
        ids, weights = self.route(x, w)
        outputs: dict[int, Array] = {}
        with closing(self.experts.plan(layer, ids, pulse)) as routed:
            z = linear(x, w["block_sparse_moe.routed_expert_down_proj"])
            shared = self.mlp(x, w, "block_sparse_moe.shared_experts")
            if self.prefetch is not None:
                self.prefetch.routed(layer, ids)
                self.prefetch.guess(layer, self.look_ahead(layer + 1, [*sources[:-1], ops.add(sources[-1], shared)]))
            for expert, packed in routed:
                chosen_by = np.flatnonzero((ids == expert).any(axis=1))
                outputs[expert] = ops.expert_mlp(
                    ops.rows(z, chosen_by), packed, config.activation_situ_beta, config.activation_situ_linear_beta
                )
                self.experts.release(layer, expert)
        y = ops.combine(outputs, ids, weights)
        if config.latent_moe_use_norm:
            y = ops.rms_norm(y, w["block_sparse_moe.routed_expert_norm"], config.rms_norm_eps)
        return ops.add(linear(y, w["block_sparse_moe.routed_expert_up_proj"]), shared)
