"""What `config.json` says about the model, read strictly.

The released file is nested: the text model lies in `text_config`, its KDA part in `text_config.linear_attn_config`.
Each key is looked for in `text_config` first and then at the root, because some conversions are flattened. A key
that changes the result is mandatory: when it is missing the file is refused, never completed with a default.
Fields keep the released names. (Kimi K3 specification 1.)
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import CheckpointError, unreadable

CONFIG_NAME = "config.json"
MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_GROUP = 32
"""Columns that share one scale."""
MXFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "group_size": MXFP4_GROUP,
    "symmetric": True,
    "strategy": "group",
    "scale_dtype": "torch.uint8",
}
"""What `quantization_config` says of the routed experts' weights, as `runtime.checkpoint.mxfp4` unpacks them."""
MAX_LAYERS = 1_000
MAX_EXPERTS = 10_000

_MISSING = object()
_LARGEST_NUMBER = 1e30  # nothing the model multiplies by is near it; also turns NaN and infinity away


@dataclass(frozen=True, slots=True)
class LinearAttnConfig:
    """Kimi Delta Attention. The two layer lists are 1-based, as released."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float | None
    """None selects the decay −exp(A_log)·softplus(u) [3.3]."""
    use_full_rank_gate: bool
    """True: `g_proj`; False: `g_a_proj` and `g_b_proj`."""
    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model. Layers are 0-based in every method."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    """None: the up branch of SiTU is not squashed [3.7]."""
    attn_res_block_size: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    latent_moe_use_norm: bool
    moe_renormalize: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int | None
    """None: one `q_proj` instead of `q_a_proj`, its norm and `q_b_proj`."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    """Always False: K3 has its own `lm_head`, and a tied file is refused."""
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    """Every id that ends a generation; one in the released file."""
    pad_token_id: int | None
    linear_attn_config: LinearAttnConfig
    mla_norm_eps: float = 1e-6
    """Of `q_a_layernorm` and `kv_a_layernorm`; not in the file, the reference uses its class default [3.4]."""

    @classmethod
    def load(cls, path: Path | str) -> ModelConfig:
        """The config of a checkpoint directory, or of a config file. Raises CheckpointError."""
        path = Path(path)
        if path.is_dir():
            path = path / CONFIG_NAME
        return cls.from_json(read_config(path), str(path))

    @classmethod
    def from_json(cls, data: bytes, where: str = CONFIG_NAME) -> ModelConfig:
        """The config of the bytes of a config file. `where` names the file in errors."""
        try:
            values = json.loads(data)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise CheckpointError(f"{where} is not JSON ({error}); fetch the file again") from None
        except RecursionError:
            raise CheckpointError(f"{where} is nested too deeply to be a config; fetch the file again") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{where} holds a {type(values).__name__}, not an object; fetch the file again")
        return cls.from_dict(values, where)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = CONFIG_NAME) -> ModelConfig:
        """The config of a parsed file. Raises CheckpointError naming the key and `where`."""
        return _read_model(_Section.of_root(values, where))

    @property
    def kda_width(self) -> int:
        """P, the width of q, k and v of a KDA layer."""
        return self.linear_attn_config.num_heads * self.linear_attn_config.head_dim

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers with routed experts, ascending."""
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    def is_kda(self, layer: int) -> bool:
        """Whether the layer's attention is KDA; else it is MLA."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether the layer's feed-forward is LatentMoE; else it is dense."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def is_snapshot(self, layer: int) -> bool:
        """Whether the residual stream is put aside, and starts anew, at this layer [3.1]."""
        return layer % self.attn_res_block_size == 0


def read_config(path: Path) -> bytes:
    """The bytes of a config file. Raises CheckpointError when it is not there, StorageError when it cannot be read."""
    try:
        require_regular(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint directory holds {CONFIG_NAME}") from None
    except OSError as error:
        raise unreadable(path, error) from None


def require_regular(path: Path) -> None:
    """Refuse what is no file, before it is opened: opening a pipe waits for somebody to write.

    Raises CheckpointError, OSError when there is nothing to look at.
    """
    if other := no_file(path):
        raise CheckpointError(f"cannot read {path}: it is not a regular file but {other}; fetch the file again")


def no_file(path: Path) -> str:
    """What is there instead of a regular file; nothing when it is one. Raises OSError when there is nothing."""
    if stat.S_ISREG(path.stat().st_mode):
        return ""
    if path.is_dir():
        return "a directory"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


class _Section:
    """One object of the file, with the object to fall back to, and the words for errors."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "", outer: _Section | None = None):
        self.values, self.where, self.prefix, self.outer = values, where, prefix, outer

    @classmethod
    def of_root(cls, values: Mapping[str, Any], where: str) -> _Section:
        """The text section, over the root. Refuses another model_type."""
        root = cls(values, where)
        nested = "text_config" in values
        allowed = ("kimi_k3",) if nested else ("kimi_k3", "kimi_linear")
        found = root.get("model_type")
        if found not in allowed:
            root.refuse("model_type", f"{' or '.join(allowed)} is what this runtime runs", found)
        return root.section("text_config", fall_back=True) if nested else root

    def refuse(self, key: str, wanted: str, found: object) -> NoReturn:
        raise CheckpointError(f"{self.where}: {self.prefix}{key} is {_short(found)}, but {wanted}")

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value of `key` here or further out; the default, or an error, when neither has it."""
        if key in self.values:
            return self.values[key]
        if self.outer is not None and key in self.outer.values:
            return self.outer.values[key]
        if default is _MISSING:
            raise CheckpointError(
                f"{self.where}: the mandatory key {self.prefix}{key} is missing; "
                "it changes every result, so there is no default: fetch the released file"
            )
        return default

    def section(self, key: str, *, fall_back: bool = False, default: Any = _MISSING) -> _Section:
        value = self.get(key, default)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object was expected", value)
        return _Section(value, self.where, f"{self.prefix}{key}.", self if fall_back else None)

    def integer(self, key: str, minimum: int = 1, maximum: int = 1 << 31, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, f"an integer from {minimum} to {maximum} was expected", value)
        return value

    def optional_integer(self, key: str, minimum: int = 1, default: Any = _MISSING) -> int | None:
        return None if self.get(key, default) is None else self.integer(key, minimum)

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:
            self.refuse(key, "a finite number was expected", value)
        return float(value)

    def positive(self, key: str) -> float:
        value = self.number(key)
        if value <= 0:
            self.refuse(key, "a positive number was expected", value)
        return value

    def boolean(self, key: str, default: Any = _MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false was expected", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self.refuse(key, "a list of integers was expected", value)
        return tuple(value)

    def require(self, key: str, wanted: Any, default: Any = _MISSING) -> None:
        """Refuse any value but `wanted` (of the same type)."""
        value = self.get(key, default)
        if value != wanted or type(value) is not type(wanted):
            self.refuse(key, f"only {json.dumps(wanted)} is implemented", value)


def _short(value: object) -> str:
    """A value as it stands in JSON, cut to a line's worth."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_model(text: _Section) -> ModelConfig:
    _refuse_other_variants(text)
    linear_beta = text.get("activation_situ_linear_beta")
    config = ModelConfig(
        hidden_size=text.integer("hidden_size"),
        num_hidden_layers=text.integer("num_hidden_layers", maximum=MAX_LAYERS),
        vocab_size=text.integer("vocab_size"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        activation_situ_beta=text.positive("activation_situ_beta"),
        activation_situ_linear_beta=None if linear_beta is None else text.positive("activation_situ_linear_beta"),
        attn_res_block_size=text.integer("attn_res_block_size"),
        intermediate_size=text.integer("intermediate_size"),
        first_k_dense_replace=text.integer("first_k_dense_replace", minimum=0),
        moe_layer_freq=text.integer("moe_layer_freq", default=1),
        num_experts=text.integer("num_experts", maximum=MAX_EXPERTS),
        num_experts_per_token=text.integer("num_experts_per_token"),
        num_shared_experts=text.integer("num_shared_experts"),
        moe_intermediate_size=_grouped(text, "moe_intermediate_size"),
        routed_expert_hidden_size=_grouped(text, "routed_expert_hidden_size"),
        latent_moe_use_norm=text.boolean("latent_moe_use_norm"),
        moe_renormalize=text.boolean("moe_renormalize", default=True),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
        num_attention_heads=text.integer("num_attention_heads"),
        q_lora_rank=text.optional_integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim"),
        v_head_dim=text.integer("v_head_dim"),
        mla_use_output_gate=text.boolean("mla_use_output_gate"),
        max_position_embeddings=text.integer("max_position_embeddings", default=1 << 20),
        tie_word_embeddings=False,
        bos_token_id=text.optional_integer("bos_token_id", minimum=0, default=None),
        eos_token_id=_stop_ids(text),
        pad_token_id=text.optional_integer("pad_token_id", minimum=0, default=None),
        linear_attn_config=_read_linear_attention(text.section("linear_attn_config")),
    )
    _check_together(text, config)
    return config


def _refuse_other_variants(text: _Section) -> None:
    """Relatives of K3 that these formulas would silently compute wrongly."""
    text.require("hidden_act", "situ")
    text.require("moe_router_activation_func", "sigmoid")
    text.require("mla_use_nope", True)
    text.require("num_expert_group", 1, default=1)
    text.require("topk_method", "noaux_tc", default="noaux_tc")
    for section in (text, text.outer):
        if section is not None:
            section.require("tie_word_embeddings", False, default=False)
    text.boolean("use_grouped_topk", default=True)  # with one group it changes nothing
    text.integer("num_nextn_predict_layers", minimum=0, default=0)  # such layers are not run
    _check_quantization(text.section("quantization_config"))


def _check_quantization(quantization: _Section) -> None:
    """Refuse experts packed in any way but MXFP4's, where the file says how they are."""
    quantization.require("format", MXFP4_FORMAT)
    quantization.require("quant_method", "compressed-tensors", default="compressed-tensors")
    if "config_groups" not in quantization.values:
        return
    groups = quantization.section("config_groups")
    if not groups.values:
        quantization.refuse("config_groups", "at least one group was expected", {})
    for name in groups.values:
        group = groups.section(name)
        group.require("format", MXFP4_FORMAT, default=MXFP4_FORMAT)
        weights = group.section("weights", default={})
        for key, wanted in MXFP4_WEIGHTS.items():
            weights.require(key, wanted, default=wanted)


def _grouped(text: _Section, key: str) -> int:
    """A width that MXFP4 cuts into groups of 32."""
    value = text.integer(key)
    if value % MXFP4_GROUP:
        text.refuse(key, f"MXFP4 needs a multiple of {MXFP4_GROUP}", value)
    return value


def _stop_ids(text: _Section) -> tuple[int, ...]:
    found = text.get("eos_token_id")
    ids = (found,) if isinstance(found, int) else text.integers("eos_token_id")
    if not ids or isinstance(found, bool) or min(ids) < 0:
        text.refuse("eos_token_id", "a token id or a list of them was expected", found)
    if text.outer is not None and text.outer.get("eos_token_id", None) is not None:
        at_root = _stop_ids(text.outer)
        if not set(at_root) <= set(ids):  # an end that the root knows would be missed
            text.refuse("eos_token_id", f"eos_token_id at the root is {_short(at_root)}: they must agree", found)
    return ids


def _read_linear_attention(kda: _Section) -> LinearAttnConfig:
    bound = kda.get("gate_lower_bound")
    if bound is not None and kda.number("gate_lower_bound") >= 0:
        kda.refuse("gate_lower_bound", "a negative number or null was expected", bound)
    return LinearAttnConfig(
        num_heads=kda.integer("num_heads"),
        head_dim=kda.integer("head_dim"),
        short_conv_kernel_size=kda.integer("short_conv_kernel_size"),
        gate_lower_bound=None if bound is None else float(bound),
        use_full_rank_gate=kda.boolean("use_full_rank_gate"),
        full_attn_layers=kda.integers("full_attn_layers"),
        kda_layers=kda.integers("kda_layers"),
    )


def _check_together(text: _Section, config: ModelConfig) -> None:
    """What no single key can show."""
    top_k, experts = config.num_experts_per_token, config.num_experts
    if top_k > experts:
        text.refuse("num_experts_per_token", f"there are only {experts} experts", top_k)
    if text.integer("num_key_value_heads") != config.num_attention_heads:
        text.refuse("num_key_value_heads", "MLA has one per attention head", text.get("num_key_value_heads"))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = getattr(config, key)
        if ids is not None and max(ids if isinstance(ids, tuple) else (ids,)) >= config.vocab_size:
            text.refuse(key, f"vocab_size is {config.vocab_size}", text.get(key))
    _check_layer_lists(text, config)


def _check_layer_lists(text: _Section, config: ModelConfig) -> None:
    """The two 1-based lists must share no layer and cover 1 to num_hidden_layers."""
    full, kda = config.linear_attn_config.full_attn_layers, config.linear_attn_config.kda_layers
    expected = set(range(1, config.num_hidden_layers + 1))
    faults = {
        "in both": set(full) & set(kda),
        "in neither": expected - set(full) - set(kda),
        "outside the model": (set(full) | set(kda)) - expected,
        "listed twice": {layer for layers in (full, kda) for layer in layers if layers.count(layer) > 1},
    }
    found = [f"{fault}: {', '.join(map(str, sorted(layers)))}" for fault, layers in faults.items() if layers]
    if found:
        raise CheckpointError(
            f"{text.where}: linear_attn_config.full_attn_layers and .kda_layers must share out the layers "
            f"1 to {config.num_hidden_layers}, but layers {'; '.join(found)}"
        )
