"""Named arrays with a few words about them, in one safetensors file: what the program keeps for itself.

The words include the SHA-256 of the arrays, so that damage is found here and not by whoever relies on a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from runtime.checkpoint.headers import FETCH_AGAIN
from runtime.config import require_regular
from runtime.errors import CheckpointError
from runtime.home import write_whole

DIGEST = "data_sha256"

Array = npt.NDArray[Any]


class Unreadable(CheckpointError):
    """The file may be right, but cannot be read now."""


def pack_arrays(arrays: Mapping[str, Array], words: Mapping[str, str]) -> bytes:
    """What `write_arrays` writes."""
    return safetensors.numpy.save(dict(arrays), {**words, DIGEST: _digest(arrays)})


def write_arrays(path: Path, arrays: Mapping[str, Array], words: Mapping[str, str]) -> None:
    """Write the file whole or not at all. Raises OSError."""
    write_whole(path, pack_arrays(arrays, words))


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """(arrays by name, the words). The file is read, not mapped: a drive that fails is an error then and no signal.

    Raises CheckpointError, without advice, for one that is not there or damaged, Unreadable where the system refuses.
    """
    try:
        require_regular(path)
        data = path.read_bytes()
        arrays = safetensors.numpy.load(data)
        words = words_in(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except CheckpointError as error:
        raise CheckpointError(str(error).removesuffix(FETCH_AGAIN)) from None
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except KeyError as error:  # a type that NumPy does not have
        raise CheckpointError(f"{path} is none of this program's own files: it holds {error.args[0]}") from None
    except OSError as error:
        raise Unreadable(f"cannot read {path}: {error.strerror or error}") from None
    if words.get(DIGEST) != _digest(arrays):
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
    return arrays, words


def words_in(header: bytes) -> dict[str, str]:
    """The words in a header, which `headers.scan` took for right; what is no text is none of them."""
    words = json.loads(header).get("__metadata__")
    return {name: word for name, word in words.items() if isinstance(word, str)} if isinstance(words, dict) else {}


def _digest(arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).data.cast("B") if arrays[name].size else b"")
    return digest.hexdigest()
