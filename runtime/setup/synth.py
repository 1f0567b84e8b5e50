"""Synthetic checkpoints in the released format: its names, dtypes, packing and file order, with random weights.

The weights make every part of the model matter (specification 9): norms and convolutions vary, gates saturate, the
decay differs by head, code 8 (−0) and three scales occur, experts lie out of order. They are a function of the
seed and the tensor's name alone: made from raw generator words by exact arithmetic, never by a library's
distributions or libm, so the same seed gives the same bytes with any version of NumPy, on any machine.

Everything is generated and written in blocks; memory does not depend on the size of the checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.inventory import (
    TensorSpec,
    expert_inventory,
    expert_prefix,
    global_inventory,
    layer_inventory,
)
from runtime.checkpoint.survey import INDEX_NAME
from runtime.config import CONFIG_NAME, ModelConfig
from runtime.errors import CheckpointError, StorageError, UsageError
from runtime.progress import Progress, Tally
from runtime.setup.shapes import shape_config
from runtime.setup.writing import missing, take_back
from runtime.text.tokenizer import N_SPECIAL, write_tokenizer
from runtime.units import size

BLOCK_NBYTES = 4 << 20
SPARE_NBYTES = 16 << 20
"""Free space asked for beyond the tensors, for index, tokenizer and the filesystem's own needs."""

PARTIAL = ".partial"
"""The subdirectory in which everything is written before it gets its name."""

GAINS = {
    "embed_tokens": 1.0,
    "lm_head": 4.0,
    "gate_proj": 3.0,
    "up_proj": 3.0,
    "down_proj": 0.4,
    "w1": 3.0,
    "w2": 0.4,
    "w3": 3.0,
    "f_b_proj": 2.0,
    "q_b_proj": 2.0,
    "block_sparse_moe.gate": 2.0,
    "self_attn.o_proj": 2.0,
}
"""Standard deviation of a matrix's output for inputs of variance 1; of a row's entries for the embedding. Else 1."""


def synthesize(
    shape: str,
    out: Path | str,
    *,
    layers: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint of a named shape (`runtime.setup.shapes`) to the new or empty directory `out`.

    The other sizes replace the shape's own. Returns the bytes of its tensors. Raises UsageError for sizes that
    make no model or an `out` that is in use, StorageError when it does not fit or cannot be written.
    """
    config = shape_config(shape, layers=layers, experts=experts, top_k=top_k, vocab=vocab)
    if config["text_config"]["vocab_size"] < 256 + N_SPECIAL:
        raise UsageError(f"a vocabulary needs 256 bytes and {N_SPECIAL} special tokens: at least {256 + N_SPECIAL}")
    return write_checkpoint(config, out, seed=seed, progress=progress)


def write_checkpoint(
    config: Mapping[str, Any],
    out: Path | str,
    *,
    seed: int = 0,
    pad_a_log: bool = True,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint for a parsed config file; as `synthesize` otherwise.

    With `pad_a_log`, A_log has head_dim entries as released, else one per head. Below 512 tokens the vocabulary has
    no room for bytes and specials, and no tokenizer is written.
    """
    try:
        model = ModelConfig.from_dict(config, "the synthetic config")
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    shards = list(_shards(model, seed, pad_a_log))
    total = sum(shard.nbytes for shard in shards)
    directory = Path(out)
    made = _claim(directory, total)
    partial = directory / PARTIAL
    published: list[Path] = []
    try:
        partial.mkdir()
        tally = Tally(progress or (lambda done, total: None), total)
        for shard in shards:
            _write_shard(partial / shard.file_name, shard, seed, tally)
        _write_index(partial / INDEX_NAME, shards, total)
        if model.vocab_size >= 256 + N_SPECIAL:
            write_tokenizer(partial, make_ranks(model.vocab_size - N_SPECIAL))
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        _publish(partial, directory, published)
    except OSError as error:
        _take_back(directory, made, published)
        hint = f"; it needs {size(total)}" if error.errno == errno.ENOSPC else ""
        raise StorageError(f"cannot write the checkpoint to {directory}: {error.strerror or error}{hint}") from None
    except BaseException:
        _take_back(directory, made, published)
        raise
    return total


def _claim(directory: Path, total: int) -> list[Path]:
    """Make sure of an empty directory with enough room; what of it and above it had to be made."""
    made = missing(directory)
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UsageError(f"{directory} is not an empty directory; give --out a new or empty one")
        existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < total + SPARE_NBYTES:
            raise StorageError(
                f"{directory} needs {size(total + SPARE_NBYTES)}, but {existing} has {size(free)} free; "
                "choose another place, or a smaller shape (--layers, --experts)"
            )
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        take_back(made)
        raise UsageError(f"cannot write to {directory}: {error.strerror or error}") from None
    return made


def _publish(partial: Path, directory: Path, published: list[Path]) -> None:
    """Give the files their names, the config last: without it nothing is a checkpoint."""
    for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
        published.append(path.rename(directory / path.name))
    partial.rmdir()


def _take_back(directory: Path, made: list[Path], published: list[Path]) -> None:
    """Remove what was written, and nothing else."""
    shutil.rmtree(directory / PARTIAL, ignore_errors=True)
    for path in published:
        path.unlink(missing_ok=True)
    take_back(made)


# -- files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shard:
    """One file to be: its tensors in order, and their bytes."""

    file_name: str
    layer: int | None
    config: ModelConfig
    seed: int
    pad_a_log: bool

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """The tensors in file order: those outside the experts together, then the experts, out of order."""
        yield from self._trunk()
        if self.layer is not None and self.config.is_moe(self.layer):
            experts = expert_inventory(self.config)
            keys = _generator(self.seed, f"order of layer {self.layer}").random_raw(self.config.num_experts)
            for expert in np.argsort(keys, kind="stable").tolist():
                yield from ((expert_prefix(self.layer, expert) + name, spec) for name, spec in experts.items())

    @property
    def nbytes(self) -> int:
        """Of all tensors; counted without going through the experts, of which there may be ten million."""
        nbytes = sum(spec.nbytes for _, spec in self._trunk())
        if self.layer is not None and self.config.is_moe(self.layer):
            nbytes += self.config.num_experts * sum(spec.nbytes for spec in expert_inventory(self.config).values())
        return nbytes

    def _trunk(self) -> Iterator[tuple[str, TensorSpec]]:
        if self.layer is None:
            yield from global_inventory(self.config).items()
            return
        for name, spec in layer_inventory(self.config, self.layer).items():
            padded = self.pad_a_log or not name.endswith("A_log")
            yield name, TensorSpec(spec.released_shape if padded else spec.shape, spec.dtype)


def _shards(config: ModelConfig, seed: int, pad_a_log: bool) -> Iterator[_Shard]:
    """Layer L in file L+1, the globals in the last, as released."""
    count = config.num_hidden_layers + 1
    for number in range(1, count + 1):
        layer = number - 1 if number < count else None
        yield _Shard(f"model-{number:05}-of-{count:06}.safetensors", layer, config, seed, pad_a_log)


def _write_shard(path: Path, shard: _Shard, seed: int, tally: Tally) -> None:
    with path.open("wb", buffering=0) as file:
        _write(file, _header(shard))
        for name, spec in shard.tensors():
            for block in _blocks(name, spec, shard.config, seed):
                _write(file, block.data.cast("B"))
                tally.add(block.nbytes)
        os.fsync(file.fileno())


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _header(shard: _Shard) -> bytes:
    """The safetensors header, padded with spaces so that the tensors start at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in shard.tensors():
        offsets = [end, end + spec.nbytes]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(path: Path, shards: list[_Shard], total: int) -> None:
    """The index, entry by entry: at the released size it has half a million."""
    with path.open("w") as file:
        file.write(f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{')
        separator = "\n"
        for shard in shards:
            for name, _ in shard.tensors():
                file.write(f'{separator}    "{name}": "{shard.file_name}"')
                separator = ",\n"
        file.write("\n  }\n}\n")


def make_ranks(count: int) -> list[bytes]:
    """A made-up vocabulary of `count` ≥ 256 byte strings: the single bytes, then pairs, then triples.

    Letters and the space come first, so that ordinary text is merged even by a small one.
    """
    order = sorted(range(256), key=lambda byte: (not (97 <= byte <= 122 or byte == 32), byte))
    ranks = [bytes([byte]) for byte in range(256)]
    for length in (2, 3):
        ranks += map(bytes, islice(product(order, repeat=length), count - len(ranks)))
    return ranks


# -- weights -------------------------------------------------------------------------------------------------------

Array = npt.NDArray[Any]

_E2M1_RMS_EXPONENT = 2
"""log2 of the root mean square of uniform codes (2.93) under scales of −1, 0, +1 (1.32), rounded."""


def _generator(seed: int, name: str) -> np.random.SFC64:
    """The generator of one tensor. Its raw words are a promise of NumPy, unlike its distributions."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return np.random.SFC64(np.random.SeedSequence(int.from_bytes(digest, "little")))


def _blocks(name: str, spec: TensorSpec, config: ModelConfig, seed: int) -> Iterator[Array]:
    """A tensor's values, flat and in order, a few MB at a time."""
    source = _generator(seed, name)
    if name.endswith(".weight_packed"):
        yield from _packed(source, spec.nbytes)
    elif name.endswith(".weight_scale"):
        # [out, in/32]: the standard deviation is gain / sqrt(in).
        yield _scales(source, spec.nbytes, _gain(name) / math.sqrt(spec.shape[1] * 32))
    elif len(spec.shape) == 2 and not name.endswith("res_proj.weight"):
        inputs = 1 if "embed_tokens" in name else spec.shape[1]
        yield from _matrix(source, math.prod(spec.shape), _gain(name) / math.sqrt(inputs))
    else:
        values = _vector(source, name, math.prod(spec.shape), config)
        yield to_bf16(values) if spec.dtype == "BF16" else values


def _gain(name: str) -> float:
    """The gain of a matrix by the end of its name."""
    stem = "." + name.rsplit(".weight", 1)[0]
    return next((gain for end, gain in GAINS.items() if stem.endswith("." + end)), 1.0)


def _packed(source: np.random.SFC64, nbytes: int) -> Iterator[Array]:
    """Uniform codes, two a byte."""
    for start in range(0, nbytes, BLOCK_NBYTES):
        size = min(BLOCK_NBYTES, nbytes - start)
        yield source.random_raw(-(-size // 8)).view(np.uint8)[:size]


def _scales(source: np.random.SFC64, nbytes: int, deviation: float) -> Array:
    """Scale bytes for weights of about this standard deviation: a power of two, half, or double."""
    mantissa, exponent = math.frexp(deviation)
    nearest = exponent if mantissa >= 0.7071 else exponent - 1
    middle = 127 + nearest - _E2M1_RMS_EXPONENT
    return source.random_raw(-(-nbytes // 8)).view(np.uint8)[:nbytes] % np.uint8(3) + np.uint8(middle - 1)


def _matrix(source: np.random.SFC64, count: int, deviation: float) -> Iterator[Array]:
    """bf16 values, uniform with this standard deviation: 16 random bits times a step, cut to bf16."""
    step = np.float32(deviation * math.sqrt(3.0) / 32768)
    wide = np.empty(1 << 17, np.float32)  # stays in the cache
    for start in range(0, count, BLOCK_NBYTES // 2):
        size = min(BLOCK_NBYTES // 2, count - start)
        words = source.random_raw(-(-size // 4)).view(np.int16)[:size]
        for at in range(0, size, wide.size):
            part = words[at : at + wide.size]
            np.multiply(part, step, out=wide[: part.size])
            part.view(np.uint16)[:] = wide.view(np.uint16)[1 : 2 * part.size : 2]
        yield words.view(np.uint16)


def _vector(source: np.random.SFC64, name: str, count: int, config: ModelConfig) -> Array:
    """The small tensors, as float32."""
    if name.endswith("A_log"):
        values = np.zeros(count)
        heads = config.linear_attn_config.num_heads
        values[:heads] = -0.5 + 1.7 * _uniform(source, heads)
    elif name.endswith("dt_bias"):
        values = -1 + 2 * _normal(source, count)
    elif name.endswith("e_score_correction_bias"):
        values = 0.15 * _normal(source, count)
    elif name.endswith("conv1d.weight"):
        values = 0.5 * _normal(source, count)
    elif name.endswith("res_proj.weight"):
        values = 1.5 / math.sqrt(count) * _normal(source, count)
    else:  # a norm
        values = 1 + 0.2 * _normal(source, count)
    return values.astype(np.float32)


def _uniform(source: np.random.SFC64, count: int) -> npt.NDArray[np.float64]:
    """Uniform in [0, 1)."""
    return (source.random_raw(count) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _normal(source: np.random.SFC64, count: int) -> npt.NDArray[np.float64]:
    """Nearly normal, mean 0 and variance 1: the sum of twelve uniforms (Irwin and Hall), less six."""
    total = np.zeros(count)
    for _ in range(12):  # in this order: floating-point addition must not be reassociated
        total += _uniform(source, count)
    return total - 6


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The nearest bf16 of finite float32 values, ties to even, as its bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
