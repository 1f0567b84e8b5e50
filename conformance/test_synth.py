"""Synthetic checkpoints: the released format, the same bytes for the same seed, and nothing half written."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint import Checkpoint, inventory, read_header
from runtime.checkpoint.inventory import EXPERT_TENSORS, expert_inventory, trunk_inventory
from runtime.config import ModelConfig
from runtime.errors import StorageError, UsageError
from runtime.setup import shapes, synth
from runtime.setup.shapes import SHAPES, layer_lists, nest, shape_config
from runtime.setup.synth import make_ranks, synthesize, to_bf16, write_checkpoint
from runtime.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "synth-tiny.json"
PREFIX = "language_model.model.layers."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synth") / "tiny"
    synthesize("tiny", path)
    return path


def tensors(path: Path) -> dict[str, bytes]:
    """Every tensor's bytes by name."""
    found = {}
    for shard in path.glob("model*.safetensors"):
        data = shard.read_bytes()
        found |= {span.name: data[span.offset : span.offset + span.nbytes] for span in read_header(shard)}
    return found


# -- the format -----------------------------------------------------------------------------------------------------


def test_the_files_of_a_checkpoint(tiny: Path) -> None:
    shards = [f"model-{number:05}-of-000010.safetensors" for number in range(1, 11)]
    others = ["config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json"]
    assert sorted(path.name for path in tiny.iterdir()) == sorted(shards + others)
    for layer, shard in enumerate(shards[:-1]):
        assert all(span.name.startswith(f"{PREFIX}{layer}.") for span in read_header(tiny / shard))
    assert not any(span.name.startswith(PREFIX) for span in read_header(tiny / shards[-1]))


def test_the_index_says_where_everything_is(tiny: Path) -> None:
    index = json.loads((tiny / "model.safetensors.index.json").read_bytes())
    found = {span.name: path.name for path in tiny.glob("model*.safetensors") for span in read_header(path)}
    assert index["weight_map"] == found
    specs = inventory(ModelConfig.load(tiny))
    assert found.keys() == specs.keys()
    assert index["metadata"] == {"total_size": sum(spec.nbytes for spec in specs.values())}


def test_a_layers_trunk_is_one_run_and_its_experts_lie_out_of_order(tiny: Path) -> None:
    orders = []
    for layer in range(1, 9):
        names = [span.name.removeprefix(f"{PREFIX}{layer}.") for span in read_header(_shard(tiny, layer))]
        is_expert = [".experts." in f".{name}" for name in names]
        assert is_expert == sorted(is_expert)  # all of the trunk, then all of the experts
        experts = [name.split(".experts.")[1] for name in names if ".experts." in f".{name}"]
        order = [int(name.split(".")[0]) for name in experts[::6]]
        assert experts == [f"{expert}.{name}" for expert in order for name in EXPERT_TENSORS]
        assert sorted(order) == list(range(16)) != order
        orders.append(tuple(order))
    assert len(set(orders)) == 8


def _shard(path: Path, layer: int) -> Path:
    return path / f"model-{layer + 1:05}-of-000010.safetensors"


def test_the_released_dtypes_and_shapes(tiny: Path) -> None:
    specs = inventory(ModelConfig.load(tiny))
    for path in tiny.glob("model*.safetensors"):
        assert path.read_bytes()[0] % 8 == 0  # the tensors start at a multiple of 8
        for span in read_header(path):
            assert (span.dtype, span.shape) == (specs[span.name].dtype, specs[span.name].released_shape)


@pytest.mark.parametrize("vocab", [512, 4096])
def test_its_tokenizer_has_its_vocabulary(tmp_path: Path, vocab: int) -> None:
    synthesize("tiny", tmp_path / "out", layers=2, experts=4, vocab=vocab)
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert tokenizer.n_vocab == vocab
    config = ModelConfig.load(tmp_path / "out")
    assert config.eos_token_id == (tokenizer.special_ids["<|end_of_msg|>"],)
    assert config.bos_token_id == tokenizer.special_ids["[BOS]"]
    assert config.pad_token_id == tokenizer.special_ids["[PAD]"]
    text = "every part of the model"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (len(ids) < len(text)) == (vocab > 512)


def test_made_up_vocabularies() -> None:
    assert make_ranks(256) == [bytes([byte]) for byte in range(256)]
    ranks = make_ranks(163_584)
    assert len(set(ranks)) == len(ranks) == 163_584
    assert {len(rank) for rank in ranks} == {1, 2, 3}
    assert make_ranks(3840) == ranks[:3840]


def test_mlx_lm_loads_it_strictly(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from mlx_lm.utils import load_model

    write_checkpoint(shape_config("tiny", layers=3, experts=4), tmp_path / "unpadded", pad_a_log=False)
    for path in (tiny, tmp_path / "unpadded"):
        load_model(path, strict=True)


# -- the weights ----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_everywhere(tiny: Path) -> None:
    digest = hashlib.sha256()
    for name, data in sorted(tensors(tiny).items()):
        digest.update(name.encode() + data)
    assert digest.hexdigest() == json.loads(GOLDEN.read_bytes())["tensors_sha256"]


def test_a_tensor_depends_on_seed_and_name_alone(tiny: Path, tmp_path: Path) -> None:
    synthesize("tiny", tmp_path / "fewer", layers=3, experts=4)
    fewer, all_of_it = tensors(tmp_path / "fewer"), tensors(tiny)
    # The last layer has become MLA, and what has an expert axis is smaller.
    same = [
        n for n in fewer if n in all_of_it and len(fewer[n]) == len(all_of_it[n]) and f"{PREFIX}2.self_attn" not in n
    ]
    assert len(same) > 40
    assert all(fewer[name] == all_of_it[name] for name in same)

    synthesize("tiny", tmp_path / "other", layers=3, experts=4, seed=1)
    other = tensors(tmp_path / "other")
    assert not any(other[name] == fewer[name] for name in fewer)


def test_no_two_tensors_are_alike(tiny: Path) -> None:
    beginnings = [data[:64] for name, data in tensors(tiny).items() if not name.endswith("scale")]
    assert len(set(beginnings)) == len(beginnings)


def test_the_weights_make_every_part_matter(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        attention = PREFIX + "1.self_attn."
        a_log = checkpoint.read(attention + "A_log")
        assert len(set(a_log.tolist())) == 6
        assert -0.5 <= a_log.min() < a_log.max() <= 1.2
        span = checkpoint.span(attention + "A_log")
        assert not any(span.path.read_bytes()[span.offset + 24 : span.offset + span.nbytes])  # the padding
        assert _moments(checkpoint.read(attention + "dt_bias")) == pytest.approx((-1, 2), abs=0.4)
        assert _moments(checkpoint.read(attention + "q_conv1d.weight")) == pytest.approx((0, 0.5), abs=0.1)
        for name in checkpoint.trunk_names():
            values = _float(checkpoint.read(name))
            assert np.isfinite(values).all()
            mean, deviation = _moments(values)
            if "norm.weight" in name:
                assert (mean, deviation) == pytest.approx((1, 0.2), abs=0.12), name
            elif name.endswith("res_proj.weight"):
                assert (mean, deviation) == pytest.approx((0, 1.5 / 128**0.5), abs=0.04), name
            elif "bias" not in name and values.ndim == 2:
                assert abs(mean) < deviation / 5, name
        gate = _float(checkpoint.read(PREFIX + "0.mlp.gate_proj.weight"))
        assert gate.std() * 128**0.5 == pytest.approx(3, rel=0.02)  # outputs of ±3 bend β·tanh(g/β)
        expert = checkpoint.read_expert(1, 0)
        for packed, scale in ((expert[0], expert[1]), (expert[2], expert[3]), (expert[4], expert[5])):
            assert set((packed & 15).ravel().tolist()) == set((packed >> 4).ravel().tolist()) == set(range(16))
            assert np.ptp(scale) == 2
            assert len(np.unique(scale)) == 3


def _moments(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std())


def _float(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


@pytest.mark.parametrize(
    ("value", "bits"),
    [(1.0, 0x3F80), (-2.0, 0xC000), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-20, 0x3F81)],
)
def test_bf16_is_rounded_to_nearest_even(value: float, bits: int) -> None:
    assert to_bf16(np.array([value], np.float32)).tolist() == [bits]


# -- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "sizes", "trunk", "experts", "layers"),
    [
        ("slice", {}, 4_923_098_112, 31_444_697_088, ["KDA", "MLA MoE", "KDA MoE"]),
        ("slice", {"layers": 2}, 3_655_353_856, 15_722_348_544, ["KDA", "MLA MoE"]),
        ("ladder", {}, 210_025_472, 128 * 17_547_264, ["KDA", "KDA MoE", "KDA MoE", "MLA MoE", "MLA MoE"]),
        ("k3", {"layers": 2, "experts": 32}, 7_870_822_528, 32 * 17_547_264, ["KDA", "MLA MoE"]),
    ],
)
def test_the_shapes(shape: str, sizes: dict[str, int], trunk: int, experts: int, layers: list[str]) -> None:
    config = ModelConfig.from_dict(shape_config(shape, **sizes))
    kinds = [
        ("KDA" if config.is_kda(layer) else "MLA") + (" MoE" if config.is_moe(layer) else "")
        for layer in range(config.num_hidden_layers)
    ]
    assert kinds == layers
    assert sum(spec.nbytes for spec in trunk_inventory(config).values()) == trunk
    per_expert = sum(spec.nbytes for spec in expert_inventory(config).values())
    assert per_expert * config.num_experts * len(config.moe_layers) == experts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8, 93])
def test_any_number_of_layers_makes_a_model(shape: str, layers: int) -> None:
    config = ModelConfig.from_dict(shape_config(shape, layers=layers))
    assert config.num_hidden_layers == layers


@pytest.mark.parametrize("pad_a_log", [False, True])
def test_an_explicit_config(tmp_path: Path, pad_a_log: bool) -> None:
    text = dict(shape_config("tiny")["text_config"])
    kda = text.pop("linear_attn_config") | layer_lists(3, period=3) | {"num_heads": 12, "head_dim": 8}
    kda |= {"gate_lower_bound": None, "use_full_rank_gate": False, "short_conv_kernel_size": 3}
    text |= {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_token": 1, "attn_res_block_size": 2}
    text |= {"q_lora_rank": None, "hidden_size": 72, "vocab_size": 300, "latent_moe_use_norm": False}
    config = nest(text, kda)
    write_checkpoint(config, tmp_path / "odd", pad_a_log=pad_a_log)  # more heads than channels: nothing to pad
    with Checkpoint.open(tmp_path / "odd") as checkpoint:
        assert checkpoint.config == ModelConfig.from_dict(config)
        assert checkpoint.config.is_snapshot(2)
        assert not checkpoint.config.is_kda(2)
        assert checkpoint.read(PREFIX + "0.self_attn.A_log").shape == (12,)
    assert not (tmp_path / "odd" / "tiktoken.model").exists()  # 300 ids have no room for 256 bytes and 256 specials


# -- what is refused, and what is left behind -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"shape": "huge"}, "tiny, ladder, slice, k3"),
        ({"shape": "tiny", "vocab": 511}, "at least 512"),
        ({"shape": "tiny", "experts": 3}, "num_experts_per_token is 4"),
        ({"shape": "tiny", "layers": 0}, "num_hidden_layers is 0"),
        ({"shape": "tiny", "experts": 0}, "num_experts is 0"),
        ({"shape": "tiny", "top_k": -1}, "num_experts_per_token is -1"),
    ],
)
def test_sizes_that_make_no_model(tmp_path: Path, sizes: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        synthesize(out=tmp_path / "out", **sizes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "named"),
    [
        ({"layers": 10**6}, "num_hidden_layers is 1000000, but an integer from 1 to 1000"),
        ({"experts": 10**9}, "num_experts is 1000000000, but an integer from 1 to 10000"),
        ({"top_k": 10**9}, "num_experts_per_token is 1000000000"),
        ({"vocab": 10**9}, "vocab_size is 1000000000"),
    ],
)
def test_sizes_beyond_any_model_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: dict[str, int], named: str
) -> None:
    monkeypatch.setattr(shapes, "layer_lists", lambda *args, **kwargs: pytest.fail("the layers were built"))
    with pytest.raises(UsageError, match=named):
        synthesize("tiny", tmp_path / "out", **size)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_of_the_largest_model_are_counted_without_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synth, "expert_prefix", lambda *args: pytest.fail("an expert was named"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(StorageError, match="GB"):
        synthesize("tiny", tmp_path / "out", layers=1000, experts=10_000)


def test_a_directory_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(UsageError, match="not an empty directory"):
            synthesize("tiny", out)
    with pytest.raises(UsageError, match=r"cannot write to .*notes\.txt"):
        synthesize("tiny", tmp_path / "notes.txt" / "below")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    with pytest.raises(StorageError, match=r"needs 2[0-9.]+ MB, but .* has 20 MB free"):
        synthesize("tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=23_000_000))
    synthesize("tiny", tmp_path / "out")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), OSError(5, "I/O error")]
)
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, existing: bool, error: BaseException) -> None:
    out = tmp_path if existing else tmp_path / "made" / "for" / "it"
    written = []

    def interrupt(done: int, total: int) -> None:
        written.append(done)
        assert not (out / "config.json").exists()
        if done > total / 2:
            assert any(out.rglob("model*"))
            raise error

    with pytest.raises(
        StorageError if isinstance(error, OSError) else KeyboardInterrupt, match=getattr(error, "strerror", None)
    ):
        synthesize("tiny", out, progress=interrupt)
    assert written
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_leaves_none_above_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write to .*: File name too long"):
        synthesize("tiny", tmp_path / "made" / ("x" * 256))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_naming_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def interrupt(self: Path, target: Path) -> Path:
        assert not (tmp_path / "out" / "config.json").exists()  # it comes last: without it nothing is a checkpoint
        if "00007" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        synthesize("tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    total = synthesize("tiny", tmp_path / "out", layers=2, progress=lambda *counts: seen.append(counts))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_memory_does_not_grow_with_the_size() -> None:
    config = ModelConfig.from_dict(shape_config("ladder", layers=2, experts=16))
    tracemalloc.start()
    try:
        for shard in synth._shards(config, 0, pad_a_log=True):
            for name, spec in shard.tensors():
                for block in synth._blocks(name, spec, config, 0):
                    assert block.nbytes <= synth.BLOCK_NBYTES
        assert tracemalloc.get_traced_memory()[1] < 24e6
    finally:
        tracemalloc.stop()
