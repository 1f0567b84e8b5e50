"""Kimi K3's tokenizer: a tiktoken rank file, a Han-first split, and 256 reserved special ids.

Three steps turn text into ids:

1. *guard*: text is cut into parts no regular expression can choke on (`_parts`);
2. *split*: `SPLIT`, tried left to right, cuts a part into pieces (words, runs of Han, up to three digits, ...);
3. *merge*: a piece that is in the rank table is its rank; otherwise its bytes are merged pairwise, lowest rank
   first, leftmost on ties, until no adjacent pair is in the table.

Steps 2 and 3 are `tiktoken`'s. Its engine, and not Python's `re`, is the right one: there `\\s` is the Unicode
property White_Space, which leaves out U+001C..U+001F. Step 1 asks `str.isspace`, which does not. A megabyte of one
character takes well under a second: the guard bounds what step 2 may backtrack over, and tiktoken, from 0.13 on,
merges a long piece in n log n (before, it took n²: a minute for a megabyte of Han).

Text has two modes. *Ordinary* text never becomes a special id, whatever it spells. *Structural* text, which only
templates write, becomes one wherever a special's spelling stands. This file knows the ids, never the chat format.

The number of ranks is whatever the file holds; the specials follow it directly. Format: specification, section 5.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from runtime.config import require_regular
from runtime.errors import CheckpointError, UsageError, unreadable
from runtime.home import write_whole

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

N_SPECIAL = 256

K3_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
"""The specials that have a name, by their distance from the first special id."""

CONTROLS = {offset: K3_NAMES[offset] for offset in (2, 3, 4, 5)}
"""The four that structure a chat. They exist in every tokenizer, named in its config or not."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Alternatives in the order in which they are tried."""

SLICE_CHARS = 400_000
RUN_CHARS = 25_000
_RUNS = re.compile(r"\s+|\S+")  # Python's own \s: exactly the characters for which str.isspace is true

_ID = re.compile(r"[0-9]{1,9}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Tokenizer:
    """Text to ids and back. Immutable, and safe to share between threads.

    Ids 0 .. `n_ranks` - 1 are byte strings, `n_ranks` .. `n_vocab` - 1 the specials. `special_ids` maps every
    special's spelling to its id.
    """

    def __init__(self, ranks: Sequence[bytes], names: Mapping[int, str] | None = None) -> None:
        """`ranks[i]` is the byte string of id i; `names` gives special ids (absolute) their spelling.

        Without `names` the specials are named as in K3. Raises CheckpointError when either is not a vocabulary.
        """
        _check_ranks(ranks)
        self.n_ranks = len(ranks)
        self.n_vocab = self.n_ranks + N_SPECIAL
        if names is None:
            names = {self.n_ranks + offset: name for offset, name in K3_NAMES.items()}
        self.special_ids = _special_ids(self.n_ranks, names)
        self.end_of_msg_id, self.open_id, self.close_id, self.sep_id = (
            self.special_ids[name] for name in CONTROLS.values()
        )
        spelled = sorted(self.special_ids, key=self.special_ids.__getitem__)
        self._bytes = [*ranks, *(name.encode() for name in spelled)]
        self._encoding = tiktoken.Encoding(
            "expertstream",
            pat_str=SPLIT,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens=self.special_ids,
        )

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a checkpoint directory.

        Raises CheckpointError naming file and line when `tiktoken.model` or `tokenizer_config.json` is missing
        or damaged, StorageError when the drive fails.
        """
        return cls(_read_ranks(Path(directory) / RANKS_FILE), _read_names(Path(directory) / CONFIG_FILE))

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: nothing in it is special. Raises UsageError on a lone surrogate."""
        check_unicode(text, "text")
        return [i for part in _parts(text) for i in self._encoding.encode_ordinary(part)]

    def encode_structural(self, text: str) -> list[int]:
        """Ids of a template's own text: every spelling of a special becomes that special."""
        check_unicode(text, "text")
        return [
            i
            for part in _parts(text)
            for i in self._encoding.encode(part, allowed_special="all", disallowed_special=())
        ]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Ids of (text, structural) segments. Each is encoded alone: no merge reaches over a boundary."""
        ids: list[int] = []
        for text, structural in segments:
            ids += self.encode_structural(text) if structural else self.encode(text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; of a special, its spelling.

        A model's vocabulary may be wider than its tokenizer; an id out there reads as the reserved token it is.
        """
        if token_id < 0:
            raise UsageError(f"token id {token_id} is negative: ids start at 0")
        return self._bytes[token_id] if token_id < self.n_vocab else _reserved(token_id).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


def check_unicode(text: str, field: str) -> None:
    """Raise UsageError, naming the field, when a lone surrogate makes `text` impossible to write as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UsageError(
            f"{field}: half a character (lone surrogate U+{ord(text[e.start]):04X}) at position {e.start}; "
            "send surrogates in pairs, or leave the character out"
        ) from None


def _parts(text: str) -> Iterator[str]:
    """Cut `text` every 400,000 characters, and every run of space or of non-space after 25,000.

    The cuts are part of the format: a piece never reaches over one, so huge inputs get these ids and no others.
    """
    for begin in range(0, len(text), SLICE_CHARS):
        part = text[begin : begin + SLICE_CHARS]
        start = 0
        if len(part) > RUN_CHARS:
            for run in _RUNS.finditer(part):
                for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                    yield part[start:cut]
                    start = cut
        yield part[start:]


# -- the two files -------------------------------------------------------------------------------------------


def write_tokenizer(directory: str | os.PathLike[str], ranks: Sequence[bytes]) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` for `ranks`, with K3's specials after them.

    Each file appears whole or not at all. Raises CheckpointError when `ranks` is not a vocabulary.
    """
    _check_ranks(ranks)
    controls = CONTROLS.values()
    config = {
        "added_tokens_decoder": {
            str(len(ranks) + offset): {"content": name, "special": name not in controls}
            for offset, name in K3_NAMES.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)]
    write_whole(Path(directory) / RANKS_FILE, b"".join(lines))
    write_whole(Path(directory) / CONFIG_FILE, json.dumps(config, indent=2).encode() + b"\n")


def _read(path: Path) -> bytes:
    try:
        require_regular(path)
        return path.read_bytes()
    except OSError as e:
        error = unreadable(path, e)
        raise type(error)(f"{error}; a checkpoint directory needs {RANKS_FILE} and {CONFIG_FILE}") from None


def _read_ranks(path: Path) -> list[bytes]:
    """The byte strings of `tiktoken.model`, by rank. One line is base64, a space, the rank."""
    ranks: list[bytes] = []
    seen: set[bytes] = set()
    for line, row in enumerate(_read(path).splitlines(), 1):
        if not row:
            continue
        try:
            encoded, number = row.split(b" ")
            token, rank = base64.b64decode(encoded, validate=True), int(number)
        except (ValueError, binascii.Error):
            raise _damaged(path, line, f"wanted `base64 rank`, found {row[:60]!r}") from None
        if rank != len(ranks):
            raise _damaged(path, line, f"wanted rank {len(ranks)}, found {rank}; ranks count up from 0")
        if not token or token in seen:
            raise _damaged(path, line, f"rank {rank} is {token!r}, " + ("a duplicate" if token else "empty"))
        ranks.append(token)
        seen.add(token)
    if not ranks:
        raise CheckpointError(f"{path} is empty; download the file again")
    missing = _missing_byte(ranks)
    if missing is not None:
        raise _damaged(path, len(ranks), f"the file ends without a rank for the single byte 0x{missing:02x}")
    return ranks


def _damaged(path: Path, line: int, what: str) -> CheckpointError:
    return CheckpointError(f"{path}, line {line}: {what}; download the file again")


def _read_names(path: Path) -> dict[int, str]:
    """The spellings that `tokenizer_config.json` gives to ids."""
    data = _read(path)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{path} is not JSON; download the file again") from None
    if not isinstance(config, dict):
        raise _unfit(path, "the file", "an object", config)
    if "added_tokens_decoder" not in config:
        raise CheckpointError(f"{path}: the key added_tokens_decoder is missing; download the file again")
    added = config["added_tokens_decoder"]
    if not isinstance(added, dict):
        raise _unfit(path, "added_tokens_decoder", "an object of id to {content: spelling}", added)
    names: dict[int, str] = {}
    for key, entry in added.items():
        where = f"added_tokens_decoder.{key[:20]}"
        if not _ID.fullmatch(key):
            raise _unfit(path, "a key of added_tokens_decoder", "a token id", key)
        if not isinstance(entry, dict):
            raise _unfit(path, where, "an object {content: spelling}", entry)
        name = entry.get("content")
        if not isinstance(name, str) or _SURROGATE.search(name):
            raise _unfit(path, f"{where}.content", "text", name)
        names[int(key)] = name
    return names


def _unfit(path: Path, key: str, wanted: str, found: object) -> CheckpointError:
    text = json.dumps(found)
    text = text if len(text) <= 60 else text[:57] + "..."
    return CheckpointError(f"{path}: {key}: wanted {wanted}, found {text}; download the file again")


def _check_ranks(ranks: Sequence[bytes]) -> None:
    if len(set(ranks)) != len(ranks) or b"" in ranks:
        raise CheckpointError(f"{len(ranks)} ranks hold a duplicate or an empty byte string: each must be its own")
    missing = _missing_byte(ranks)
    if missing is not None:
        raise CheckpointError(f"no rank for the single byte 0x{missing:02x}: all 256 are needed to encode any text")


def _missing_byte(ranks: Sequence[bytes]) -> int | None:
    single = {token[0] for token in ranks if len(token) == 1}
    return next((byte for byte in range(256) if byte not in single), None)


def _special_ids(first: int, names: Mapping[int, str]) -> dict[str, int]:
    """Spelling → id of the 256 ids from `first`: named, else a control at K3's place, else reserved."""
    for token_id, name in names.items():
        if not first <= token_id < first + N_SPECIAL:
            raise CheckpointError(
                f"{CONFIG_FILE} names id {token_id} {name!r}, but the special ids of this vocabulary are "
                f"{first} .. {first + N_SPECIAL - 1}: {CONFIG_FILE} and {RANKS_FILE} do not belong together"
            )
    spellings = {first + offset: _reserved(first + offset) for offset in range(N_SPECIAL)}
    spellings |= {first + offset: name for offset, name in CONTROLS.items() if name not in names.values()}
    spellings |= names
    ids: dict[str, int] = {}
    for token_id, name in spellings.items():
        if not name or name in ids:
            raise CheckpointError(
                f"{CONFIG_FILE}: id {token_id} is spelled {name!r}, "
                + (f"as is id {ids[name]}" if name else "which is nothing")
                + "; every special needs its own spelling"
            )
        ids[name] = token_id
    for name in CONTROLS.values():
        if name not in ids:
            raise CheckpointError(f"{CONFIG_FILE}: no id is spelled {name!r}, which the chat format needs")
    return ids


def _reserved(token_id: int) -> str:
    return f"<|reserved_token_{token_id}|>"
