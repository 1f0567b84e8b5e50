"""Which tensors a Kimi K3 text model has: names, shapes and dtypes, from its config alone.

The order is the order of the specification, which is also the order in which `synth` writes them. The routed
experts, half a million tensors at the released size, are described by six specs and a naming rule.
(Kimi K3 specification 2.)
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from runtime.checkpoint.headers import ITEMSIZE
from runtime.config import MXFP4_GROUP, ModelConfig

Shape = tuple[int, ...]

PREFIX = "language_model."
LAYERS = PREFIX + "model.layers."
EXPERT_TENSORS = (
    "w1.weight_packed",
    "w1.weight_scale",
    "w2.weight_packed",
    "w2.weight_scale",
    "w3.weight_packed",
    "w3.weight_scale",
)
"""In the order they have on disk and in `PackedExpert`."""


VECTORS = ("norm", "layernorm", "res_proj", "conv1d", "A_log", "dt_bias", "e_score_correction_bias")
"""Endings of names that are not matrices, whatever their shape: the rest of the trunk is."""


def is_vector(name: str) -> bool:
    """Whether the trunk tensor of this released name is no matrix."""
    return name.removesuffix(".weight").endswith(VECTORS)


def expert_file(layer: int, expert: int) -> str:
    """The name of a file that has one expert and nothing else, its tensors back to back."""
    return f"L{layer}-E{expert}.bin"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as the model wants it, and the shapes in which a file may hold it."""

    shape: Shape
    dtype: str
    stored: tuple[Shape, ...] = ()
    """The shapes accepted in a file, the released one first, axes of length 1 aside; empty: `shape` alone."""

    @property
    def released_shape(self) -> Shape:
        """The shape in the released file."""
        return self.stored[0] if self.stored else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the released file."""
        return math.prod(self.released_shape) * ITEMSIZE[self.dtype]

    def accepts(self, shape: Shape) -> bool:
        """Whether a file may hold the tensor in this shape."""
        if not self.stored:
            return shape == self.shape
        return _squeezed(shape) in {_squeezed(stored) for stored in self.stored}


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every text tensor by its released name, experts included: half a million at the released size."""
    experts = expert_inventory(config)
    tensors = global_inventory(config)
    for layer in range(config.num_hidden_layers):
        tensors |= layer_inventory(config, layer)
        if config.is_moe(layer):
            for expert in range(config.num_experts):
                prefix = expert_prefix(layer, expert)
                tensors |= {prefix + name: spec for name, spec in experts.items()}
    return tensors


def trunk_inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every text tensor that is not a routed expert's, by its released name."""
    tensors = global_inventory(config)
    for layer in range(config.num_hidden_layers):
        tensors |= layer_inventory(config, layer)
    return tensors


def global_inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """The tensors outside the layers [2.1]."""
    h, v = config.hidden_size, config.vocab_size
    return {
        PREFIX + "model.embed_tokens.weight": TensorSpec((v, h), "BF16"),
        PREFIX + "model.norm.weight": TensorSpec((h,), "BF16"),
        PREFIX + "model.output_attn_res_norm.weight": TensorSpec((h,), "BF16"),
        PREFIX + "model.output_attn_res_proj.weight": TensorSpec((1, h), "BF16"),
        PREFIX + "lm_head.weight": TensorSpec((v, h), "BF16"),
    }


def layer_inventory(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """The tensors of a layer without its routed experts [2.2-2.5]."""
    h = config.hidden_size
    tensors = {
        "input_layernorm.weight": TensorSpec((h,), "BF16"),
        "post_attention_layernorm.weight": TensorSpec((h,), "BF16"),
        "self_attention_res_norm.weight": TensorSpec((h,), "BF16"),
        "self_attention_res_proj.weight": TensorSpec((1, h), "BF16"),
        "mlp_res_norm.weight": TensorSpec((h,), "BF16"),
        "mlp_res_proj.weight": TensorSpec((1, h), "BF16"),
    }
    attention = _kda(config) if config.is_kda(layer) else _mla(config)
    tensors |= {"self_attn." + name: spec for name, spec in attention.items()}
    if config.is_moe(layer):
        tensors |= {"block_sparse_moe." + name: spec for name, spec in _moe(config).items()}
    else:
        tensors |= {"mlp." + name: spec for name, spec in _mlp(h, config.intermediate_size).items()}
    return {f"{LAYERS}{layer}.{name}": spec for name, spec in tensors.items()}


def _kda(config: ModelConfig) -> dict[str, TensorSpec]:
    kda = config.linear_attn_config
    h, p, n, d, k = config.hidden_size, config.kda_width, kda.num_heads, kda.head_dim, kda.short_conv_kernel_size
    conv = TensorSpec((p, k), "F32", stored=((p, 1, k), (p, k)))
    gate = {"g_proj.weight": TensorSpec((p, h), "BF16")}
    if not kda.use_full_rank_gate:
        gate = {"g_a_proj.weight": TensorSpec((d, h), "BF16"), "g_b_proj.weight": TensorSpec((p, d), "BF16")}
    return {
        "q_proj.weight": TensorSpec((p, h), "BF16"),
        "k_proj.weight": TensorSpec((p, h), "BF16"),
        "v_proj.weight": TensorSpec((p, h), "BF16"),
        **gate,
        "o_proj.weight": TensorSpec((h, p), "BF16"),
        "q_conv1d.weight": conv,
        "k_conv1d.weight": conv,
        "v_conv1d.weight": conv,
        "f_a_proj.weight": TensorSpec((d, h), "BF16"),
        "f_b_proj.weight": TensorSpec((p, d), "BF16"),
        "b_proj.weight": TensorSpec((n, h), "BF16"),
        # Per head, but released with head_dim entries; those past the heads are padding [2.6].
        "A_log": TensorSpec((n,), "F32", stored=((max(d, n),), (n,))),
        "dt_bias": TensorSpec((p,), "F32", stored=((p,), (n, d))),
        "o_norm.weight": TensorSpec((d,), "F32"),
    }


def _mla(config: ModelConfig) -> dict[str, TensorSpec]:
    h, n, r, q_lora = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
    nope, rope, v = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    tensors = {"q_proj.weight": TensorSpec((n * (nope + rope), h), "BF16")}
    if q_lora is not None:
        tensors = {
            "q_a_proj.weight": TensorSpec((q_lora, h), "BF16"),
            "q_a_layernorm.weight": TensorSpec((q_lora,), "BF16"),
            "q_b_proj.weight": TensorSpec((n * (nope + rope), q_lora), "BF16"),
        }
    tensors |= {
        "kv_a_proj_with_mqa.weight": TensorSpec((r + rope, h), "BF16"),
        "kv_a_layernorm.weight": TensorSpec((r,), "BF16"),
        "kv_b_proj.weight": TensorSpec((n * (nope + v), r), "BF16"),
    }
    if config.mla_use_output_gate:
        tensors["g_proj.weight"] = TensorSpec((n * v, h), "BF16")
    return tensors | {"o_proj.weight": TensorSpec((h, n * v), "BF16")}


def _mlp(hidden: int, inner: int) -> dict[str, TensorSpec]:
    return {
        "gate_proj.weight": TensorSpec((inner, hidden), "BF16"),
        "up_proj.weight": TensorSpec((inner, hidden), "BF16"),
        "down_proj.weight": TensorSpec((hidden, inner), "BF16"),
    }


def _moe(config: ModelConfig) -> dict[str, TensorSpec]:
    h, e, z = config.hidden_size, config.num_experts, config.routed_expert_hidden_size
    shared = _mlp(h, config.moe_intermediate_size * config.num_shared_experts)
    norm = {"routed_expert_norm.weight": TensorSpec((z,), "BF16")} if config.latent_moe_use_norm else {}
    return {
        "gate.weight": TensorSpec((e, h), "BF16"),
        "gate.e_score_correction_bias": TensorSpec((e,), "F32"),
        "routed_expert_down_proj.weight": TensorSpec((z, h), "BF16"),
        **norm,
        "routed_expert_up_proj.weight": TensorSpec((h, z), "BF16"),
        **{"shared_experts." + name: spec for name, spec in shared.items()},
    }


def expert_inventory(config: ModelConfig) -> dict[str, TensorSpec]:
    """The six tensors of every routed expert, in the order of `EXPERT_TENSORS`."""
    z, i = config.routed_expert_hidden_size, config.moe_intermediate_size
    specs = {
        "w1.weight_packed": TensorSpec((i, z // 2), "U8"),
        "w1.weight_scale": TensorSpec((i, z // MXFP4_GROUP), "U8"),
        "w2.weight_packed": TensorSpec((z, i // 2), "U8"),
        "w2.weight_scale": TensorSpec((z, i // MXFP4_GROUP), "U8"),
        "w3.weight_packed": TensorSpec((i, z // 2), "U8"),
        "w3.weight_scale": TensorSpec((i, z // MXFP4_GROUP), "U8"),
    }
    assert tuple(specs) == EXPERT_TENSORS
    return specs


def expert_prefix(layer: int, expert: int) -> str:
    """What precedes the six names of an expert."""
    return f"{LAYERS}{layer}.block_sparse_moe.experts.{expert}."


_IGNORED = (
    "vision_tower.",
    "vision_model.",
    "mm_projector.",
    "multi_modal_projector.",
    *(prefix + mtp for prefix in ("", PREFIX) for mtp in ("mtp", "model.mtp")),
)
_LAYER = re.compile(re.escape(LAYERS) + r"([0-9]{1,9})\.")
_RESIDUAL_ALIAS = re.compile(r"(.*(?:self_attention_res|mlp_res|output_attn_res))\.(proj|norm)_weight")
_BIAS = "e_score_correction_bias"


def released_name(name: str, num_hidden_layers: int) -> str | None:
    """The released name of a tensor found in a file [2.7]; None for one that is no part of the text model.

    Vision, multi-token prediction and layers past the last are no part of it.
    """
    if name.startswith(_IGNORED):
        return None
    if not name.startswith(PREFIX):
        name = PREFIX + name
    layer = _LAYER.match(name)
    if layer and int(layer[1]) >= num_hidden_layers:
        return None
    if alias := _RESIDUAL_ALIAS.fullmatch(name):
        return f"{alias[1]}_{alias[2]}.weight"
    if name.endswith(".block_sparse_moe." + _BIAS):
        return name.removesuffix(_BIAS) + "gate." + _BIAS
    return name
