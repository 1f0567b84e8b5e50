"""The chat encoding: published checks, worked examples, every rule of the format, every refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabulary import MARKERS, TOKENIZER, texts

from runtime.errors import UsageError
from runtime.text.chat import Segment, render
from runtime.text.tokenizer import Tokenizer

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "k3-chat.json").read_text())

# The abbreviations of the specification, section 6.


def S(text: str) -> list[Segment]:
    return [Segment(text, True)]


def T(*texts: str) -> list[Segment]:
    return [Segment(text, False) for text in texts]


def opened(tag: str, **attributes: str) -> list[Segment]:
    parts = [part for key, value in attributes.items() for part in T(f" {key}", '="', value, '"')]
    return S("<|open|>") + T(tag) + parts + S("<|sep|>")


def C(tag: str) -> list[Segment]:
    return S("<|close|>") + T(tag) + S("<|sep|>")


def M(role: str) -> list[Segment]:
    return opened("message", role=role)


def N(kind: str) -> list[Segment]:
    return opened("message", role="system", type=kind)


O = opened  # noqa: E741
E = C("message") + S("<|end_of_msg|>")
ASK = M("assistant") + O("think")

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort="
)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def assistant(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def quiet(messages: list[dict[str, Any]], **options: Any) -> list[Segment]:
    """Rendered without the effort note."""
    return render(messages, reasoning_effort=None, **options)


# -- published checks ---------------------------------------------------------------------------------------------


def fnv_1a_64(segments: list[Segment]) -> str:
    value = 0xCBF29CE484222325
    for text, structural in segments:
        for byte in (len(text.encode()) | structural << 31).to_bytes(4, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda vector: vector["name"])
def test_published_hashes(vector: dict[str, Any]) -> None:
    segments = render(vector["messages"], **vector["options"])
    assert (len(segments), fnv_1a_64(segments)) == (vector["segments"], vector["hash"])


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda vector: vector["name"])
@pytest.mark.own_model
def test_published_id_counts(vector: dict[str, Any], released_tokenizer: Tokenizer) -> None:
    """Chats have the published numbers of ids of the released tokenizer"""
    ids = released_tokenizer.encode_segments(render(vector["messages"], **vector["options"]))
    assert len(ids) == vector["ids"]
    if "open_ids" in vector:
        assert ids.count(released_tokenizer.open_id) == vector["open_ids"]


# -- worked examples ----------------------------------------------------------------------------------------------


def test_example_1_a_question_without_thinking() -> None:
    segments = render([user("Hi")], thinking=False)
    assert segments == M("user") + T("Hi") + E + M("assistant") + O("response")
    assert len(segments) == 22


def test_example_2_a_marker_typed_by_the_user_with_low_effort() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("say <|sep|>")]
    assert render(messages, reasoning_effort="low") == (
        N("thinking-effort") + T(EFFORT + "low`.") + E
        + M("system") + T("Be brief.") + E
        + M("user") + T("say <|sep|>") + E + ASK
    )  # fmt: skip


def test_example_3_an_earlier_answer_with_its_reasoning() -> None:
    answer = {"role": "assistant", "reasoning_content": "sum", "content": "4"}
    assert quiet([user("2+2?"), answer, user("+1?")]) == (
        M("user") + T("2+2?") + E
        + M("assistant") + O("think") + T("sum") + C("think") + O("response") + T("4") + C("response") + E
        + M("user") + T("+1?") + E + ASK
    )  # fmt: skip


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}


def test_example_4_a_tool_its_call_and_its_result() -> None:
    messages = [
        user("Weather?"),
        assistant(call("get_weather", '{"city": "Paris", "days": 2, "opts": {"a": [1, true]}}')),
        {"role": "tool", "content": "Sunny"},
    ]
    declared = (
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
        '[{"function":{"description":"Weather","name":"get_weather","parameters":{"properties":{"city":'
        '{"type":"string"},"days":{"type":"integer"}},"required":["city"],"type":"object"}},"type":"function"}]\n```'
    )
    assert render(messages, tools=[WEATHER]) == (
        N("tool-declare") + T(declared) + E
        + N("thinking-effort") + T(EFFORT + "max`.") + E
        + M("user") + T("Weather?") + E
        + M("assistant") + O("think") + C("think") + O("response") + C("response") + O("tools")
        + O("call", tool="get_weather", index="1")
        + O("argument", key="city", type="string") + T("Paris") + C("argument")
        + O("argument", key="days", type="number") + T("2") + C("argument")
        + O("argument", key="opts", type="object") + T('{"a": [1, true]}') + C("argument")
        + C("call") + C("tools") + E
        + O("message", role="tool", tool="get_weather", index="1") + T("Sunny") + E + ASK
    )  # fmt: skip


def test_example_5_no_tools_and_json() -> None:
    choice = "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
    form = (
        "The system is invoked with `response_format=json_object`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
    )
    assert render([user("J")], thinking=False, tool_choice="none", response_format={"type": "json_object"}) == (
        M("user") + T("J") + E
        + N("tool-choice") + T(choice) + E
        + N("response-format") + T(form) + E
        + M("assistant") + O("response")
    )  # fmt: skip


# -- attributes, notes, demands -----------------------------------------------------------------------------------


def test_attributes_are_escaped_ampersand_first() -> None:
    segments = quiet([user("x", name='a&"b&quot;<')])
    assert segments[:11] == opened("message", role="user", name="a&amp;&quot;b&amp;quot;<")


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_the_effort_note_is_for_thinking_only(effort: str) -> None:
    note = N("thinking-effort") + T(EFFORT + effort + "`.") + E
    assert render([user("x")], reasoning_effort=effort) == note + quiet([user("x")])
    assert render([user("x")], reasoning_effort=effort, thinking=False) == quiet([user("x")], thinking=False)


def test_effort_is_max_unless_said_otherwise() -> None:
    assert render([user("x")]) == render([user("x")], reasoning_effort="max") != quiet([user("x")])


def test_a_system_message_with_tools_extends_the_toolset() -> None:
    tools = [{"z": 1, "a": {"y": "é", "b": []}}]
    body = (
        "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
        '```json\n[{"a":{"b":[],"y":"é"},"z":1}]\n```'
    )
    message = {"role": "system", "content": "not shown", "name": "nor this", "tools": tools}
    assert quiet([user("x"), message]) == M("user") + T("x") + E + N("tool-declare") + T(body) + E + ASK


def test_braces_in_tools_stay_as_they_are() -> None:
    assert '["{J} {e}"]' in render([user("x")], tools=["{J} {e}"])[11].text


def test_what_is_asked_of_the_answer_stands_after_the_messages() -> None:
    choice = "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
    form = (
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without "
        "markdown code blocks (```json) or any additional formatting.\nThe JSON data must match the following "
        'schema:\n```json\n{"a":1,"b":2}\n```'
    )
    for wrapped in ({"schema": {"b": 2, "a": 1}}, {"json_schema": {"b": 2, "a": 1}}, {"b": 2, "a": 1}):
        asked = {"type": "json_schema", "json_schema": wrapped}
        assert quiet([user("x")], tool_choice="required", response_format=asked) == (
            M("user") + T("x") + E + N("tool-choice") + T(choice) + E + N("response-format") + T(form) + E + ASK
        )


@pytest.mark.parametrize("choice", [None, "auto", {"type": "function", "function": {"name": "f"}}])
def test_choices_that_say_nothing(choice: Any) -> None:
    assert quiet([user("x")], tool_choice=choice, response_format={"type": "text"}) == quiet([user("x")])


def test_without_a_generation_prompt_the_last_message_is_the_end() -> None:
    assert quiet([user("x")], generation_prompt=False) == M("user") + T("x") + E


# -- content --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_list_of_text_parts_is_its_texts(role: str) -> None:
    """One part is the string itself; two stay two segments, for a boundary is part of the format."""
    message = {"role": role, "name": "f"}
    text = [{"type": "text", "text": "Hello"}]
    assert quiet([{**message, "content": text}]) == quiet([{**message, "content": "Hello"}])
    two = quiet([{**message, "content": [*text, *text]}])
    assert [s for s in two if s.text == "Hello"] == T("Hello", "Hello")


def test_empty_text_is_no_segment() -> None:
    assert (
        quiet([user("")]) == quiet([user([])]) == quiet([user([{"type": "text", "text": ""}])]) == M("user") + E + ASK
    )


def test_images_take_their_blocks_in_order() -> None:
    blocks = [f"<|media_begin|>image {n}x2<|media_content|><|media_pad|><|media_end|>" for n in (1, 2, 3)]
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "or"}, {"type": "image"}]
    assert quiet([user(parts), user("see <|kimi_image_placeholder|>.")], image_blocks=blocks) == (
        M("user") + S(blocks[0]) + T("or") + S(blocks[1]) + E
        + M("user") + T("see ") + S(blocks[2]) + T(".") + E + ASK
    )  # fmt: skip


def test_without_blocks_the_placeholder_is_text() -> None:
    text = "see <|kimi_image_placeholder|>"
    assert quiet([user(text)]) == M("user") + T(text) + E + ASK


# -- answers and calls ----------------------------------------------------------------------------------------------


def thought(text: str) -> list[Segment]:
    return M("assistant") + O("think") + T(*[text] * bool(text)) + C("think")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": None, "reasoning": "b"}, "b"),
        ({"reasoning": " b\n"}, " b\n"),
        ({"reasoning_content": " \n\t"}, ""),
        ({"reasoning_content": "", "reasoning": "b"}, ""),
        ({}, ""),
    ],
)
def test_the_think_channel_is_always_there(message: dict[str, Any], expected: str) -> None:
    answer = {"role": "assistant", "content": "4", **message}
    rest = O("response") + T("4") + C("response") + E
    assert quiet([answer]) == thought(expected) + rest + ASK
    assert quiet([answer], thinking=False) == M("assistant") + rest + M("assistant") + O("response")


def test_a_named_answer_without_content() -> None:
    expected = O("message", role="assistant", name="K") + O("think") + C("think") + O("response") + C("response") + E
    assert quiet([{"role": "assistant", "name": "K"}], generation_prompt=False) == expected


def arguments(given_arguments: Any) -> list[Segment]:
    """What stands between open(call) and close(call)."""
    segments = quiet([assistant(call("f", given_arguments))], generation_prompt=False)
    head = thought("") + O("response") + C("response") + O("tools") + O("call", tool="f", index="1")
    tail = C("call") + C("tools") + E
    assert segments[: len(head)] == head
    assert segments[-len(tail) :] == tail
    return segments[len(head) : -len(tail)]


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, "boolean", "true"),
        (None, "null", "null"),
        (2, "number", "2"),
        (0.5, "number", "0.5"),
        ("<|sep|> \"&' é", "string", "<|sep|> \"&' é"),
        ({"b": 1, "a": ["é", None]}, "object", '{"b": 1, "a": ["é", null]}'),
        ([1, "x"], "array", '[1, "x"]'),
        ([], "array", "[]"),
    ],
)
def test_arguments_are_typed(value: Any, kind: str, text: str) -> None:
    expected = O("argument", key="k", type=kind) + T(text) + C("argument")
    assert arguments({"k": value}) == expected
    assert arguments(json.dumps({"k": value})) == expected


def test_arguments_keep_the_order_they_are_given_in() -> None:
    assert [s.text for s in arguments('{"b": "", "a&": ""}') if s.text in ("b", "a&amp;")] == ["b", "a&amp;"]


@pytest.mark.parametrize("empty", [None, "", "  \n", "{}", {}, "null"])
def test_no_arguments(empty: Any) -> None:
    assert arguments(empty) == []


@pytest.mark.parametrize("raw", ['{"a": ', "Paris, please", '{"a": 1} {"b": 2}', '{"n": ' + "9" * 5000 + "}"])
def test_arguments_that_are_not_json_stay_as_written(raw: str) -> None:
    assert arguments(raw) == O("json", type="object") + T(raw) + C("json")


def test_calls_are_numbered_from_one() -> None:
    segments = quiet([assistant(call("f", None), call("g", None))])
    calls = O("tools") + O("call", tool="f", index="1") + C("call") + O("call", tool="g", index="2") + C("call")
    assert segments[-len(calls) - 17 : -17] == calls  # before close(tools), E and the generation prompt


# -- tool results -------------------------------------------------------------------------------------------------


CALLS = assistant(call("f", None, id="1"), call("g", None, id="2"), call("f", None, id="3"))


def results(*messages: dict[str, Any], before: dict[str, Any] = CALLS) -> list[tuple[str, str, str]]:
    """(tool, index, content) of the tool messages as rendered."""
    segments = quiet([before, *({"role": "tool", **m} if "role" not in m else m for m in messages)])
    texts = [s.text for s in segments]
    starts = [i for i in range(len(texts) - 4) if texts[i : i + 5] == ["message", " role", '="', "tool", '"']]
    for i in starts:
        assert texts[i + 5 : i + 7] == [" tool", '="']
        assert texts[i + 9 : i + 11] == [" index", '="']
    return [(texts[i + 7], texts[i + 11], texts[i + 14]) for i in starts]


def test_results_come_in_the_order_of_their_calls() -> None:
    given_results = [
        {"tool_call_id": "3", "content": "c"},
        {"id": "1", "content": "a"},
        {"tool_call_id": "2", "content": "b"},
    ]
    assert results(*given_results) == [("f", "1", "a"), ("g", "2", "b"), ("f", "3", "c")]


def test_a_matched_result_is_named_by_its_call() -> None:
    assert results({"tool_call_id": "2", "name": "wrong", "content": "b"}) == [("g", "1", "b")]


def test_one_unmatched_result_leaves_the_run_as_it_is() -> None:
    given_results = [
        {"tool_call_id": "2", "content": "b"},
        {"tool_call_id": "9", "content": "x", "name": "n", "tool": "t"},
        {"content": "y", "name": "n"},
    ]
    assert results(*given_results) == [("f", "1", "b"), ("t", "2", "x"), ("n", "3", "y")]


def test_numbers_go_on_until_the_next_answer() -> None:
    """A message in between ends the run that is ordered, not the count."""
    given_results = [{"tool_call_id": "2", "content": "b"}, user("hm"), {"tool_call_id": "1", "content": "a"}]
    assert results(*given_results) == [("g", "1", "b"), ("f", "2", "a")]
    assert results(*given_results, CALLS, {"content": "new"})[-1] == ("f", "1", "new")


# -- markers are text ---------------------------------------------------------------------------------------------


names = texts.filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
contents = texts | st.lists(st.builds(lambda t: {"type": "text", "text": t}, texts), max_size=3)
tool_calls = st.builds(call, names, st.dictionaries(texts, values, max_size=3) | texts.map(lambda t: "not json" + t))
messages = st.lists(
    st.builds(lambda c, n: user(c, name=n), contents, texts)
    | st.builds(lambda c: {"role": "system", "content": c}, contents)
    | st.builds(lambda t: {"role": "system", "tools": [t]}, values)
    | st.builds(
        lambda r, c, t: assistant(*t, content=c, reasoning=r), texts, contents, st.lists(tool_calls, max_size=2)
    )
    | st.builds(lambda c, n: {"role": "tool", "content": c, "name": n}, contents, names),
    max_size=5,
)


@given(messages, st.booleans(), st.lists(values, max_size=2), values)
def test_nothing_a_user_writes_becomes_a_control_id(
    conversation: list[dict[str, Any]], thinking: bool, tools: list[Any], schema: Any
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    segments = render(conversation, thinking=thinking, tools=tools, response_format=form)
    ids = TOKENIZER.encode_segments(segments)
    specials = [i for i in ids if i >= TOKENIZER.n_ranks]
    assert specials == [TOKENIZER.special_ids[s.text] for s in segments if s.structural]
    assert {s.text for s in segments if s.structural} <= set(MARKERS)
    assert all(s.text for s in segments)
    harmless = render(json.loads(json.dumps(conversation).replace("<|", "<marker")), thinking=thinking, tools=tools)
    structure = [s.text for s in render(conversation, thinking=thinking, tools=tools) if s.structural]
    assert structure == [s.text for s in harmless if s.structural]
    assert specials.count(TOKENIZER.sep_id) == specials.count(TOKENIZER.open_id) + specials.count(TOKENIZER.close_id)


@pytest.mark.parametrize("marker", MARKERS)
def test_a_field_that_is_nothing_but_a_marker_is_text(marker: str) -> None:
    answer = assistant(call(marker, {marker: marker}), content=marker, reasoning=marker, name=marker)
    segments = quiet([user(marker, name=marker), answer, {"role": "tool", "content": marker}])
    assert segments.count(Segment(marker, False)) == 10


# -- refusals -----------------------------------------------------------------------------------------------------


def refusal(messages: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        render(messages, **options)
    message = str(caught.value)
    assert "\n" not in message
    message.encode()  # it can be printed
    return message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("hi", "messages[1]: wanted an object, found 'hi'"),
        ({"role": "developer", "content": ""}, "messages[1].role: wanted one of system, user, assistant, tool"),
        ({"content": ""}, "messages[1].role: wanted one of system, user, assistant, tool, found nothing"),
        ({"role": []}, "messages[1].role: wanted one of"),
        (user(None), "messages[1].content: wanted a string or a list of parts, found nothing"),
        (user(5), "messages[1].content: wanted a string or a list of parts, found 5"),
        (user(["x"]), "messages[1].content[0]: wanted an object, found 'x'"),
        (user([{"type": "input_audio"}]), "messages[1].content[0].type: wanted text, image or image_url"),
        (user([{"type": "text"}]), "messages[1].content[0].text: wanted a string, found nothing"),
        (user([{"type": "image"}]), "messages[1].content[0]: an image, but no image block is left for it"),
        (user("a\ud83d"), "messages[1].content: half a character (lone surrogate U+D83D) at position 1"),
        (user("", name=5), "messages[1].name: wanted a string, found 5"),
        (user("", name="\ude00"), "messages[1].name: half a character"),
        ({"role": "system", "tools": ["\ud83d"]}, "messages[1].tools: half a character"),
        ({"role": "assistant", "reasoning": 5}, "messages[1].reasoning: wanted a string, found 5"),
        ({"role": "assistant", "reasoning_content": "\ud83d"}, "messages[1].reasoning_content: half a character"),
        ({"role": "assistant", "tool_calls": {}}, None),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls: wanted a list, found 'x'"),
        (assistant({"type": "custom"}), "messages[1].tool_calls[0].type: wanted function, found 'custom'"),
        (assistant({}), "messages[1].tool_calls[0].function: wanted an object, found nothing"),
        (assistant(call("", {})), "messages[1].tool_calls[0].function.name: wanted a string, found nothing"),
        (assistant(call("f", 5)), "messages[1].tool_calls[0].function.arguments: wanted a JSON object, found 5"),
        (assistant(call("f", "[1]")), "messages[1].tool_calls[0].function.arguments: wanted a JSON object, found [1]"),
        (
            assistant(call("f", '{"a": "\\ud83d"}')),
            "messages[1].tool_calls[0].function.arguments['a']: half a character",
        ),
        (assistant(call("f", {"\ud83d\n": 1})), r"messages[1].tool_calls[0].function.arguments['\ud83d\n']: half a"),
        (assistant(call("f", {"a": {1}})), "messages[1].tool_calls[0].function.arguments['a']: wanted a JSON value"),
        (
            assistant(call("f", {"a": [{1}]})),
            "messages[1].tool_calls[0].function.arguments['a']: cannot be written as JSON",
        ),
        ({"role": "tool", "content": "x"}, "messages[1]: a result of no known call; give `tool_call_id` or `name`"),
        ({"role": "tool", "name": 5, "content": ""}, "messages[1].name: wanted a string, found 5"),
        ({"role": "tool", "name": "f"}, "messages[1].content: wanted a string or a list of parts, found nothing"),
    ],
)
def test_a_bad_message_is_refused_by_the_name_of_its_field(message: Any, expected: str | None) -> None:
    if expected is None:  # an empty object for an empty list does no harm
        render([user("x"), message])
    else:
        assert refusal([user("x"), message]).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reasoning_effort": "medium"}, "reasoning_effort: wanted one of low, high, max, found 'medium'"),
        ({"reasoning_effort": "medium", "thinking": False}, "reasoning_effort: wanted one of low, high, max"),
        ({"tool_choice": "any"}, "tool_choice: wanted auto, none, required or a named function, found 'any'"),
        ({"response_format": "json"}, "response_format: wanted an object, found 'json'"),
        ({"response_format": {}}, "response_format.type: wanted text, json_object or json_schema, found nothing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: wanted an object"),
        ({"tools": [{1: 2, "a": 3}]}, "tools: cannot be written as JSON"),
        ({"tools": ["\ud83d"]}, "tools: half a character"),
        ({"tools": {"f": 1}}, "tools: wanted a list, found {'f': 1}"),
        ({"image_blocks": ["<|media_pad|>"]}, "image_blocks: 1 more than the messages have images"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(options: dict[str, Any], expected: str) -> None:
    assert refusal([user("x")], **options).startswith(expected)


def test_messages_are_a_list() -> None:
    assert refusal("hi").startswith("messages: wanted a list, found 'hi'")
    assert refusal({"role": "user"}).startswith("messages: wanted a list")
