"""Stop texts: the answer is what comes before the first of them, whatever pieces it came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.server.stops import StopTexts

letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def before(text: str, stops: list[str]) -> str:
    """The law, as it reads."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@given(st.lists(letters), stops)
def test_the_answer_ends_where_the_first_stop_text_begins(pieces: list[str], stops: list[str]) -> None:
    texts, out = StopTexts(stops), ""
    for piece in pieces:
        out += texts.feed(piece)
        if texts.hit:
            break
    out += texts.finish()
    whole = "".join(pieces)
    assert out == before(whole, stops)
    assert texts.hit == any(stop in whole for stop in stops)


@given(letters, stops)
def test_what_cannot_be_a_stop_text_is_not_held_back(text: str, stops: list[str]) -> None:
    """What is held at any time is the beginning of a stop text, or waits for one that began before a whole one."""
    texts, out = StopTexts(stops), ""
    for end, letter in enumerate(text, 1):
        out += texts.feed(letter)
        if texts.hit:
            return
        held = text[len(out) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_earlier_of_two_wins_though_it_is_whole_later() -> None:
    texts = StopTexts(["bc", "abcd"])
    assert texts.feed("xab") == "x"
    assert texts.feed("c") == ""
    assert not texts.hit
    assert texts.feed("d") == ""
    assert texts.hit


def test_the_later_of_two_stands_when_the_earlier_does_not_come() -> None:
    texts = StopTexts(["bc", "abcd"])
    assert texts.feed("abc") + texts.feed("e") == "a"
    assert texts.hit


def test_after_a_hit_nothing_comes() -> None:
    texts = StopTexts(["."])
    assert texts.feed("one. two.") == "one"
    assert texts.feed("three") + texts.finish() == ""
