"""Copies of a checkpoint's experts as people have them on their drives."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from runtime.checkpoint import Checkpoint, read_header
from runtime.setup.shapes import RELEASED, RELEASED_KDA, TINY, layer_lists, nest
from runtime.setup.synth import write_checkpoint


def every(layer: int, expert: int) -> bool:
    """All of them."""
    return True


def write_experts(model: Path, directory: Path, choose: Callable[[int, int], bool]) -> Path:
    """One file per chosen expert, in the layout that people have on disk."""
    directory.mkdir(parents=True)
    with Checkpoint.open(model) as checkpoint:
        for layer in checkpoint.config.moe_layers:
            for expert in range(checkpoint.config.num_experts):
                if choose(layer, expert):
                    packed = checkpoint.read_expert(layer, expert)
                    (directory / f"L{layer}-E{expert}.bin").write_bytes(b"".join(part.tobytes() for part in packed))
    return directory


def rewrite(model: Path, path: Path, keep: Callable[[str], bool] = lambda _: True, seed: int = 0) -> Path:
    """The checkpoint once more: the tensors that are kept, in one file, in any order. The index still names all."""
    path.mkdir()
    for name in ("config.json", "tiktoken.model", "tokenizer_config.json"):
        shutil.copy(model / name, path)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    spans = [span for shard in sorted(model.glob("*.safetensors")) for span in read_header(shard) if keep(span.name)]
    random.Random(seed).shuffle(spans)
    header, data = {}, bytearray()
    for span in spans:
        with span.path.open("rb") as file:
            file.seek(span.offset)
            tensor = file.read(span.nbytes)
        offsets = [len(data), len(data) + span.nbytes]
        header[span.name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": offsets}
        index["weight_map"][span.name] = "model-all.safetensors"
        data += tensor
    raw = json.dumps(header).encode()
    (path / "model-all.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def large_experts(path: Path) -> Path:
    """A checkpoint with two layers of four experts of 6,684,672 bytes: seven MiB, of which the last is not whole."""
    text = RELEASED | TINY | {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_token": 2}
    text |= {"moe_intermediate_size": 2048, "routed_expert_hidden_size": 2048}
    text["num_key_value_heads"] = text["num_attention_heads"]
    write_checkpoint(nest(text, RELEASED_KDA | {"num_heads": 6, "head_dim": 32} | layer_lists(3)), path)
    return path


def flip(path: Path, at: int, bit: int = 0) -> None:
    """One bit of a file is another one."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flip_in_model(model: Path, layer: int, expert: int, at: int) -> None:
    """One bit of an expert in the shards of a checkpoint, `at` bytes from its first."""
    with Checkpoint.open(model) as checkpoint:
        span = checkpoint.expert_spans(layer, expert)[0]
    flip(span.path, span.offset + at)
