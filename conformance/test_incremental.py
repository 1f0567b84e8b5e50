"""Incremental decoding: whole characters only, and in the end the plain decode."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import TOKENIZER, texts

from runtime.text.incremental import IncrementalDecoder

all_ids = st.integers(0, TOKENIZER.n_vocab + 3)


def deltas(ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(TOKENIZER)
    return [*map(decoder.feed, ids), decoder.flush()]


def single_bytes(data: bytes) -> list[int]:
    """One id per byte."""
    table = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.n_ranks)}
    return [table[data[i : i + 1]] for i in range(len(data))]


@given(st.lists(all_ids, max_size=40))
def test_joined_deltas_are_the_plain_decode(ids: list[int]) -> None:
    assert "".join(deltas(ids)) == TOKENIZER.decode(ids)


near_characters = st.sampled_from(["😀".encode(), b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90", b"a"])


@given(st.binary(max_size=40) | st.lists(near_characters).map(b"".join))
def test_invalid_bytes_are_replaced_as_python_replaces_them(data: bytes) -> None:
    assert "".join(deltas(single_bytes(data))) == data.decode("utf-8", "replace")


@given(texts)
def test_half_a_character_is_never_shown(text: str) -> None:
    """Byte by byte, the worst there is: every delta is the next character, complete, or nothing."""
    shown = [delta for delta in deltas(single_bytes(text.encode())) if delta]
    assert shown == list(text)


def test_an_emoji_over_four_ids() -> None:
    assert deltas(single_bytes("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xf0\x9f\x98", ["", "", "", "\ufffd"]),
        (b"\xe6(", ["", "\ufffd(", ""]),
        (b"\xe6\xe6\xbc\xa2", ["", "\ufffd", "", "漢", ""]),
        (b"\xff", ["\ufffd", ""]),
    ],
)
def test_what_never_becomes_a_character_is_replaced_once_that_is_certain(data: bytes, expected: list[str]) -> None:
    assert deltas(single_bytes(data)) == expected


def test_flush_makes_ready_for_another_stream() -> None:
    decoder = IncrementalDecoder(TOKENIZER)
    first, *_ = single_bytes("漢".encode())
    assert (decoder.feed(first), decoder.flush(), decoder.flush()) == ("", "\ufffd", "")
    assert [decoder.feed(i) for i in single_bytes("漢".encode())] == ["", "", "漢"]
