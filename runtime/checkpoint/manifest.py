"""What the bytes of every routed expert are: the SHA-256 of each, and a checksum of each MiB of it.

The SHA-256 is the expert's identity, for copies that are made and verified. The checksums, XXH3-64, are for reads: the
scheduler cuts an expert at multiples of a MiB from its first byte, so every slice of a read can be checked by itself,
on its own, at tens of gigabytes a second. An expert's bytes are counted from the first of `PackedExpert`, wherever its
six tensors lie.

A manifest may know some experts and not others. It is a safetensors file (`expertstream.manifest/1`):

    known    BOOL [MoE layers, experts]
    sha256   U8   [MoE layers, experts, 32]
    xxh3_64  U64  [MoE layers, experts, MiB of an expert, the last one counted whole]

and its metadata name the schema, the model's fingerprint, the bytes of an expert, and what the manifest was made from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from runtime.checkpoint.arrays import Unreadable, read_arrays, write_arrays
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CheckpointError
from runtime.home import home

SCHEMA = "expertstream.manifest/1"
CHECKSUM = "xxh3_64"
BLOCK_BYTES = 1 << 20
"""The grain of the checksums, which is that of the scheduler's cuts."""

AGAIN = "; remove it; python -m runtime verify makes a new one"
COPY_NAME = "expertstream-manifest.safetensors"
"""In a directory that `replicate` has written."""

Table = npt.NDArray[np.bool_]
"""[MoE layers, experts]"""


@dataclass(frozen=True, slots=True)
class Digest:
    """Of one expert's bytes: 32 bytes of SHA-256, and the checksums [MiB]."""

    sha256: bytes
    blocks: npt.NDArray[np.uint64]


def digest(data: memoryview) -> Digest:
    """Of all bytes of an expert."""
    return Digest(hashlib.sha256(data).digest(), np.array([checksum(block) for _, block in blocks(0, data)], np.uint64))


def checksum(block: memoryview) -> int:
    """XXH3-64, seed 0."""
    return xxhash.xxh3_64_intdigest(block)


def blocks(start: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(number, bytes) of each MiB of an expert in `data`, which begins at its byte `start`, a multiple of a MiB."""
    for at in range(0, len(data), BLOCK_BYTES):
        yield (start + at) // BLOCK_BYTES, data[at : at + BLOCK_BYTES]


class AnotherModel(CheckpointError):
    """The manifest is whole, and not this model's."""


class Manifest:
    """What is known of one model's experts. `made_from` says whose bytes were taken for right.

    Not safe to change from one thread while another one looks.
    """

    def __init__(self, checkpoint: Checkpoint, made_from: str = "") -> None:
        """One that knows nothing yet."""
        self.fingerprint, self.expert_nbytes = checkpoint.fingerprint, checkpoint.expert_nbytes
        self.made_from = made_from
        self.rows = {layer: row for row, layer in enumerate(checkpoint.config.moe_layers)}
        shape = checkpoint.experts_here.shape
        self.known: Table = np.zeros(shape, np.bool_)
        self.sha256: npt.NDArray[np.uint8] = np.zeros((*shape, 32), np.uint8)
        self.blocks: npt.NDArray[np.uint64] = np.zeros((*shape, -(-self.expert_nbytes // BLOCK_BYTES)), np.uint64)

    @property
    def nbytes(self) -> int:
        """Of its arrays: 14 MB at the released size."""
        return self.known.nbytes + self.sha256.nbytes + self.blocks.nbytes

    def get(self, layer: int, expert: int) -> Digest | None:
        """What the expert's bytes should be."""
        place = self.rows[layer], expert
        return Digest(self.sha256[place].tobytes(), self.blocks[place]) if self.known[place] else None

    def put(self, layer: int, expert: int, found: Digest) -> None:
        """From now on these are the expert's bytes."""
        place = self.rows[layer], expert
        self.sha256[place], self.blocks[place] = np.frombuffer(found.sha256, np.uint8), found.blocks
        self.known[place] = True

    def take(self, other: Manifest, where: Table) -> None:
        """Know what another manifest of the same model knows of these experts."""
        where = where & other.known
        self.sha256[where], self.blocks[where] = other.sha256[where], other.blocks[where]
        self.known |= where

    def unlike(self, other: Manifest) -> Table:
        """The experts that both know and that are not the same."""
        return np.asarray(self.known & other.known & (self.sha256 != other.sha256).any(axis=-1))

    # -- files --

    def save(self, path: Path) -> None:
        """Raises OSError, and then the file is as it was."""
        words = {
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "expert_nbytes": str(self.expert_nbytes),
            "block_nbytes": str(BLOCK_BYTES),
            "checksum": CHECKSUM,
            "made_from": self.made_from,
        }
        write_arrays(path, {"known": self.known, "sha256": self.sha256, CHECKSUM: self.blocks}, words)

    @classmethod
    def load(cls, path: Path, checkpoint: Checkpoint, advice: str = AGAIN) -> Manifest:
        """Read one of this checkpoint's. Raises CheckpointError for another model's and for a damaged file, and then
        says what to do about it."""
        try:
            arrays, words = read_arrays(path)
        except Unreadable:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{error}{advice}") from None
        if words.get("schema") != SCHEMA:
            raise CheckpointError(f"{path} is no manifest: it says {words.get('schema')!r}, wanted {SCHEMA!r}{advice}")
        manifest = cls(checkpoint, words.get("made_from", ""))
        if words.get("fingerprint") != manifest.fingerprint:
            raise AnotherModel(
                f"{path} is the manifest of another model, fingerprint {words.get('fingerprint', '')[:16]}, "
                f"not {manifest.fingerprint[:16]}"
            )
        wanted = {"known": manifest.known, "sha256": manifest.sha256, CHECKSUM: manifest.blocks}
        for name, array in wanted.items():
            found = arrays.get(name)
            if found is None or found.shape != array.shape or found.dtype != array.dtype:
                raise CheckpointError(f"{path} is damaged: {name} is not {array.dtype} {list(array.shape)}{advice}")
        manifest.known, manifest.sha256, manifest.blocks = (arrays[name] for name in wanted)
        return manifest


def manifest_path(checkpoint: Checkpoint) -> Path:
    """Where the manifest of a model is kept."""
    return home() / "manifests" / f"{checkpoint.fingerprint}.safetensors"


def load_if_there(path: Path, checkpoint: Checkpoint) -> tuple[Manifest | None, str]:
    """(the manifest, why there is none although there is a file, for a note). Never raises for a file."""
    try:
        if not path.exists():
            return None, ""
        return Manifest.load(path, checkpoint), ""
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror or error}"
