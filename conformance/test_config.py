"""config.json is read strictly: what changes a result must be there, of the right type, and implemented."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.setup.shapes import shape_config

RELEASED_FILE = Path(__file__).parents[2] / "shared" / "data" / "k3-config.json"

MANDATORY_TEXT = """
    hidden_size num_hidden_layers vocab_size rms_norm_eps hidden_act activation_situ_beta activation_situ_linear_beta
    attn_res_block_size intermediate_size first_k_dense_replace num_experts num_experts_per_token num_shared_experts
    moe_intermediate_size routed_expert_hidden_size latent_moe_use_norm moe_router_activation_func
    routed_scaling_factor num_attention_heads num_key_value_heads q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim mla_use_nope mla_use_output_gate quantization_config linear_attn_config eos_token_id
"""

MANDATORY_KDA = """
    num_heads head_dim short_conv_kernel_size gate_lower_bound use_full_rank_gate full_attn_layers kda_layers
"""

MANDATORY = [
    ("model_type",),
    *(("text_config", key) for key in MANDATORY_TEXT.split()),
    *(("text_config", "linear_attn_config", key) for key in MANDATORY_KDA.split()),
    ("text_config", "quantization_config", "format"),
]

OPTIONAL = {
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "num_expert_group": None,
    "topk_method": None,
    "model_type": None,
    "num_nextn_predict_layers": None,
}
"""Key → the value its field has when the key is absent (None: it has no field)."""


@pytest.fixture
def values() -> dict[str, Any]:
    return copy.deepcopy(shape_config("tiny"))


def edit(values: dict[str, Any], path: tuple[str, ...], value: Any = None, *, drop: bool = False) -> dict[str, Any]:
    """Set or drop a nested key; ids, which stand in both places, at the root too."""
    holder = values
    for key in path[:-1]:
        holder = holder[key]
    if drop:
        del holder[path[-1]]
        values.pop(path[-1], None)
    else:
        holder[path[-1]] = value
    return values


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(values, "/models/k3/config.json")
    message = str(caught.value)
    assert "/models/k3/config.json" in message
    assert "\n" not in message
    return message


def test_the_released_config_is_read() -> None:
    config = ModelConfig.from_dict(shape_config("k3"))
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (7168, 93, 163840)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ((163586,), 163584, 163839)
    assert config.mla_norm_eps == 1e-6
    assert config.kda_width == 12288
    assert config.moe_layers == tuple(range(1, 93))
    mla = [layer for layer in range(93) if not config.is_kda(layer)]
    assert mla == [*range(3, 88, 4), 91, 92]
    assert [layer for layer in range(93) if config.is_snapshot(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]


@pytest.mark.skipif(not RELEASED_FILE.exists(), reason=f"{RELEASED_FILE} is not here")
def test_the_shape_k3_is_the_released_file() -> None:
    assert ModelConfig.load(RELEASED_FILE) == ModelConfig.from_dict(shape_config("k3"))

    def assert_part_of(ours: dict[str, Any], released: dict[str, Any]) -> None:
        for key, value in ours.items():
            if isinstance(value, dict):
                assert_part_of(value, released[key])
            else:
                assert (key, released[key], type(released[key])) == (key, value, type(value))

    assert_part_of(shape_config("k3"), json.loads(RELEASED_FILE.read_bytes()))


@pytest.mark.parametrize("path", MANDATORY, ids=".".join)
def test_a_missing_mandatory_key_is_named(values: dict[str, Any], path: tuple[str, ...]) -> None:
    message = refused(edit(values, path, drop=True))
    assert path[-1] in message
    if path != ("model_type",):
        assert "missing" in message


@pytest.mark.parametrize("key", OPTIONAL)
def test_a_missing_optional_key_has_its_default(values: dict[str, Any], key: str) -> None:
    config = ModelConfig.from_dict(edit(values, ("text_config", key), drop=True) | {"model_type": "kimi_k3"})
    assert getattr(config, key, None) == OPTIONAL[key]


TEXT, KDA = ("text_config",), ("text_config", "linear_attn_config")

QUANTIZATION = (*TEXT, "quantization_config")
WEIGHTS = (*QUANTIZATION, "config_groups", "group_0", "weights")

WRONG: list[tuple[tuple[str, ...], Any]] = [
    (("model_type",), "kimi_linear"),
    (("model_type",), "deepseek_v3"),
    (TEXT, []),
    (KDA, None),
    ((*TEXT, "hidden_size"), True),
    ((*TEXT, "hidden_size"), 128.0),
    ((*TEXT, "hidden_size"), "128"),
    ((*TEXT, "hidden_size"), None),
    ((*TEXT, "hidden_size"), 0),
    ((*TEXT, "num_hidden_layers"), 10**12),
    ((*TEXT, "rms_norm_eps"), float("nan")),
    ((*TEXT, "rms_norm_eps"), float("inf")),
    ((*TEXT, "rms_norm_eps"), 0.0),
    ((*TEXT, "rms_norm_eps"), 10**400),
    ((*TEXT, "activation_situ_beta"), True),
    ((*TEXT, "activation_situ_beta"), None),
    ((*TEXT, "activation_situ_linear_beta"), -1.0),
    ((*TEXT, "hidden_act"), "silu"),
    ((*TEXT, "mla_use_nope"), False),
    ((*TEXT, "mla_use_nope"), 1),
    ((*TEXT, "mla_use_output_gate"), 1),
    ((*TEXT, "moe_router_activation_func"), "softmax"),
    ((*TEXT, "num_expert_group"), 4),
    ((*TEXT, "topk_method"), "greedy"),
    ((*TEXT, "moe_renormalize"), None),
    ((*TEXT, "tie_word_embeddings"), True),
    (("tie_word_embeddings",), True),
    ((*TEXT, "num_experts_per_token"), 17),
    ((*TEXT, "num_key_value_heads"), 1),
    ((*TEXT, "moe_intermediate_size"), 80),
    ((*TEXT, "routed_expert_hidden_size"), 72),
    ((*TEXT, "attn_res_block_size"), 0),
    ((*TEXT, "attn_res_block_size"), -4),
    ((*TEXT, "first_k_dense_replace"), -1),
    ((*TEXT, "moe_layer_freq"), 0),
    ((*TEXT, "q_lora_rank"), 0),
    ((*TEXT, "quantization_config"), None),
    ((*TEXT, "quantization_config", "format"), "nvfp4-pack-quantized"),
    ((*TEXT, "quantization_config", "quant_method"), "awq"),
    ((*QUANTIZATION, "config_groups"), {}),
    ((*QUANTIZATION, "config_groups"), []),
    ((*QUANTIZATION, "config_groups", "group_0"), None),
    ((*QUANTIZATION, "config_groups", "group_0", "format"), "pack-quantized"),
    ((*QUANTIZATION, "config_groups", "group_0", "weights"), "mxfp4"),
    ((*WEIGHTS, "num_bits"), 8),
    ((*WEIGHTS, "num_bits"), 4.0),
    ((*WEIGHTS, "type"), "int"),
    ((*WEIGHTS, "group_size"), 16),
    ((*WEIGHTS, "symmetric"), False),
    ((*WEIGHTS, "symmetric"), 1),
    ((*WEIGHTS, "strategy"), "channel"),
    ((*WEIGHTS, "scale_dtype"), "torch.float8_e4m3fn"),
    ((*TEXT, "use_grouped_topk"), 1),
    ((*TEXT, "num_nextn_predict_layers"), -1),
    ((*TEXT, "num_nextn_predict_layers"), "0"),
    (("eos_token_id",), 257),
    (("eos_token_id",), [258, 259]),
    (("eos_token_id",), {}),
    ((*TEXT, "eos_token_id"), []),
    ((*TEXT, "eos_token_id"), True),
    ((*TEXT, "eos_token_id"), [258, 512]),
    ((*TEXT, "bos_token_id"), 512),
    ((*TEXT, "pad_token_id"), -1),
    ((*KDA, "num_heads"), 0),
    ((*KDA, "short_conv_kernel_size"), 0),
    ((*KDA, "gate_lower_bound"), 5.0),
    ((*KDA, "gate_lower_bound"), False),
    ((*KDA, "use_full_rank_gate"), None),
    ((*KDA, "full_attn_layers"), [4, 8, 9.0]),
    ((*KDA, "kda_layers"), "1,2,3"),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{'.'.join(p)}={str(v)[:12]}" for p, v in WRONG])
def test_a_value_that_cannot_be_run_is_named(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    assert path[-1] in refused(edit(values, path, value))


@pytest.mark.parametrize(
    ("full", "kda", "named"),
    [
        ([4, 8, 9], [1, 2, 3, 5, 6], "in neither: 7"),
        ([4, 8, 9], [1, 2, 3, 4, 5, 6, 7], "in both: 4"),
        ([4, 8, 9, 12], [1, 2, 3, 5, 6, 7], "outside the model: 12"),
        ([4, 8, 9, 9], [1, 2, 3, 5, 6, 7], "listed twice: 9"),
        ([3, 7, 8], [0, 1, 2, 4, 5, 6], "outside the model: 0"),  # 0-based lists
    ],
)
def test_the_layer_lists_must_share_out_the_layers(
    values: dict[str, Any], full: list[int], kda: list[int], named: str
) -> None:
    values["text_config"]["linear_attn_config"] |= {"full_attn_layers": full, "kda_layers": kda}
    assert named in refused(values)


def test_what_may_be_null(values: dict[str, Any]) -> None:
    text = values["text_config"]
    text |= {"q_lora_rank": None, "activation_situ_linear_beta": None, "bos_token_id": None, "pad_token_id": None}
    text["linear_attn_config"]["gate_lower_bound"] = None
    config = ModelConfig.from_dict(values)
    assert config.q_lora_rank is None
    assert config.activation_situ_linear_beta is None
    assert config.bos_token_id is None
    assert config.linear_attn_config.gate_lower_bound is None


def test_several_stop_tokens(values: dict[str, Any]) -> None:
    values["text_config"]["eos_token_id"] = [258, 257]
    assert ModelConfig.from_dict(values).eos_token_id == (258, 257)


@pytest.mark.parametrize("model_type", ["kimi_k3", "kimi_linear"])
def test_a_flattened_file_is_read(values: dict[str, Any], model_type: str) -> None:
    flat = {**values.pop("text_config"), "model_type": model_type}
    assert ModelConfig.from_dict(flat) == ModelConfig.from_dict(shape_config("tiny"))


def test_the_text_comes_before_the_root(values: dict[str, Any]) -> None:
    values |= {"hidden_size": 64, "quantization_config": values["text_config"].pop("quantization_config")}
    assert ModelConfig.from_dict(values) == ModelConfig.from_dict(shape_config("tiny"))


def test_a_nested_object_does_not_borrow_from_outside(values: dict[str, Any]) -> None:
    values["text_config"]["head_dim"] = values["text_config"]["linear_attn_config"].pop("head_dim")
    assert "linear_attn_config.head_dim" in refused(values)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is not JSON"),
        (b'{"model_type": "kimi_k3"', "is not JSON"),
        (b"\xff\xfe\x00{", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "holds a list"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=named) as caught:
        ModelConfig.load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_directory_or_file(tmp_path: Path, values: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.load(path)
    path.write_text(json.dumps(values))
    assert ModelConfig.load(path) == ModelConfig.load(str(tmp_path)) == ModelConfig.from_dict(values)
