"""The safetensors file format: 8 bytes of header length, a JSON header, then the tensors without gaps.

A span says where a tensor's bytes lie, so that they can be read with any kind of I/O; the official library gives
tensors, not offsets. This file knows the format, never the model.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.config import require_regular
from runtime.errors import CheckpointError, unreadable

# fmt: off
ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
# fmt: on
MAX_HEADER_NBYTES = 100_000_000
"""The format's own limit."""

FETCH_AGAIN = "; fetch the file again"
"""Ends what is said of one file; a list of them says it once."""


class TensorSpan(NamedTuple):
    """Where one tensor lies: `nbytes` bytes from `offset` (from the start of the file) of the file `path`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """One file: its header's bytes, its tensors by ascending offset, its size, and the size the header promises."""

    path: Path
    raw: bytes
    spans: list[TensorSpan]
    file_nbytes: int
    promised_nbytes: int

    @property
    def truncated(self) -> list[TensorSpan]:
        """The tensors whose bytes are not all in the file."""
        return [span for span in self.spans if span.offset + span.nbytes > self.file_nbytes]


def read_header(path: Path) -> list[TensorSpan]:
    """The spans of an undamaged file, by ascending offset. Raises CheckpointError, also for a truncated file."""
    header = scan(path)
    for span in header.truncated:
        raise CheckpointError(f"{path}: {truncation(span, header.file_nbytes)}; fetch the file again")
    return header.spans


def truncation(span: TensorSpan, file_nbytes: int) -> str:
    """What is missing of a truncated tensor."""
    got = max(0, file_nbytes - span.offset)
    return f"{span.name} is truncated: wanted {span.nbytes} bytes at offset {span.offset}, got {got}"


def scan(path: Path) -> Header:
    """The header of a file that may be truncated behind its header.

    Raises CheckpointError for other damage, StorageError when it cannot be read.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            file_nbytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            header_nbytes = int.from_bytes(start, "little")
            if len(start) < 8:
                raise _damaged(path, f"it has {file_nbytes} bytes, too few for a safetensors file")
            if header_nbytes > MAX_HEADER_NBYTES or 8 + header_nbytes > file_nbytes:
                raise _damaged(path, f"its header should have {header_nbytes} bytes, the whole file has {file_nbytes}")
            raw = file.read(header_nbytes)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(raw) < header_nbytes:
        raise _damaged(path, f"its header should have {header_nbytes} bytes, only {len(raw)} could be read")
    spans = _spans(path, raw)
    promised = spans[-1].offset + spans[-1].nbytes if spans else 8 + header_nbytes
    if promised < file_nbytes:
        raise _damaged(path, f"its tensors end at byte {promised}, but it has {file_nbytes} bytes")
    return Header(path, raw, spans, file_nbytes, promised)


def _spans(path: Path, raw: bytes) -> list[TensorSpan]:
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not an object")
    entries.pop("__metadata__", None)
    base = 8 + len(raw)
    spans = [_span(path, base, name, entry) for name, entry in entries.items()]
    spans.sort(key=lambda span: (span.offset, span.nbytes))
    end = base
    for span in spans:
        if span.offset != end:
            how = "overlaps the tensor before it" if span.offset < end else "leaves a gap before it"
            raise _damaged(path, f"{span.name} {how}: it starts at byte {span.offset}, not {end}")
        end += span.nbytes
    return spans


def _span(path: Path, base: int, name: str, entry: Any) -> TensorSpan:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        itemsize = ITEMSIZE.get(dtype)
    except (TypeError, KeyError, ValueError):
        raise _damaged(path, f"the header entry of {name} lacks dtype, shape or data_offsets") from None
    for n in (*shape, begin, end):
        if type(n) is not int or n < 0:
            raise _damaged(path, f"the header entry of {name} has shape {shape} and offsets [{begin}, {end}]")
    if itemsize is None:
        raise _damaged(path, f"{name} has the dtype {dtype!r}, which is unknown")
    if math.prod(shape) * itemsize != end - begin:
        raise _damaged(
            path, f"{name}: {dtype} {list(shape)} takes {math.prod(shape) * itemsize} bytes, its offsets {end - begin}"
        )
    return TensorSpan(name, dtype, shape, path, base + begin, end - begin)


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {how}{FETCH_AGAIN}")


_STRING = rb'"([^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*)"'
_MAP_START = re.compile(rb'"weight_map"\s*:\s*\{')
_MAP_ENTRY = re.compile(rb"\s*" + _STRING + rb"\s*:\s*" + _STRING + rb"\s*([,}])")
_EMPTY_MAP = re.compile(rb"\s*\}")


def read_weight_map(path: Path, block_nbytes: int = 1 << 20) -> Iterator[tuple[str, str]]:
    """The (tensor name, file name) pairs of an index file, in its order.

    The released index has 60 MB and half a million entries; they are read block by block, so that opening a
    checkpoint never holds them all. Raises CheckpointError, StorageError.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            buffer = file.read(block_nbytes)
            while not (start := _MAP_START.search(buffer)):
                if not (more := file.read(block_nbytes)):
                    raise CheckpointError(f"{path} has no weight_map object; fetch the file again")
                buffer += more
            position = start.end()
            while True:
                entry = _MAP_ENTRY.match(buffer, position)
                if entry is None:
                    if more := file.read(block_nbytes):
                        buffer, position = buffer[position:] + more, 0
                        continue
                    if _EMPTY_MAP.match(buffer, position):
                        return
                    raise CheckpointError(f"{path}: the weight_map is cut short or not JSON; fetch the file again")
                yield _text(path, entry[1]), _text(path, entry[2])
                position = entry.end()
                if entry[3] == b"}":
                    return
    except OSError as error:
        raise unreadable(path, error) from None


def _text(path: Path, raw: bytes) -> str:
    try:
        return str(json.loads(b'"' + raw + b'"')) if b"\\" in raw else raw.decode()
    except ValueError:
        raise CheckpointError(
            f"{path}: the weight_map holds {raw!r}, which is not text; fetch the file again"
        ) from None
