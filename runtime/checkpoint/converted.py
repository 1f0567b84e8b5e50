"""A converted trunk: the matrices that `--trunk int8` makes at every load, made once, in a file of their own.

`expertstream-trunk-int8.safetensors`, of the form `expertstream.trunk-int8/1`, holds for every matrix that int8
changes, in the order of the inventory:

    xxh3_64      U64 [matrices, 2]   XXH3-64, seed 0, of the bytes of its values and of its scales
    NAME_scale   F16 [out]           one for each row
    NAME         I8  [out, in]       under the released name

first the checksums, then all scales, then all values. Metadata: `schema`; `fingerprint`, the checkpoint's; `rounding`,
how it was made (`checkpoint.int8`). Nothing else can vary: one checkpoint has one such header. What int8 leaves as
released is not in it, and is read from the checkpoint.

The fingerprint tells models apart by shape, not by weights; so whoever opens the file has one row of each matrix made
anew and compares its scale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.arrays import words_in
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import FETCH_AGAIN, ITEMSIZE, TensorSpan, scan
from runtime.checkpoint.int8 import empty, is_int8, quantize
from runtime.checkpoint.manifest import checksum
from runtime.errors import CheckpointError, unreadable

FILE_NAME = "expertstream-trunk-int8.safetensors"
SCHEMA = "expertstream.trunk-int8/1"
ROUNDING = "per row: max / 127 in float32, half to even, scale kept in float16"
CHECKSUMS = "xxh3_64"
AGAIN = "remove it; python -m runtime convert makes a new one"


class Sums(NamedTuple):
    """XXH3-64 of a matrix's values and of its scales."""

    values: int
    scales: int


@dataclass(frozen=True)
class Form:
    """What the file of a checkpoint looks like, whatever its weights. header: with the eight bytes of its length."""

    header: bytes
    spans: dict[str, TensorSpan]

    @classmethod
    def of(cls, checkpoint: Checkpoint, path: Path = Path(FILE_NAME)) -> Form:
        """Of this checkpoint's, at `path`."""
        shapes = {name: checkpoint.span(name).shape for name in checkpoint.trunk_names() if is_int8(name)}
        tensors: list[tuple[str, str, tuple[int, ...]]] = [(CHECKSUMS, "U64", (len(shapes), 2))]
        tensors += [(scale_name(name), "F16", shape[:1]) for name, shape in shapes.items()]
        tensors += [(name, "I8", shape) for name, shape in shapes.items()]
        words = {"schema": SCHEMA, "fingerprint": checkpoint.fingerprint, "rounding": ROUNDING}
        entries: dict[str, object] = {"__metadata__": words}
        end, places = 0, []
        for name, dtype, shape in tensors:
            nbytes = ITEMSIZE[dtype] * int(np.prod(shape))
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + nbytes)}
            places.append((end, nbytes))
            end += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        spans = {
            name: TensorSpan(name, dtype, shape, path, base + start, nbytes)
            for (name, dtype, shape), (start, nbytes) in zip(tensors, places, strict=True)
        }
        return cls(len(text).to_bytes(8, "little") + text, spans)

    @property
    def matrices(self) -> dict[str, TensorSpan]:
        """The values alone."""
        return {name: span for name, span in self.spans.items() if span.dtype == "I8"}

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(span.nbytes for span in self.spans.values())

    @property
    def head_nbytes(self) -> int:
        """Of checksums and scales, which lie in front of the values."""
        return sum(span.nbytes for span in self.spans.values() if span.dtype != "I8")


class ConvertedTrunk:
    """An opened one. `path`; `matrices`, where values lie; `scales`, float16 [out], and `sums` by released name.

    nbytes: what it keeps in memory.
    """

    def __init__(self, path: Path, form: Form, head: memoryview) -> None:
        """head: checksums and scales, as they lie in the file."""
        self.path, self.matrices, self.nbytes = path, form.matrices, len(head)
        self.scales: dict[str, npt.NDArray[np.float16]] = {}
        self.sums: dict[str, Sums] = {}
        start = form.spans[CHECKSUMS].nbytes
        sums = np.frombuffer(head[:start], "<u8").reshape(-1, 2)
        for name, (values, scales) in zip(self.matrices, sums.tolist(), strict=True):
            end = start + form.spans[scale_name(name)].nbytes
            self.scales[name] = np.frombuffer(head[start:end], "<f2")
            self.sums[name] = Sums(values, scales)
            start = end

    @classmethod
    def open(cls, path: Path, checkpoint: Checkpoint) -> ConvertedTrunk:
        """Look at everything but the values.

        Raises CheckpointError for one that is damaged or of other weights, StorageError for one that cannot be read.
        """
        form = Form.of(checkpoint, path)
        try:
            header = scan(path)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(FETCH_AGAIN, f"; {AGAIN}")) from None
        _check_words(words_in(header.raw), checkpoint, path)
        if header.spans != list(form.spans.values()):
            raise CheckpointError(f"{path} is damaged: its header is not that of this model; {AGAIN}")
        if header.truncated:
            found = f"it should have {form.nbytes:,} bytes, and has {header.file_nbytes:,}"
            raise CheckpointError(f"{path} is cut short: {found}; {AGAIN}")
        try:
            with path.open("rb") as file:
                file.seek(len(form.header))
                head = memoryview(file.read(form.head_nbytes))
        except OSError as error:
            raise unreadable(path, error) from None
        converted = cls(path, form, head)
        converted._check_scales(checkpoint)
        return converted

    def _check_scales(self, checkpoint: Checkpoint) -> None:
        """That they are those that were written, and the model's: of the first row of each matrix."""
        for name, scales in self.scales.items():
            if checksum(scales.data.cast("B")) != self.sums[name].scales:
                raise CheckpointError(damaged(self.path, scale_name(name)))
            bits = checkpoint.read_rows(name, 0, 1)
            made = empty(*bits.shape)
            quantize(bits, made, name)
            if made.scales[0] != scales[0]:
                raise CheckpointError(
                    f"{self.path} was made of other weights than those in {checkpoint.path}: row 0 of {name} has the "
                    f"scale {scales[0]:.4g}, not {made.scales[0]:.4g}; {AGAIN}"
                )


def _check_words(words: dict[str, str], checkpoint: Checkpoint, path: Path) -> None:
    """Raise CheckpointError unless the metadata are those that this checkpoint's file has."""
    if words.get("schema") != SCHEMA:
        found = f"it says {_said(words, 'schema')}, wanted {SCHEMA!r}"
        raise CheckpointError(f"{path} is no converted trunk: {found}; {AGAIN}")
    if "fingerprint" not in words:
        raise CheckpointError(f"{path} is damaged: its header does not say of which model it is; {AGAIN}")
    if words["fingerprint"] != checkpoint.fingerprint:
        raise CheckpointError(
            f"{path} is the converted trunk of another model, fingerprint {words['fingerprint'][:16]!r}, not "
            f"{checkpoint.fingerprint[:16]}: give a directory with this model's, which python -m runtime convert makes"
        )
    if words.get("rounding") != ROUNDING:
        raise CheckpointError(f"{path} was rounded otherwise: {_said(words, 'rounding')}, not {ROUNDING!r}; {AGAIN}")


def _said(words: dict[str, str], name: str) -> str:
    """One of the words, for people."""
    return repr(words[name]) if name in words else "nothing"


def damaged(path: Path, name: str) -> str:
    """For people: a tensor is not what it was."""
    return f"{path} is damaged: {name} is not as it was written; {AGAIN}"


def scale_name(name: str) -> str:
    """The name under which the scales of a matrix are kept."""
    return f"{name}_scale"


def trunk_spans(checkpoint: Checkpoint, converted: bool) -> dict[str, TensorSpan]:
    """Where every trunk tensor is read from, by its released name; with `converted`, matrices from FILE_NAME."""
    spans = {name: checkpoint.span(name) for name in checkpoint.trunk_names()}
    return spans | (Form.of(checkpoint).matrices if converted else {})
