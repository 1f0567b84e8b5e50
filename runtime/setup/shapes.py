"""The shapes that `synth` knows, as config files: the released one and three smaller ones.

A shape is what it changes of the released text model. What it does not name is as released.
"""

from __future__ import annotations

from typing import Any

from runtime.config import MAX_EXPERTS, MAX_LAYERS, MXFP4_FORMAT, MXFP4_GROUP
from runtime.errors import UsageError
from runtime.text.tokenizer import N_SPECIAL

RELEASED: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""`text_config` of the released model, but for the token ids and the two nested objects."""

RELEASED_KDA: dict[str, Any] = {
    "num_heads": 96,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
}

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": MXFP4_FORMAT,
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "format": MXFP4_FORMAT,
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": MXFP4_GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
}

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "vocab_size": 512,
    "attn_res_block_size": 4,
    "intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 96,
    "routed_expert_hidden_size": 64,
    "num_attention_heads": 6,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
}
"""Every part in a second's work; its last snapshot layer is MLA (specification 9)."""

LADDER: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 5,
    "vocab_size": 4096,
    "attn_res_block_size": 4,
    "intermediate_size": 2048,
    "num_experts": 32,
    "num_shared_experts": 1,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "max_position_embeddings": 65536,
}
"""Experts as released over a small trunk: reads dominate, which is what drive tests want."""

SLICE: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 16384}
"""A few layers at the released dimensions: the real work per layer."""

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (TINY, {"num_heads": 6, "head_dim": 32}),
    "ladder": (LADDER, {"num_heads": 8, "head_dim": 128}),
    "slice": (SLICE, {}),
    "k3": ({}, {}),
}
"""Name → changes to `RELEASED` and to `RELEASED_KDA`."""

LARGEST = {
    "num_hidden_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
    "num_experts_per_token": MAX_EXPERTS,
    "vocab_size": 1 << 24,
}
"""The sizes that may be replaced, and how far; a made-up vocabulary has no more byte strings than that."""


def shape_config(
    shape: str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    vocab: int | None = None,
) -> dict[str, Any]:
    """The config file of a shape, with some of its sizes replaced.

    Raises UsageError for an unknown shape, or a size no model has: before anything of that size is made.
    """
    if shape not in SHAPES:
        raise UsageError(f"unknown shape {shape!r}: choose one of {', '.join(SHAPES)}")
    changes, kda_changes = SHAPES[shape]
    text, kda = RELEASED | changes, RELEASED_KDA | kda_changes
    text["num_key_value_heads"] = text["num_attention_heads"]
    replaced = {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_token": top_k,
        "vocab_size": vocab,
    }
    for key, value in replaced.items():
        if value is not None and not 1 <= value <= LARGEST[key]:
            raise UsageError(f"{key} is {value}, but an integer from 1 to {LARGEST[key]} was expected")
        text[key] = text[key] if value is None else value
    # A slice has one layer of each kind within three: dense + KDA, MLA + MoE, KDA + MoE.
    period = 2 if shape == "slice" else 4
    return nest(text, kda | layer_lists(text["num_hidden_layers"], period, end_full=shape != "slice"))


def layer_lists(layers: int, period: int = 4, *, end_full: bool = True) -> dict[str, list[int]]:
    """The two 1-based layer lists: every `period`-th layer, and as released the last one, is MLA."""
    full = [n for n in range(1, layers + 1) if n % period == 0 or (end_full and n == layers)]
    return {"full_attn_layers": full, "kda_layers": [n for n in range(1, layers + 1) if n not in full]}


def nest(text: dict[str, Any], kda: dict[str, Any]) -> dict[str, Any]:
    """A config file as released: ids at the root and in the text, nested objects in the text.

    The special ids are the last 256 of the vocabulary, in K3's order.
    """
    first_special = text["vocab_size"] - N_SPECIAL
    ids = {
        "bos_token_id": first_special,
        "eos_token_id": first_special + 2,
        "pad_token_id": first_special + N_SPECIAL - 1,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": first_special + 21,
        "image_placeholder": "<|kimi_image_placeholder|>",
        **ids,
        "text_config": {**text, **ids, "linear_attn_config": kda, "quantization_config": QUANTIZATION},
    }
