"""Copies of a checkpoint's experts as people have them on their drives."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from runtime.checkpoint import Checkpoint, read_header


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
    header, data = {}, b""
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
