"""Named arrays with a few words about them, in one safetensors file: what the program keeps for itself.

Any safetensors library reads these files. The words include the SHA-256 of the arrays' bytes, so that damage is found
here and not by whoever relies on a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.headers import FETCH_AGAIN, scan
from runtime.errors import CheckpointError
from runtime.home import write_whole

DTYPES = {"BOOL": "?", "U8": "u1", "U64": "<u8", "F64": "<f8"}
"""Those that are used."""

DIGEST = "data_sha256"

Array = npt.NDArray[Any]


def write_arrays(path: Path, arrays: Mapping[str, Array], words: Mapping[str, str]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    header: dict[str, Any] = {}
    data, digest = bytearray(), hashlib.sha256()
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):  # so that each is aligned
        part = np.ascontiguousarray(array).tobytes()
        digest.update(part)
        header[name] = {
            "dtype": names[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(part)],
        }
        data += part
    header["__metadata__"] = {**words, DIGEST: digest.hexdigest()}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_whole(path, len(text).to_bytes(8, "little") + text + data)


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """(arrays by name, the words). Raises CheckpointError, without advice, for a file that is not there or damaged."""
    try:
        header = scan(path)
        for span in header.truncated:
            raise CheckpointError(f"{path} is cut short in {span.name}")
        words = json.loads(header.raw).get("__metadata__", {})
        data = path.read_bytes()[8 + len(header.raw) :]
    except CheckpointError as error:
        raise CheckpointError(str(error).removesuffix(FETCH_AGAIN)) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    if not isinstance(words, dict) or words.get(DIGEST) != hashlib.sha256(data).hexdigest():
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    arrays: dict[str, Array] = {}
    for span in header.spans:
        if span.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {span.name} has the dtype {span.dtype}, which is not expected here")
        start = span.offset - 8 - len(header.raw)
        part = bytearray(data[start : start + span.nbytes])  # writable, and aligned
        arrays[span.name] = np.frombuffer(part, DTYPES[span.dtype]).reshape(span.shape)
    return arrays, {str(name): str(word) for name, word in words.items()}
