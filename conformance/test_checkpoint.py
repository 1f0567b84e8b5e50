"""A checkpoint is held whole against its config, every difference named; then read by name and by expert."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trouble import unreadable

from runtime.checkpoint import Checkpoint, inventory, read_header
from runtime.checkpoint.headers import ITEMSIZE, read_weight_map
from runtime.checkpoint.inventory import (
    EXPERT_TENSORS,
    TensorSpec,
    expert_inventory,
    expert_prefix,
    global_inventory,
    layer_inventory,
    released_name,
)
from runtime.checkpoint.survey import ExpertTable
from runtime.config import ModelConfig
from runtime.errors import CheckpointError, StorageError
from runtime.generate.engine import load_tokenizer
from runtime.setup.shapes import shape_config
from runtime.setup.synth import write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "k3-inventory.json"

PREFIX = "language_model.model.layers."
LAYERS, EXPERTS = 4, 6  # dense + KDA, KDA + MoE, KDA + MoE, MLA + MoE
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-000005.safetensors" for number in range(1, 6)]
CONFIG = shape_config("tiny", layers=LAYERS, experts=EXPERTS, top_k=2)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "original"
    write_checkpoint(CONFIG, path)
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


# -- changing files -------------------------------------------------------------------------------------------------

Tensor = dict[str, Any]  # dtype, shape, data


def load(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, in file order."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: {"dtype": entry["dtype"], "shape": entry["shape"], "data": data[slice(*entry["data_offsets"])]}
        for name, entry in entries
    }


def save(
    path: Path, tensors: dict[str, Tensor], change: Callable[[dict[str, Any]], None] = lambda header: None
) -> None:
    """Write a file of these tensors; `change` may spoil its header."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        end = len(data) + len(tensor["data"])
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": [len(data), end]}
        data += tensor["data"]
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def index_as_found(directory: Path) -> None:
    """Make the index say where the tensors are."""
    found = {name: path.name for path in sorted(directory.glob("model*.safetensors")) for name in load(path)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": found}))


def edit(directory: Path, layer: int, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a layer's file, and the index with it."""
    tensors = load(directory / SHARDS[layer])
    change(tensors)
    save(directory / SHARDS[layer], tensors)
    index_as_found(directory)


def rename(directory: Path, layer: int, old: str, new: str) -> None:
    edit(directory, layer, lambda tensors: tensors.update({new: tensors.pop(old)}))


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return str(caught.value)


# -- what there must be ---------------------------------------------------------------------------------------------


def test_the_inventory_of_the_released_model() -> None:
    golden = json.loads(GOLDEN.read_bytes())
    tensors = inventory(ModelConfig.from_dict(shape_config("k3")))
    assert len(tensors) == golden["text_tensors"]
    names = "".join(f"{name}\n" for name in sorted(tensors))
    assert hashlib.sha256(names.encode()).hexdigest() == golden["text_names_sha256"]
    assert sum(spec.nbytes for spec in tensors.values()) == golden["text_nbytes"]


def test_bytes_of_the_released_parts() -> None:
    config = ModelConfig.from_dict(shape_config("k3"))

    def nbytes(tensors: dict[str, TensorSpec]) -> int:
        return sum(spec.nbytes for spec in tensors.values())

    assert nbytes(expert_inventory(config)) == 17_547_264
    assert nbytes(global_inventory(config)) == 4_697_663_488
    assert [nbytes(layer_inventory(config, layer)) for layer in (0, 1, 3)] == [
        2_341_213_184,
        1_267_744_256,
        844_335_616,
    ]


def test_variants_have_other_tensors() -> None:
    values = shape_config("tiny")
    values["text_config"] |= {"q_lora_rank": None, "latent_moe_use_norm": False, "mla_use_output_gate": False}
    values["text_config"]["linear_attn_config"]["use_full_rank_gate"] = False
    full, variant = inventory(ModelConfig.from_dict(shape_config("tiny"))), inventory(ModelConfig.from_dict(values))
    gone = {name.removeprefix(PREFIX) for name in full.keys() - variant.keys()}
    new = {name.removeprefix(PREFIX): variant[name].shape for name in variant.keys() - full.keys()}
    assert {n for n in gone if n.startswith("0.")} == {"0.self_attn.g_proj.weight"}
    assert {n for n in gone if n.startswith("3.")} == {
        "3.self_attn.q_a_proj.weight",
        "3.self_attn.q_a_layernorm.weight",
        "3.self_attn.q_b_proj.weight",
        "3.self_attn.g_proj.weight",
        "3.block_sparse_moe.routed_expert_norm.weight",
    }
    assert new["0.self_attn.g_a_proj.weight"] == (32, 128)
    assert new["0.self_attn.g_b_proj.weight"] == (192, 32)
    assert new["3.self_attn.q_proj.weight"] == (6 * 48, 128)


@pytest.mark.parametrize(
    ("found", "released"),
    [
        (PREFIX + "1.self_attn.A_log", PREFIX + "1.self_attn.A_log"),
        ("model.layers.1.self_attn.A_log", PREFIX + "1.self_attn.A_log"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        (PREFIX + "1.mlp_res.proj_weight", PREFIX + "1.mlp_res_proj.weight"),
        (PREFIX + "1.self_attention_res.norm_weight", PREFIX + "1.self_attention_res_norm.weight"),
        ("model.output_attn_res.proj_weight", "language_model.model.output_attn_res_proj.weight"),
        (
            PREFIX + "1.block_sparse_moe.e_score_correction_bias",
            PREFIX + "1.block_sparse_moe.gate.e_score_correction_bias",
        ),
        (PREFIX + "4.self_attn.A_log", None),
        ("vision_tower.encoder.blocks.0.wqkv.weight", None),
        ("mm_projector.proj.0.weight", None),
        ("model.mtp.layers.0.weight", None),
        ("language_model.mtp.0.weight", None),
    ],
)
def test_names_and_their_aliases(found: str, released: str | None) -> None:
    assert released_name(found, LAYERS) == released


# -- reading --------------------------------------------------------------------------------------------------------


def test_every_tensor_reads_as_it_was_written(original: Path) -> None:
    written = {name: tensor for shard in SHARDS for name, tensor in load(original / shard).items()}
    with Checkpoint.open(original) as checkpoint:
        assert checkpoint.notes == []
        assert set(checkpoint.names()) == set(written) == set(inventory(checkpoint.config))
        sizes = {"trunk": 0, "experts": 0}
        for name in checkpoint.trunk_names():
            values, spec = checkpoint.read(name), inventory(checkpoint.config)[name]
            assert values.dtype == {"BF16": np.uint16, "F32": np.float32}[spec.dtype]
            assert values.shape == spec.shape
            assert written[name]["data"].startswith(values.tobytes())  # A_log is cut to the heads
            sizes["trunk"] += len(written[name]["data"])
        for layer in checkpoint.config.moe_layers:
            for expert in range(EXPERTS):
                packed = checkpoint.read_expert(layer, expert)
                for suffix, values in zip(EXPERT_TENSORS, packed, strict=True):
                    tensor = written[expert_prefix(layer, expert) + suffix]
                    assert (list(values.shape), values.tobytes()) == (tensor["shape"], tensor["data"])
                sizes["experts"] += checkpoint.expert_nbytes
        assert checkpoint.trunk_nbytes == sizes["trunk"]
        assert sum(sizes.values()) == sum(len(tensor["data"]) for tensor in written.values())


def test_shapes_of_the_small_tensors(original: Path) -> None:
    with Checkpoint.open(original) as checkpoint:
        for name, shape in {
            "A_log": (6,),
            "q_conv1d.weight": (192, 4),
            "dt_bias": (192,),
            "o_norm.weight": (32,),
        }.items():
            assert checkpoint.read(f"{PREFIX}1.self_attn.{name}").shape == shape


def test_an_expert_is_one_read_into_the_buffer_given(original: Path) -> None:
    with Checkpoint.open(original) as checkpoint:
        buffer = np.full(checkpoint.expert_nbytes + 64, 7, np.uint8)
        before = checkpoint.reads
        packed = checkpoint.read_expert(2, 3, buffer)
        assert checkpoint.reads == before + 1
        assert checkpoint.is_one_run(2, 3)
        assert all(np.shares_memory(part, buffer) for part in packed)
        assert (buffer[checkpoint.expert_nbytes :] == 7).all()
        with pytest.raises(ValueError, match="the buffer 100"):
            checkpoint.read_expert(2, 3, bytearray(100))
        spans = checkpoint.expert_spans(2, 3)
        assert [span.name for span in spans] == [expert_prefix(2, 3) + name for name in EXPERT_TENSORS]
        assert spans == tuple(s for s in read_header(spans[0].path) if s.name.startswith(expert_prefix(2, 3)))


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (1, EXPERTS), (1, -1), (LAYERS, 0)])
def test_an_expert_that_does_not_exist(original: Path, layer: int, expert: int) -> None:
    with Checkpoint.open(original) as checkpoint, pytest.raises(IndexError, match=f"{expert} in layer {layer}"):
        checkpoint.read_expert(layer, expert)


def test_scattered_tensors_take_six_reads(original: Path, copy: Path) -> None:
    one, other = expert_prefix(1, 2), "w3.weight_scale"
    edit(copy, 1, lambda tensors: tensors.update({one + other: tensors.pop(one + other)}))  # to the end
    with Checkpoint.open(original) as whole, Checkpoint.open(copy) as scattered:
        assert not scattered.is_one_run(1, 2)
        assert sum(scattered.is_one_run(1, expert) for expert in range(EXPERTS)) >= EXPERTS - 2
        assert "six reads" in " ".join(scattered.notes)
        before = scattered.reads
        for a, b in zip(whole.read_expert(1, 2), scattered.read_expert(1, 2), strict=True):
            assert np.array_equal(a, b)
        assert scattered.reads == before + 6


def test_tensors_of_two_files_are_no_run() -> None:
    table = ExpertTable(ModelConfig.from_dict(CONFIG))
    ends = np.cumsum([spec.nbytes for spec in table.specs])
    table.offset[:] = ends - [spec.nbytes for spec in table.specs]
    assert table.one_run().all()
    table.shard[1, 3, 4:] = 1
    assert np.argwhere(~table.one_run()).tolist() == [[1, 3]]


def test_partial_reads_are_continued(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(original) as checkpoint:
        whole = [part.copy() for part in checkpoint.read_expert(1, 0)]
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset))
        assert all(map(np.array_equal, checkpoint.read_expert(1, 0), whole))


def test_a_file_that_shrinks_after_opening(copy: Path) -> None:
    with Checkpoint.open(copy) as checkpoint:
        span = checkpoint.expert_spans(2, 5)[0]
        os.truncate(span.path, span.offset + 100)
        with pytest.raises(StorageError) as caught:
            checkpoint.read_expert(2, 5)
        for named in ("layer 2 expert 5", str(span.path), f"byte {span.offset}", "wanted 9792", "got 100"):
            assert named in str(caught.value)
        (copy / SHARDS[4]).unlink()
        with pytest.raises(StorageError, match=r"embed_tokens.* wanted .* got 0: No such file"):
            checkpoint.read("language_model.model.embed_tokens.weight")


def test_scale_255_is_refused_with_layer_expert_and_tensor(copy: Path) -> None:
    name = expert_prefix(3, 1) + "w2.weight_scale"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name]["data"] = tensors[name]["data"][:-1] + b"\xff"

    edit(copy, 3, spoil)
    with Checkpoint.open(copy) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"layer 3 expert 1, {name}: scale byte 255"):
            checkpoint.read_expert(3, 1)
        assert checkpoint.read_expert(3, 1, check=False).w2_scale[-1, -1] == 255


def test_a_file_being_read_stays_open(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(original) as checkpoint:
        checkpoint._files.limit = 1
        preadv, during = os.preadv, iter([(2, 0), (3, 0)])

        def read_others_first(fd: int, views: list[Any], offset: int) -> int:
            for other in during:
                checkpoint.read_expert(*other)
            return preadv(fd, views, offset)

        wanted = checkpoint.read_expert(1, 0)
        monkeypatch.setattr(os, "preadv", read_others_first)
        assert all(map(np.array_equal, checkpoint.read_expert(1, 0), wanted))
        assert len(checkpoint._files) == 1


def test_threads_share_few_descriptors(original: Path) -> None:
    with Checkpoint.open(original) as checkpoint:
        files = checkpoint._files
        files.limit = 1
        wanted = {(layer, e): checkpoint.read_expert(layer, e).w1_packed for layer in (1, 2, 3) for e in range(EXPERTS)}
        wrong: list[Any] = []

        def read(start: int) -> None:
            for step in range(100):
                layer, expert = key = (1 + (start + step) % 3, step % EXPERTS)
                if not np.array_equal(checkpoint.read_expert(layer, expert).w1_packed, wanted[key]):
                    wrong.append(key)

        threads = [threading.Thread(target=read, args=(start,)) for start in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(files) == 1
    assert len(files) == 0
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read_expert(1, 0)


def test_the_fingerprint_is_of_the_content(original: Path, copy: Path) -> None:
    def fingerprint(path: Path) -> str:
        with Checkpoint.open(path) as checkpoint:
            return checkpoint.fingerprint

    assert fingerprint(original) == fingerprint(copy)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    changed = fingerprint(copy)
    save(copy / SHARDS[0], load(copy / SHARDS[0]))  # another header for the same tensors
    assert len({fingerprint(original), changed, fingerprint(copy)}) == 3


# -- what is accepted -----------------------------------------------------------------------------------------------


def reshape(tensors: dict[str, Tensor], name: str, shape: list[int]) -> None:
    tensor = tensors[name]
    tensor["shape"] = shape
    tensor["data"] = tensor["data"][: 4 * math.prod(shape)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("A_log", [6]),
        ("A_log", [1, 1, 6, 1]),
        ("A_log", [1, 32]),
        ("dt_bias", [6, 32]),
        ("q_conv1d.weight", [192, 4]),
    ],
)
def test_other_shapes_read_the_same(original: Path, copy: Path, name: str, shape: list[int]) -> None:
    name = f"{PREFIX}1.self_attn.{name}"
    edit(copy, 1, lambda tensors: reshape(tensors, name, shape))
    with Checkpoint.open(original) as released, Checkpoint.open(copy) as other:
        assert other.notes == []
        assert np.array_equal(released.read(name), other.read(name))


@pytest.mark.parametrize(("name", "shape"), [("A_log", [7]), ("A_log", [2, 3]), ("dt_bias", [32, 6])])
def test_other_shapes_that_are_refused(copy: Path, name: str, shape: list[int]) -> None:
    edit(copy, 1, lambda tensors: reshape(tensors, f"{PREFIX}1.self_attn.{name}", shape))
    assert f"wrong shape: {PREFIX}1.self_attn.{name}" in refused(copy)


def test_padding_that_is_not_zero_is_noted(copy: Path) -> None:
    name = PREFIX + "1.self_attn.A_log"

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name]["data"] = tensors[name]["data"][:-8] + np.array([0.5, -0.5], "<f4").tobytes()

    edit(copy, 1, spoil)
    with Checkpoint.open(copy) as checkpoint:
        assert checkpoint.notes == [f"{name}: 2 entries past the 6 heads are not zero, and are not used"]


def test_aliases_and_foreign_tensors(original: Path, copy: Path) -> None:
    for shard in SHARDS:
        tensors = {name.removeprefix("language_model."): tensor for name, tensor in load(copy / shard).items()}
        save(copy / shard, tensors)
    layer = "model.layers.1."
    rename(copy, 1, layer + "mlp_res_proj.weight", layer + "mlp_res.proj_weight")
    bias = "e_score_correction_bias"
    rename(copy, 1, f"{layer}block_sparse_moe.gate.{bias}", f"{layer}block_sparse_moe.{bias}")
    small = {"dtype": "F16", "shape": [2], "data": b"abcd"}
    for name in ("vision_tower.x", "mm_projector.y", "mtp.z", "model.mtp.z", "model.layers.4.input_layernorm.weight"):
        edit(copy, 0, lambda tensors, name=name: tensors.update({name: small}))
    with Checkpoint.open(original) as released, Checkpoint.open(copy) as other:
        assert set(released.names()) == set(other.names())
        for name in released.trunk_names():
            assert np.array_equal(released.read(name), other.read(name))
        assert all(map(np.array_equal, released.read_expert(3, 4), other.read_expert(3, 4)))


def test_without_an_index(copy: Path) -> None:
    (copy / INDEX).unlink()
    Checkpoint.open(copy).close()


def test_one_file_for_everything(copy: Path) -> None:
    everything = {name: tensor for shard in SHARDS for name, tensor in load(copy / shard).items()}
    for path in (*(copy / shard for shard in SHARDS), copy / INDEX):
        path.unlink()
    save(copy / "model.safetensors", everything)
    Checkpoint.open(copy).close()


def test_absent_vision_files_do_not_matter(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_bytes())
    index["weight_map"]["vision_tower.patch_embed.weight"] = "model-00006-of-000006.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    Checkpoint.open(copy).close()


# -- what is refused ------------------------------------------------------------------------------------------------


def test_places_without_a_checkpoint(tmp_path: Path, original: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "is empty" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert "has no config.json" in refused(tmp_path)
    assert "is a file" in refused(original / "config.json")
    shutil.copy(original / "config.json", tmp_path)
    assert "no model*.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARDS[1]])
def test_a_disk_that_fails_is_no_fault_of_the_checkpoint(
    copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    unreadable(monkeypatch, copy / name)
    with pytest.raises(StorageError, match=f"^cannot read {copy / name}: Input/output error$"):
        Checkpoint.open(copy)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_places_that_may_not_be_read(copy: Path) -> None:
    for path in (copy / SHARDS[1], copy / "config.json", copy):
        path.chmod(0)
        assert "Permission denied" in refused(copy)
        path.chmod(0o755)


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARDS[1]])
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a device"])
def test_what_is_no_regular_file_is_never_opened(copy: Path, name: str, kind: str) -> None:
    (copy / name).unlink()
    if kind == "a pipe":
        os.mkfifo(copy / name)
    elif kind == "a directory":
        (copy / name).mkdir()
    else:
        (copy / name).symlink_to("/dev/zero")
    assert f"cannot read {copy / name}: it is not a regular file but {kind}" in refused(copy)


@pytest.mark.parametrize("target", [INDEX, "nowhere"])
def test_a_link_that_leads_nowhere_is_no_absent_index(copy: Path, target: str) -> None:
    (copy / INDEX).unlink()
    (copy / INDEX).symlink_to(target)
    assert f"cannot read {copy / INDEX}" in refused(copy)


def test_a_tokenizer_that_cannot_be_read_is_not_an_absent_one(copy: Path) -> None:
    with Checkpoint.open(copy) as checkpoint:
        assert load_tokenizer(checkpoint) is not None
        (copy / "tiktoken.model").unlink()
        assert load_tokenizer(checkpoint) is None
        (copy / "tiktoken.model").symlink_to("tiktoken.model")
        with pytest.raises(CheckpointError, match=r"cannot read .*tiktoken\.model"):
            load_tokenizer(checkpoint)


def first_entry(header: dict[str, Any]) -> dict[str, Any]:
    return next(iter(header.values()))


def second_entry(header: dict[str, Any]) -> dict[str, Any]:
    return list(header.values())[1]


SPOILED_HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "overlap": (lambda h: [second_entry(h).update(data_offsets=[128, 384])], "overlaps the tensor before it"),
    "gap": (lambda h: h.pop(list(h)[1]), "leaves a gap before it"),
    "trailing": (lambda h: h.pop(list(h)[-1]), "its tensors end at byte"),
    "unknown dtype": (lambda h: first_entry(h).update(dtype="F4"), "dtype 'F4', which is unknown"),
    "wrong length": (lambda h: first_entry(h).update(shape=[100]), "BF16 [100] takes 200 bytes, its offsets 256"),
    "no dtype": (lambda h: first_entry(h).pop("dtype"), "lacks dtype, shape or data_offsets"),
    "one offset": (lambda h: first_entry(h).update(data_offsets=[0]), "lacks dtype, shape or data_offsets"),
    "shape of text": (lambda h: first_entry(h).update(shape=["128"]), "has shape"),
    "negative": (lambda h: first_entry(h).update(shape=[-128], data_offsets=[256, 0]), "has shape"),
    "no entry": (lambda h: h.update({next(iter(h)): 5}), "lacks dtype"),
}


@pytest.mark.parametrize("damage", SPOILED_HEADERS)
def test_a_spoiled_header(copy: Path, damage: str) -> None:
    change, named = SPOILED_HEADERS[damage]
    path = copy / SHARDS[1]
    save(path, load(path), change)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert named in str(caught.value)
    message = refused(copy)
    assert f"unreadable file: {path}" in message
    assert named in message
    assert "missing" not in message  # the index says what the file would have held


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "has 0 bytes"),
        (b"\x05\x00\x00", "has 3 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}", f"should have {1 << 60} bytes"),
        ((500).to_bytes(8, "little") + b"{}", "should have 500 bytes"),
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xff\xfe", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
    ],
)
def test_a_file_that_is_no_safetensors(copy: Path, content: bytes, named: str) -> None:
    (copy / SHARDS[2]).write_bytes(content)
    message = refused(copy)
    assert f"1 unreadable file; fetch these files again\nunreadable file: {copy / SHARDS[2]}" in message
    assert named in message
    assert message.count("again") == 1


def test_a_truncated_file_names_its_tensors(copy: Path) -> None:
    path = copy / SHARDS[3]
    *_, cut, last = read_header(path)
    os.truncate(path, cut.offset + 10)
    message = refused(copy)
    assert "2 truncated" in message
    assert f"{cut.name} is truncated: wanted {cut.nbytes} bytes at offset {cut.offset}, got 10" in message
    assert f"{last.name} is truncated: wanted {last.nbytes} bytes at offset {last.offset}, got 0" in message
    with pytest.raises(CheckpointError, match="got 10"):
        read_header(path)


def test_everything_that_differs_is_named_at_once(copy: Path) -> None:
    moe = PREFIX + "1.block_sparse_moe."

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors.pop(PREFIX + "1.input_layernorm.weight")
        tensors.pop(expert_prefix(1, 2) + "w2.weight_packed")
        tensors[PREFIX + "1.self_attn.extra"] = {"dtype": "F32", "shape": [1], "data": b"0000"}
        tensors[moe + "routed_expert_norm.weight"].update(shape=[32, 2])
        tensors[moe + "gate.weight"].update(dtype="F16")
        tensors[expert_prefix(1, 3) + "w1.weight_scale"].update(shape=[64, 3])

    edit(copy, 1, spoil)
    edit(copy, 0, lambda tensors: tensors.update({moe + "gate.weight": load(copy / SHARDS[1])[moe + "gate.weight"]}))
    message = refused(copy)
    for named in (
        "2 missing",
        "2 wrong shape",
        "2 wrong type",
        "1 extra",
        "1 duplicate",
        f"missing: {PREFIX}1.input_layernorm.weight",
        f"missing: {expert_prefix(1, 2)}w2.weight_packed",
        f"extra: {PREFIX}1.self_attn.extra in {SHARDS[1]}",
        f"{moe}routed_expert_norm.weight in {SHARDS[1]} is [32, 2], the config wants [64]",
        f"{expert_prefix(1, 3)}w1.weight_scale in {SHARDS[1]} is [64, 3], the config wants [96, 2]",
        f"wrong type: {moe}gate.weight in {SHARDS[1]} is F16, wanted BF16",
        f"duplicate: {moe}gate.weight is in {SHARDS[0]} and in {SHARDS[1]}",
    ):
        assert named in message


@pytest.mark.parametrize("name", [*layer_inventory(ModelConfig.from_dict(CONFIG), 1), *EXPERT_TENSORS])
def test_each_missing_tensor_is_named(copy: Path, name: str) -> None:
    name = expert_prefix(1, 4) + name if name in EXPERT_TENSORS else name
    edit(copy, 1, lambda tensors: tensors.pop(name))
    assert refused(copy).endswith(f"1 missing; fetch these files again\nmissing: {name}")


def test_missing_experts_are_summed_up(copy: Path) -> None:
    experts = [name for name in load(copy / SHARDS[1]) if ".experts." in name]
    lost = [name for name in experts if name.split(".experts.")[1][0] in "0245"]
    edit(copy, 1, lambda tensors: [tensors.pop(name) for name in lost])
    summary, *named = refused(copy).splitlines()
    assert "24 missing" in summary
    assert named == [f"missing: {PREFIX}1.block_sparse_moe.experts.{which}.*" for which in ("0", "2", "{4..5}")]


def test_a_long_list_is_cut(copy: Path) -> None:
    (copy / INDEX).unlink()
    for layer in range(LAYERS):
        save(copy / SHARDS[layer], {})
    message = refused(copy)
    assert len(message.splitlines()) < 25
    counts = len(inventory(ModelConfig.from_dict(CONFIG))) - 5
    assert f"{counts} missing" in message
    assert "more" in message


def test_more_experts_than_the_config_has(copy: Path) -> None:
    values = json.loads((copy / "config.json").read_bytes())
    values["text_config"]["num_experts"] = EXPERTS - 1
    (copy / "config.json").write_text(json.dumps(values))
    message = refused(copy)
    assert "18 extra" in message
    assert f"extra: {expert_prefix(1, EXPERTS - 1)}" in message


# -- the index ------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_not_its_tensors(copy: Path) -> None:
    held = len(load(copy / SHARDS[1]))
    (copy / SHARDS[1]).unlink()
    message = refused(copy)
    assert message.endswith(
        f"1 missing file; fetch these files again\nmissing file: {SHARDS[1]}, which {INDEX} says holds {held} tensors"
    )


def test_a_tensor_in_another_file_than_the_index_says(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_bytes())
    trunk, expert = PREFIX + "1.mlp_res_norm.weight", expert_prefix(2, 1) + "w1.weight_packed"
    index["weight_map"] |= {trunk: SHARDS[0], expert: SHARDS[3], "unheard.of": SHARDS[0]}
    del index["weight_map"]["language_model.lm_head.weight"]
    (copy / INDEX).write_text(json.dumps(index))
    message = refused(copy)
    assert "2 misplaced, 1 not in the index, 1 in the index only" in message
    assert f"misplaced: {trunk} is in {SHARDS[1]}, {INDEX} says {SHARDS[0]}" in message
    assert f"misplaced: {expert} is in {SHARDS[2]}, {INDEX} says {SHARDS[3]}" in message
    assert f"not in the index: language_model.lm_head.weight in {SHARDS[4]}" in message
    assert f"in the index only: unheard.of, said to be in {SHARDS[0]}" in message


def test_a_file_that_does_not_belong_may_be_removed(copy: Path) -> None:
    shutil.copy(copy / SHARDS[1], copy / "model-00002 copy.safetensors")
    (copy / "model-junk.safetensors").write_bytes(b"junk")
    save(copy / "model-extra.safetensors", {PREFIX + "1.unheard.of": {"dtype": "U8", "shape": [1], "data": b"x"}})
    summary, *named = refused(copy).splitlines()
    assert summary.endswith("3 stray file; remove the files that do not belong")
    assert named == [
        f"stray file: {name}, which {INDEX} does not name, does not belong here; remove it"
        for name in ("model-00002 copy.safetensors", "model-extra.safetensors", "model-junk.safetensors")
    ]
    (copy / SHARDS[2]).write_bytes(b"")
    summary, *named = refused(copy).splitlines()
    assert summary.endswith("; fetch the other files again")
    assert not any("fetch" in line for line in named)


def test_a_file_that_the_index_forgot_is_no_stray(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_bytes())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != SHARDS[1]}
    (copy / INDEX).write_text(json.dumps(index))
    message = refused(copy)
    assert f"not in the index: {PREFIX}1.input_layernorm.weight in {SHARDS[1]}" in message
    assert "stray" not in message


def test_a_copy_of_a_file_without_an_index(copy: Path) -> None:
    (copy / INDEX).unlink()
    shutil.copy(copy / SHARDS[1], copy / "model-00002 copy.safetensors")
    message = refused(copy)
    assert "duplicate; remove the files that do not belong" in message
    assert f"input_layernorm.weight is in model-00002 copy.safetensors and in {SHARDS[1]}" in message


def test_files_have_the_names_that_the_index_gives_them(original: Path, copy: Path) -> None:
    index = (copy / INDEX).read_text()
    for number, shard in enumerate(SHARDS):
        (copy / shard).rename(copy / f"part{number}.bin")
        index = index.replace(shard, f"part{number}.bin")
    (copy / INDEX).write_text(index)
    with Checkpoint.open(original) as released, Checkpoint.open(copy) as other:
        assert other.fingerprint == released.fingerprint
    (copy / "part1.bin").unlink()
    assert "missing file: part1.bin, which" in refused(copy)


@pytest.mark.parametrize("name", ["..", "", ".", "../original/x", "/dev/zero", "a\0b", "\ud800", "x" * 5000])
def test_the_index_names_files_of_the_directory_only(copy: Path, name: str) -> None:
    index = json.loads((copy / INDEX).read_bytes())
    index["weight_map"]["language_model.lm_head.weight"] = name
    (copy / INDEX).write_text(json.dumps(index))
    assert "missing file: " in refused(copy)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {']
)
def test_an_index_that_is_none(copy: Path, content: bytes) -> None:
    (copy / INDEX).write_bytes(content)
    message = refused(copy)
    assert str(copy / INDEX) in message
    assert "weight_map" in message


def test_an_index_that_is_cut_short(copy: Path) -> None:
    size = (copy / INDEX).stat().st_size
    os.truncate(copy / INDEX, size // 2)
    assert "cut short" in refused(copy)


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_the_index_reads_the_same_in_any_blocks(tmp_path: Path, block: int) -> None:
    pairs = {"a": "x.safetensors", 'q"uote\\': "y", "ünï": "z", "\u2028é": "w"}
    for ascii_only in (True, False):
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": pairs, "more": {}}, ensure_ascii=ascii_only)
        (tmp_path / INDEX).write_text(text, encoding="utf-8")
        assert dict(read_weight_map(tmp_path / INDEX, block)) == pairs
    (tmp_path / INDEX).write_text('{"weight_map" : { }}')
    assert list(read_weight_map(tmp_path / INDEX, block)) == []


def test_the_index_is_never_held_whole(tmp_path: Path) -> None:
    pairs = {f"{expert_prefix(1, expert)}w1.weight_scale": "model.safetensors" for expert in range(20_000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": pairs}))
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_weight_map(tmp_path / INDEX, 1 << 14)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


# -- at the released size -------------------------------------------------------------------------------------------

MEASURE = """
import resource, sys
from runtime.checkpoint import Checkpoint
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
checkpoint = Checkpoint.open(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before)
print(sum(checkpoint.is_one_run(layer, expert) for layer in (1, 92) for expert in range(896)))
print(checkpoint.expert_spans(92, 895)[5].nbytes, len(checkpoint.read_expert(40, 77).w2_packed))
"""


def write_hollow(directory: Path, config: ModelConfig) -> None:
    """Files with the released headers and sizes, and holes for tensors."""
    templates: dict[tuple[bool, bool], tuple[list[str], str, int]] = {}
    experts = expert_inventory(config)
    with (directory / INDEX).open("w") as index:
        index.write('{"weight_map": {')
        for layer in range(config.num_hidden_layers + 1):
            last = layer == config.num_hidden_layers
            kind = (not last and config.is_kda(layer), not last and config.is_moe(layer))
            if last or kind not in templates:
                tensors = global_inventory(config) if last else layer_inventory(config, layer)
                for expert in range(config.num_experts) if kind[1] else ():
                    tensors |= {expert_prefix(layer, expert) + name: spec for name, spec in experts.items()}
                header, end = {}, 0
                for name, spec in tensors.items():
                    stop = end + math.prod(spec.released_shape) * ITEMSIZE[spec.dtype]
                    header[name] = {"dtype": spec.dtype, "shape": spec.released_shape, "data_offsets": [end, stop]}
                    end = stop
                templates[kind] = ([*tensors], json.dumps(header).replace(f"layers.{layer}.", "layers.#."), end)
            names, text, nbytes = templates[kind]
            raw = text.replace("#", str(layer)).encode()
            path = directory / f"model-{layer + 1:05}-of-000096.safetensors"
            with path.open("wb") as file:
                file.write(len(raw).to_bytes(8, "little") + raw)
                file.truncate(8 + len(raw) + nbytes)
            for name in names:
                released = name if last else ".".join([*name.split(".")[:3], str(layer), *name.split(".")[4:]])
                index.write(f'"{released}": "{path.name}", ')
        index.write('"vision_tower.x": "model-00095-of-000096.safetensors"}}')


def test_the_released_size_opens_in_bounded_memory(tmp_path: Path) -> None:
    values = shape_config("k3")
    (tmp_path / "config.json").write_text(json.dumps(values))
    try:
        write_hollow(tmp_path, ModelConfig.from_dict(values))
    except OSError as error:
        pytest.skip(f"no sparse files of this size here: {error}")
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, one_run, scale_nbytes, rows = map(int, done.stdout.split())
    assert grown < 150e6
    assert one_run == 2 * 896
    assert (scale_nbytes, rows) == (344_064, 3584)
