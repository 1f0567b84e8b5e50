"""The tokenizer against slow definitions of each of its steps, and the files it reads and writes."""

import base64
import json
import os
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trouble import unreadable
from vocabulary import SPLIT_REGEX, TOKENIZER, merge, texts

from runtime.errors import CheckpointError, StorageError, UsageError
from runtime.text import tokenizer as module
from runtime.text.tokenizer import N_SPECIAL, SPLIT, Tokenizer, write_tokenizer

BYTES = [bytes([i]) for i in range(256)]
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "k3-tokenizer.json").read_text())


# -- the three steps -----------------------------------------------------------------------------------------


@given(texts)
def test_decode_undoes_encode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(TOKENIZER.encode_structural(text)) == text


def pieces_of_the_engine(text: str, candidates: list[str]) -> list[bytes]:
    """How tiktoken's engine splits: with the candidates in the table, each that is a piece comes out whole."""
    ranks = dict.fromkeys([*BYTES, *(c.encode() for c in candidates)])
    encoding = tiktoken.Encoding(
        "split", pat_str=SPLIT, mergeable_ranks={b: i for i, b in enumerate(ranks)}, special_tokens={}
    )
    return [encoding.decode_single_token_bytes(i) for i in encoding.encode_ordinary(text)]


@given(texts)
@example("'ſ a'ſb 'K")
@example("a\x1cb \x1c a")
def test_both_regex_engines_split_alike(text: str) -> None:
    pieces = SPLIT_REGEX.findall(text)
    assert "".join(pieces) == text
    assert pieces_of_the_engine(text, pieces) == [piece.encode() for piece in pieces]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("漢字kana漢", ["漢字", "kana", "漢"]),
        ("I'M we're they'LL", ["I'M", " we're", " they'LL"]),
        ("helloWorld HTTPServer", ["hello", "World", " HTTPServer"]),
        ("1234567", ["123", "456", "7"]),
        ("a <|open|>\n\nb", ["a", " <|", "open", "|>\n\n", "b"]),
        ("x  \n \n  y   z", ["x", "  \n \n", " ", " y", "  ", " z"]),
        ("a\x1cb", ["a", "\x1cb"]),  # U+001C is no space to the split,
        (" \x1c a", [" \x1c", " a"]),
        ("a\x85\x85b", ["a", "\x85", "\x85b"]),  # U+0085 is one
    ],
)
def test_split(text: str, pieces: list[str]) -> None:
    assert SPLIT_REGEX.findall(text) == pieces
    assert pieces_of_the_engine(text, pieces) == [piece.encode() for piece in pieces]


@st.composite
def vocabularies(draw: st.DrawFn) -> list[bytes]:
    """The 256 bytes in any order among random merges, which need not be reachable from below."""
    merges = draw(st.lists(st.text("abA' \n漢", min_size=1, max_size=6).map(str.encode), max_size=60))
    return draw(st.permutations(list(dict.fromkeys([*BYTES, *merges]))))


@given(vocabularies(), st.lists(st.text("abA' \n漢1") | texts, max_size=3).map("".join))
def test_ids_are_those_of_the_definition(ranks: list[bytes], text: str) -> None:
    table = {token: rank for rank, token in enumerate(ranks)}
    expected = [i for piece in SPLIT_REGEX.findall(text) for i in merge(piece.encode(), table)]
    assert Tokenizer(ranks).encode(text) == expected


@settings(max_examples=25)
@given(st.text("ab", min_size=400, max_size=700), st.permutations([b"ab", b"ba", b"aa", b"aab", b"abab", b"bbb"]))
def test_long_pieces_merge_like_short_ones(text: str, merges: list[bytes]) -> None:
    """tiktoken changes its algorithm for long pieces; the ids must not change."""
    ranks = [*BYTES, *merges]
    assert Tokenizer(ranks).encode(text) == merge(text.encode(), {token: rank for rank, token in enumerate(ranks)})


# -- long input ----------------------------------------------------------------------------------------------


def parts_by_hand(text: str, slice_chars: int, run_chars: int) -> list[str]:
    """The guard, one character at a time."""
    parts: list[str] = []
    run = 0
    for i, char in enumerate(text):
        same_kind = i % slice_chars != 0 and char.isspace() == text[i - 1].isspace()
        run = run + 1 if same_kind else 1
        if i % slice_chars == 0 or run > run_chars:
            parts.append("")
            run = 1
        parts[-1] += char
    return parts


@given(st.lists(st.sampled_from([" ", "a", "\x1c", "漢", "\n", "   ", "bcd"]), max_size=30).map("".join))
def test_guard_cuts_where_its_definition_does(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SLICE_CHARS", 16)
        patch.setattr(module, "RUN_CHARS", 3)
        assert list(module._parts(text)) == parts_by_hand(text, 16, 3)


def test_guard_of_the_released_tokenizer() -> None:
    """Runs of 25,000, slices of 400,000; U+001C makes a run with spaces here, though not in the split."""
    n = 25_000
    assert [len(part) for part in module._parts("a" * n)] == [n]
    assert [len(part) for part in module._parts("a" * (2 * n + 1) + " b")] == [n, n, 3]
    assert [len(part) for part in module._parts(" \x1c" * n + "x")] == [n, n + 1]
    assert [len(part) for part in module._parts("ab " * 150_000)] == [400_000, 50_000]


@pytest.mark.parametrize("char", [" ", "\n", "\x1c", "a", "A", "!", "1", "漢", "é", "\u0301", "😀"])
def test_a_megabyte_of_one_character(char: str) -> None:
    """No piece grows past the guard, so no step is quadratic over the input; all of it comes back."""
    text = char * 1_000_000
    ids = TOKENIZER.encode(text)
    assert ids == TOKENIZER.encode(char * 25_000) * 40
    assert TOKENIZER.decode(ids) == text


# -- ordinary and structural ---------------------------------------------------------------------------------


@given(texts)
@example("".join(TOKENIZER.special_ids))
def test_ordinary_text_never_becomes_a_special(text: str) -> None:
    assert all(token_id < TOKENIZER.n_ranks for token_id in TOKENIZER.encode(text))


def test_structural_text_becomes_every_special_it_spells() -> None:
    n = TOKENIZER.n_ranks
    assert TOKENIZER.encode_structural("".join(TOKENIZER.special_ids)) == list(TOKENIZER.special_ids.values())
    assert TOKENIZER.encode_structural(" <|open|> [BOS]") == [32, n + 3, 32, n]
    assert TOKENIZER.encode_structural("<|reserved_token_1|>") == TOKENIZER.encode("<|reserved_token_1|>")


def test_segments_never_merge_over_a_boundary() -> None:
    assert TOKENIZER.encode("The") != TOKENIZER.encode("Th") + TOKENIZER.encode("e")
    segments = [("Th", False), ("e<|sep|>", False), ("<|sep|>", True), ("", False)]
    expected = TOKENIZER.encode("Th") + TOKENIZER.encode("e<|sep|>") + [TOKENIZER.sep_id]
    assert TOKENIZER.encode_segments(segments) == expected


@pytest.mark.parametrize("text", ["ab\ud83d", "\ude00", "\ude00\ud83d", "x" * 30_000 + "\ud800"])
def test_half_a_character_is_the_users_mistake(text: str) -> None:
    position = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    for encode in (TOKENIZER.encode, TOKENIZER.encode_structural):
        with pytest.raises(UsageError, match=f"lone surrogate U\\+D...\\) at position {position}"):
            encode(text)


# -- ids to bytes --------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, TOKENIZER.n_vocab - 1), max_size=40))
def test_decode_is_the_bytes_with_replacement(ids: list[int]) -> None:
    data = b"".join(TOKENIZER.token_bytes(i) for i in ids)
    assert TOKENIZER.decode(ids) == data.decode("utf-8", "replace")


def test_ids_outside_of_the_vocabulary() -> None:
    """A padded vocabulary may produce ids past the specials; nothing produces a negative one."""
    past = TOKENIZER.n_vocab + 7
    assert TOKENIZER.token_bytes(past) == b"<|reserved_token_%d|>" % past
    with pytest.raises(UsageError, match="-1 is negative"):
        TOKENIZER.decode([-1])


# -- files ---------------------------------------------------------------------------------------------------


def test_a_written_tokenizer_loads_as_it_was(tmp_path: Path) -> None:
    ranks = [TOKENIZER.token_bytes(i) for i in range(TOKENIZER.n_ranks)]
    write_tokenizer(tmp_path / "new", ranks)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tiktoken.model", "tokenizer_config.json"]
    loaded = Tokenizer.load(tmp_path / "new")
    assert loaded.special_ids == TOKENIZER.special_ids
    assert [loaded.token_bytes(i) for i in range(loaded.n_vocab)] == [
        TOKENIZER.token_bytes(i) for i in range(TOKENIZER.n_vocab)
    ]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, BYTES)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(unfinished: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_tokenizer(tmp_path, [*BYTES, b"ab"])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_specials_at_the_released_size(tmp_path: Path) -> None:
    """163,584 ranks put the specials where the released checkpoint has them."""
    long = (i.to_bytes(3, "big") for i in range(163_584 - 256))
    write_tokenizer(tmp_path, [*BYTES, *long])
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.n_ranks, tokenizer.n_vocab) == (163_584, 163_840)
    expected = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[start_header_id]": 163590,
        "[end_header_id]": 163591,
        "[EOT]": 163593,
        "<|media_begin|>": 163602,
        "<|media_content|>": 163603,
        "<|media_end|>": 163604,
        "<|media_pad|>": 163605,
        "<osagent_mode>": 163649,
        "<|reserved_token_163837|>": 163837,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    assert {name: tokenizer.special_ids[name] for name in expected} == expected
    assert len(tokenizer.special_ids) == N_SPECIAL
    controls = (tokenizer.end_of_msg_id, tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id)
    assert controls == (163586, 163587, 163588, 163589)


def lines(tokens: list[bytes]) -> list[bytes]:
    return [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]


def replaced(index: int, line: bytes) -> bytes:
    rows = lines(BYTES)
    rows[index] = line
    return b"\n".join(rows)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (replaced(2, b"Ag=="), "line 3: wanted `base64 rank`, found b'Ag=='"),
        (replaced(2, b"A!g== 2"), "line 3: wanted `base64 rank`"),
        (replaced(2, b"Ag== two"), "line 3: wanted `base64 rank`"),
        (replaced(2, b"Ag== 2 2"), "line 3: wanted `base64 rank`"),
        (replaced(2, b"Ag== 3"), "line 3: wanted rank 2, found 3"),
        (replaced(2, b"Ag== 1"), "line 3: wanted rank 2, found 1"),
        (replaced(2, b"AQ== 2"), r"line 3: rank 2 is b'\x01', a duplicate"),
        (replaced(2, b" 2"), "line 3: rank 2 is b'', empty"),
        (replaced(2, b"AAAA 2"), "line 256: the file ends without a rank for the single byte 0x02"),
        (b"\n".join(lines(BYTES)[:200]), "line 200: the file ends without a rank for the single byte 0xc8"),
        (b"", "is empty; download"),
        (b"\n\n", "is empty; download"),
    ],
)
def test_a_damaged_rank_file_is_named_with_its_line(tmp_path: Path, data: bytes, message: str) -> None:
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tiktoken.model") in str(caught.value)
    assert message in str(caught.value)
    assert "download the file again" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON; download"),
        ("[" * 100_000, "is not JSON; download"),
        ("\udcff", "is not JSON; download"),
        ("[]", "the file: wanted an object, found []"),
        ("{}", "the key added_tokens_decoder is missing"),
        (["x" * 100], 'added_tokens_decoder: wanted an object of id to {content: spelling}, found ["xxx'),
        (None, "added_tokens_decoder: wanted an object of id to {content: spelling}, found null"),
        ({"first": {"content": "x"}}, 'a key of added_tokens_decoder: wanted a token id, found "first"'),
        ({"9" * 5000: {"content": "x"}}, 'a key of added_tokens_decoder: wanted a token id, found "999'),
        ({"300": "x"}, 'added_tokens_decoder.300: wanted an object {content: spelling}, found "x"'),
        ({"300": {}}, "added_tokens_decoder.300.content: wanted text, found null"),
        ({"300": {"content": 5}}, "added_tokens_decoder.300.content: wanted text, found 5"),
        ({"300": {"content": "\ud83d"}}, "added_tokens_decoder.300.content: wanted text, found"),
        ({"255": {"content": "x"}}, "names id 255 'x', but the special ids of this vocabulary are 256 .. 511"),
        ({"163584": {"content": "[BOS]"}}, "do not belong together"),
        ({"300": {"content": ""}}, "id 300 is spelled '', which is nothing"),
        ({"300": {"content": "x"}, "301": {"content": "x"}}, "id 301 is spelled 'x', as is id 300"),
        ({"300": {"content": "<|reserved_token_301|>"}}, "id 301 is spelled '<|reserved_token_301|>', as is id 300"),
        ({"259": {"content": "x"}}, "no id is spelled '<|open|>'"),
    ],
)
def test_a_config_that_names_no_256_specials_is_refused(tmp_path: Path, config: object, message: str) -> None:
    write_tokenizer(tmp_path, BYTES)
    text = config if isinstance(config, str) else json.dumps({"added_tokens_decoder": config})
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path)
    assert message in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "Error" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: No such file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_drive_that_fails_makes_no_bad_checkpoint(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path, BYTES)
    unreadable(monkeypatch, tmp_path / name)
    with pytest.raises(StorageError, match=f"cannot read .*{name}: Input/output error"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a loop"])
def test_what_is_no_regular_file_is_never_opened(tmp_path: Path, name: str, kind: str) -> None:
    write_tokenizer(tmp_path, BYTES)
    (tmp_path / name).unlink()
    if kind == "a pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "a directory":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(name)
    named = "symbolic link" if kind == "a loop" else f"not a regular file but {kind}"
    with pytest.raises(CheckpointError, match=f"cannot read .*{name}: .*{named}"):
        Tokenizer.load(tmp_path)


def test_controls_are_found_by_their_spelling(tmp_path: Path) -> None:
    """Named elsewhere, they are elsewhere; not named, they are where K3 has them."""
    write_tokenizer(tmp_path, BYTES)
    config = {"added_tokens_decoder": {"300": {"content": "<|open|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id, tokenizer.end_of_msg_id) == (300, 260, 261, 258)
    assert tokenizer.token_bytes(259) == b"<|reserved_token_259|>"
    assert tokenizer.token_bytes(256) == b"<|reserved_token_256|>"


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(BYTES[1:], "no rank for the single byte 0x00"), ([*BYTES, b"a"], "duplicate"), ([*BYTES, b""], "empty")],
)
def test_ranks_that_are_no_vocabulary_are_not_written(tmp_path: Path, ranks: list[bytes], message: str) -> None:
    for use in (Tokenizer, lambda ranks: write_tokenizer(tmp_path, ranks)):
        with pytest.raises(CheckpointError, match=message):
            use(ranks)
    assert list(tmp_path.iterdir()) == []


# -- the released tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda vector: ascii(vector["text"]))
@pytest.mark.own_model
def test_published_vectors(vector: dict[str, object], released_tokenizer: Tokenizer) -> None:
    """Texts have the published ids of the released tokenizer"""
    tokenizer = released_tokenizer
    encode = tokenizer.encode if vector["mode"] == "ordinary" else tokenizer.encode_structural
    assert encode(vector["text"]) == vector["ids"]
    assert tokenizer.decode(vector["ids"]) == vector["text"]
