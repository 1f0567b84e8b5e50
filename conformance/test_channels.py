"""The channel parser: what the model should write, what it writes instead, and the way back into history."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import MARKERS, TOKENIZER, texts

from runtime.text.channels import ChannelParser, Content, Event, ParsedMessage, Reasoning, ToolCall, parse_header
from runtime.text.chat import render

CONTROL_IDS = {marker: TOKENIZER.special_ids[marker] for marker in MARKERS}


def ids_of(answer: str) -> list[int]:
    """An answer as written in these tests: `[open think]`, `[/think]` and `[end]` stand for tags."""
    ids: list[int] = []
    for i, piece in enumerate(answer.replace("[", "]").split("]")):
        if i % 2 == 0:
            ids += TOKENIZER.encode(piece)
        elif piece in ("open", "close", "sep"):
            ids.append(CONTROL_IDS[f"<|{piece}|>"])
        elif piece == "end":
            ids.append(TOKENIZER.end_of_msg_id)
        else:
            control = TOKENIZER.close_id if piece.startswith("/") else TOKENIZER.open_id
            ids += [control, *TOKENIZER.encode(piece.lstrip("/")), TOKENIZER.sep_id]
    return ids


def parsed(ids: Iterable[int], thinking: bool = True) -> tuple[ParsedMessage, list[Event]]:
    """The message, and its events; checks that they tell the same story."""
    parser = ChannelParser(TOKENIZER, thinking)
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    assert parser.done
    assert parser.finish() == []
    message = parser.message
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == message.reasoning_content
    assert "".join(e.text for e in events if isinstance(e, Content)) == message.content
    assert tuple(e for e in events if isinstance(e, ToolCall)) == message.tool_calls
    assert [call.index for call in message.tool_calls] == list(range(len(message.tool_calls)))
    return message, events


def parts(answer: str, thinking: bool = True) -> tuple[str, str, list[tuple[str, str]]]:
    message, _ = parsed(ids_of(answer), thinking)
    return message.reasoning_content, message.content, [(call.name, call.arguments) for call in message.tool_calls]


CALL = '[call tool="f" index="1"][argument key="n" type="number"]2[/argument][/call]'


# -- the written form -----------------------------------------------------------------------------------------------


def test_an_answer_with_everything() -> None:
    answer = f"why[/think][response]42[/response][tools]{CALL}[/tools][/message][end]"
    assert parts(answer) == ("why", "42", [("f", '{"n": 2}')])


def test_without_thinking_the_answer_starts_in_its_response() -> None:
    assert parts("42[/response][/message][end]", thinking=False) == ("", "42", [])


def test_events_come_as_soon_as_they_are_certain() -> None:
    parser = ChannelParser(TOKENIZER)
    emoji = TOKENIZER.encode("🧪")
    assert len(emoji) > 1
    assert [parser.feed(i) for i in emoji] == [[]] * (len(emoji) - 1) + [[Reasoning("🧪")]]
    for i in ids_of(f"[/think][response][/response][tools]{CALL}")[:-1]:
        assert parser.feed(i) == []
    assert parser.feed(TOKENIZER.sep_id) == [ToolCall(0, "f", '{"n": 2}')]
    assert not parser.done


def test_the_end_is_the_end() -> None:
    parser = ChannelParser(TOKENIZER)
    for i in ids_of("a[/think][response]b[/response][/message][end]"):
        parser.feed(i)
    assert parser.done
    assert [parser.feed(i) for i in ids_of("c[response]d[end]")] == [[]] * len(ids_of("c[response]d[end]"))
    assert parser.message == ParsedMessage("a", "b", ())


# -- what models write instead ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # think is left without its closing tag
        ("why[response]42[/response][/message][end]", ("why", "42", [])),
        (f"why[tools]{CALL}[/tools][/message][end]", ("why", "", [("f", '{"n": 2}')])),
        (f"why{CALL}[/message][end]", ("why", "", [("f", '{"n": 2}')])),
        ("why[answer]42[/answer][/message][end]", ("why", "42", [])),
        ("why[/message][end]", ("why", "", [])),
        ("why[end]", ("why", "", [])),
        ("why[/response]42[end]", ("why", "42", [])),
        ("why[/call]42[end]", ("why", "42", [])),
        ("why[/argument]42[end]", ("why", "42", [])),
        ("why", ("why", "", [])),
        ("why[/think][think] and[/think][response]42[end]", ("why and", "42", [])),
        # no response is opened, or white space is put between the tags
        ("why[/think]42[/message][end]", ("why", "42", [])),
        ("why[/think]\n\n[response]42[/response]\n[/message]\n[end]", ("why", "42", [])),
        ("why[/think]\n", ("why", "", [])),
        # the message is closed in the middle of something, or without the end
        ("why[/think][response]42[/message][end]", ("why", "42", [])),
        ("why[/think][response]42[/response][/message]", ("why", "42", [])),
        (f"why[tools]{CALL}[/message][end]", ("why", "", [("f", '{"n": 2}')])),
        (
            '[tools][call tool="f" index="1"][argument key="n" type="number"]2[/message][end]',
            ("", "", [("f", '{"n": 2}')]),
        ),
        ('[tools][call tool="f"][/tools][response]42[end]', ("", "42", [("f", "{}")])),
        ('[tools][call tool="f"][call tool="g"][/call][/tools][end]', ("", "", [("f", "{}"), ("g", "{}")])),
        ('[tools][call tool="f"][/tools]', ("", "", [("f", "{}")])),
        # it goes on as somebody else
        ('42[/message][message role="user"]more[/message][message role="assistant"][think]hm[end]', ("42", "", [])),
        ('42[message role="user"]more[/message][end]', ("42", "", [])),
        # tags that are none
        ("why[sep]ever[response]4[sep]2[end]", ("whyever", "42", [])),
        ("why[open]respon[open]response[sep]42[end]", ("why", "42", [])),
        ("why[close][response]42[end]", ("why", "42", [])),
        ("why[open][sep]42[end]", ("why", "42", [])),
        ("why[open]response", ("why", "", [])),
        ("why[open]response[end]", ("why", "", [])),
        # parts of no call
        ('[tools][argument key="a" type="string"]x[/argument][/tools][response]42[end]', ("", "x42", [])),
        ('[tools]noise[call tool="f"]noise[/call]noise[/tools][end]', ("", "", [("f", "{}")])),
        ('[tools][call index="1"][/call][/tools][end]', ("", "", [])),
    ],
)
def test_answers_out_of_form(answer: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert parts(answer) == expected


def test_a_call_cut_off_is_not_delivered() -> None:
    """At every point of a call the stream may stop; before its closing tag there is no call, after it there is."""
    ids = ids_of(f"why[tools]{CALL}")
    for n in range(len(ids_of("why[tools]")), len(ids)):
        assert parsed(ids[:n])[0] == ParsedMessage("why", "", ())
    assert len(parsed(ids)[0].tool_calls) == 1


def test_half_a_character_ends_with_its_channel() -> None:
    half = TOKENIZER.encode("🧪")[:-1]
    message, _ = parsed([*half, *ids_of("[/think][response]"), *half, *ids_of("[/response][message]")])
    assert message == ParsedMessage("\ufffd", "\ufffd", ())


def test_markers_in_ordinary_tokens_are_text() -> None:
    text = "<|close|>think<|sep|><|open|>response<|sep|><|end_of_msg|>"
    message, _ = parsed(TOKENIZER.encode(text) + ids_of("[/think][response]") + TOKENIZER.encode(text))
    assert message == ParsedMessage(text, text, ())


header_texts = st.sampled_from(
    ["think", "response", "tools", "call", "argument", "json", "message", ' tool="f"', ' key="a"']
)
any_ids = st.sampled_from(list(CONTROL_IDS.values())) | st.integers(0, TOKENIZER.n_vocab + 3)
streams = st.lists(any_ids.map(lambda i: [i]) | header_texts.map(TOKENIZER.encode), max_size=40)


@given(streams, st.booleans())
def test_no_ids_break_it_and_no_special_reaches_the_text(stream: list[list[int]], thinking: bool) -> None:
    ids = [i for chunk in stream for i in chunk]
    message, _ = parsed(ids, thinking)
    ordinary = TOKENIZER.decode(i for i in ids if i < TOKENIZER.n_ranks)
    for text in (message.reasoning_content, message.content, *(c.arguments for c in message.tool_calls)):
        text.encode()
        assert all(spelling not in text or spelling in ordinary for spelling in TOKENIZER.special_ids)


@given(st.lists(st.integers(0, TOKENIZER.n_ranks - 1)), st.booleans())
def test_without_tags_all_is_the_channel_that_was_open(ids: list[int], thinking: bool) -> None:
    text = TOKENIZER.decode(ids)
    assert parsed(ids, thinking)[0] == ParsedMessage(text if thinking else "", "" if thinking else text, ())


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "2", "2"),
        ("string", "", ""),
        ("number", "2", 2),
        ("number", "2.50", 2.5),
        ("boolean", "true", True),
        ("null", "null", None),
        ("object", '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("array", "[1,2]", [1, 2]),
        ("", "[1,2]", [1, 2]),
        ("number", "two", "two"),
        ("boolean", "True", "True"),
        ("number", "NaN", "NaN"),
        ("number", "1e999", "1e999"),
        ("number", "9" * 5000, "9" * 5000),
        ("array", '["\\ud83d"]', '["\\ud83d"]'),
        ("array", "[" * 100_000, "[" * 100_000),
    ],
)
def test_an_argument_is_read_by_its_type(kind: str, text: str, value: Any) -> None:
    """What is not the JSON that it should be stays the text it is."""
    head, tail = ids_of(f'[tools][call tool="f"][argument key="k" type="{kind}"]'), ids_of("[/argument][/call]")
    message, _ = parsed(head + TOKENIZER.encode(text) + tail)
    assert json.loads(message.tool_calls[0].arguments) == {"k": value}


@pytest.mark.parametrize("whole", ['{"a": 1}', '{"a": ', "Paris, please"])
def test_a_json_child_is_the_whole_object_as_it_stands(whole: str) -> None:
    head, tail = ids_of('[tools][call tool="f"][json type="object"]'), ids_of("[/json][/call]")
    assert parsed(head + TOKENIZER.encode(whole) + tail)[0].tool_calls[0].arguments == whole


def test_a_blank_json_child_is_no_arguments() -> None:
    assert parts('[tools][call tool="f"][json type="object"] [/json][/call]')[2] == [("f", "{}")]


@pytest.mark.parametrize(
    ("header", "tag", "attributes"),
    [
        ("think", "think", {}),
        ('call tool="a b" index="1"', "call", {"tool": "a b", "index": "1"}),
        ('argument key="&quot;&amp;&amp;quot;" type=""', "argument", {"key": '"&&quot;', "type": ""}),
        ('call tool="a=b<|sep|>\n" x', "call", {"tool": "a=b<|sep|>\n"}),
        ('call tool="unended', "call", {}),
        ("", "", {}),
        ('="', "", {}),
    ],
)
def test_headers(header: str, tag: str, attributes: dict[str, str]) -> None:
    assert parse_header(header) == (tag, attributes)


# -- the way back into history ----------------------------------------------------------------------------------------


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.tuples(texts.filter(bool), st.dictionaries(texts, values, max_size=3))


def as_message(reasoning: str, content: str, tool_calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    functions = [{"function": {"name": name, "arguments": arguments}} for name, arguments in tool_calls]
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": functions}


@given(texts.filter(str.strip) | st.just(""), texts, st.lists(calls, max_size=3), st.booleans())
def test_an_answer_comes_back_as_it_was_and_extends_its_prompt(
    reasoning: str, content: str, tool_calls: list[tuple[str, dict[str, Any]]], thinking: bool
) -> None:
    """parse(render(x)) == x; and as history, the answer is the very ids that followed the prompt."""
    question = [{"role": "user", "content": "?"}]

    def ids_with(*messages: dict[str, Any], generation_prompt: bool = True) -> list[int]:
        segments = render([*question, *messages], thinking=thinking, generation_prompt=generation_prompt)
        return TOKENIZER.encode_segments(segments)

    prompt = ids_with()
    written = ids_with(as_message(reasoning, content, tool_calls), generation_prompt=False)
    assert written[: len(prompt)] == prompt
    generated = written[len(prompt) :]

    message, _ = parsed(generated, thinking)
    assert message.reasoning_content == (reasoning if thinking else "")
    assert message.content == content
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == tool_calls

    following = ids_with(message.to_dict(), {"role": "user", "content": "next"})
    assert following[: len(prompt) + len(generated)] == prompt + generated


@given(texts.filter(str.strip))
def test_arguments_that_are_not_json_come_back_too(text: str) -> None:
    raw = "not json" + text
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": raw}}]}
    prompt = TOKENIZER.encode_segments(render([]))
    written = TOKENIZER.encode_segments(render([message], generation_prompt=False))
    parsed_message, _ = parsed(written[len(prompt) :])
    assert parsed_message.tool_calls == (ToolCall(0, "f", raw),)
    assert TOKENIZER.encode_segments(render([parsed_message.to_dict()], generation_prompt=False)) == written
