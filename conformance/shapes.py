"""Small synthetic checkpoints in the released format, each with something that could be got wrong.

`SEEDS` are chosen so that no decision of the reference run is close. When the generator changes they have to be
found anew: `python conformance/trajectory.py [SHAPE …]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.setup.shapes import RELEASED, RELEASED_KDA, TINY, nest
from runtime.setup.synth import write_checkpoint as synthesize

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

Shape = tuple[int, list[int], dict[str, Any], dict[str, Any]]

SHAPES: dict[str, Shape] = {
    # name: (layers, MLA layers counted from 1, text model, KDA)
    # As in the specification: the last two layers are MLA, and layer 8 (from 0) is a snapshot layer too.
    "released-proportions": (9, [4, 8, 9], {}, {"num_heads": 6, "head_dim": 32}),
    # A_log as long as there are heads, not padded to head_dim.
    "unpadded-a-log": (5, [2, 5], {**SMALL, "attn_res_block_size": 3}, {"num_heads": 4, "head_dim": 16}),
    # One expert per token, whose weight is not renormalised; layer 2 (from 0) is an MLA snapshot layer.
    "top-1": (
        5,
        [3, 5],
        {**SMALL, "num_experts_per_token": 1, "attn_res_block_size": 2},
        {"num_heads": 2, "head_dim": 32},
    ),
    # More heads than channels in a head, in KDA; an odd number of MLA heads.
    "narrow-heads": (
        4,
        [4],
        {**SMALL, "num_attention_heads": 5, "attn_res_block_size": 3},
        {"num_heads": 12, "head_dim": 8},
    ),
    "every-layer-a-snapshot": (4, [2, 4], {**SMALL, "attn_res_block_size": 1}, {"num_heads": 3, "head_dim": 16}),
    "one-block": (
        6,
        [3, 6],
        {
            **SMALL,
            "attn_res_block_size": 12,
            "num_experts": 12,
            "num_experts_per_token": 6,
            "routed_scaling_factor": 2.5,
        },
        {"num_heads": 3, "head_dim": 24},
    ),
    "smallest": (
        2,
        [2],
        {
            "hidden_size": 32,
            "attn_res_block_size": 1,
            "intermediate_size": 32,
            "num_experts": 2,
            "num_experts_per_token": 1,
            "moe_intermediate_size": 32,
            "routed_expert_hidden_size": 32,
            "num_attention_heads": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        {"num_heads": 2, "head_dim": 8},
    ),
    # Latents and KDA's q and k so small that the epsilons of their norms decide (see `write_checkpoint`).
    "faint": (4, [2, 4], {**SMALL, "attn_res_block_size": 2}, {"num_heads": 3, "head_dim": 16}),
    # Every switch of the config the other way.
    "relative": (
        6,
        [3, 5],
        {
            **SMALL,
            "attn_res_block_size": 2,
            "first_k_dense_replace": 2,
            "moe_layer_freq": 3,
            "num_shared_experts": 1,
            "activation_situ_linear_beta": None,
            "latent_moe_use_norm": False,
            "moe_renormalize": False,
            "q_lora_rank": None,
            "mla_use_output_gate": False,
        },
        {
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 3,
            "gate_lower_bound": None,
            "use_full_rank_gate": False,
        },
    ),
}

SEEDS = {
    "released-proportions": 35,
    "unpadded-a-log": 6,
    "top-1": 2,
    "narrow-heads": 14,
    "every-layer-a-snapshot": 1,
    "one-block": 2,
    "smallest": 8,
    "faint": 9,
    "relative": 17,
}


def config(name: str) -> dict[str, Any]:
    """The config.json of a shape."""
    layers, mla, text_changes, kda_changes = SHAPES[name]
    text = RELEASED | TINY | {"num_hidden_layers": layers} | text_changes
    text["num_key_value_heads"] = text["num_attention_heads"]
    lists = {"full_attn_layers": mla, "kda_layers": [n for n in range(1, layers + 1) if n not in mla]}
    return nest(text, RELEASED_KDA | kda_changes | lists)


def write_checkpoint(name: str, seed: int, path: Path) -> None:
    """Write the shape's checkpoint to the new or empty directory `path`."""
    synthesize(config(name), path, seed=seed, pad_a_log=name != "unpadded-a-log")
    if name == "faint":
        _scale(path, ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "q_proj.weight", "k_proj.weight"), 2.0**-9)


def _scale(path: Path, endings: tuple[str, ...], factor: float) -> None:
    """Multiply the bf16 tensors with these names by a power of two, in place."""
    with Checkpoint.open(path) as checkpoint:
        spans = [checkpoint.span(name) for name in checkpoint.trunk_names() if name.endswith(endings)]
    for span in spans:
        bits = np.memmap(span.path, "<u2", "r+", span.offset, (span.nbytes // 2,))
        widened = (bits.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
        bits[:] = widened.view(np.uint32) >> 16
        bits.flush()
