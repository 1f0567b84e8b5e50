"""What a request may be: a table of bodies. What is refused is refused before any work, with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.generate import Engine
from runtime.server.body import parse_object
from runtime.server.errors import ApiError
from runtime.server.schema import ChatRequest, validate_chat, validate_completion
from runtime.server.tasks import chat_task, completion_task

HELLO = {"role": "user", "content": "Hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}


def check(engine: Engine, **fields: Any) -> ChatRequest:
    """As the route does it, from bytes to the task."""
    body = parse_object(json.dumps({"model": "m", "messages": [HELLO], **fields}).encode())
    request = validate_chat(body)
    chat_task(request, engine)
    return request


ACCEPTED: list[dict[str, Any]] = [
    {"temperature": 0, "top_p": 0.5, "seed": -1},
    {"max_tokens": 1},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"max_tokens": 10**12},
    {"stop": None},
    {"stop": "x"},
    {"stop": ["a", "b", "c", "\u2028"]},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": False, "n": 1, "user": "u", "metadata": {"k": "v"}, "store": False},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0},
    {"service_tier": "auto", "modalities": ["text"], "verbosity": "medium", "prompt_cache_key": "k"},
    {"functions": None, "function_call": None, "audio": None, "tools": None, "tool_choice": None},
    {"reasoning_effort": "low"},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"messages": [{"role": "developer", "content": "Be brief."}, HELLO]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]},
    {"messages": [HELLO, CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "42"}, HELLO]},
    {"messages": [HELLO, {"role": "assistant", "content": "x", "reasoning_content": "y", "refusal": None}, HELLO]},
    {"messages": [HELLO, {"role": "assistant", "content": "", "annotations": [], "function_call": None}, HELLO]},
    {"messages": [{"role": "user", "content": "\ud83d\ude00 paired", "name": "Ann"}]},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modle": "x"}, "modle"),
    ({"model": 3}, "model"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": "\ud83d"}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"chunks": 3}}, "stream_options.chunks"),
    ({"logprobs": True}, "logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content"),
    ({"messages": [HELLO, {"role": "user", "content": "\udc00"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "\ude00\ud83d"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "\ud83d"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages[0].content[0].text"),
    ({"messages": [HELLO, {**CALLED, "audio": {"id": "x"}}]}, "messages[1].audio"),
    (
        {"messages": [HELLO, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (
        {"messages": [HELLO, {**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]}]},
        "messages[1].tool_calls[0].function.arguments['a']",
    ),
    ({"messages": [{"role": "tool", "content": "42"}]}, "messages[0]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"\ud83d": 1}}}]}, None),
]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "m", "stop": "a", "stop": "b"}', '"stop" is given twice'),
        (b'{"model": "m", "tools": [{"x": {"a": 1, "a": 1}}]}', '"a" is given twice'),
        (b'{"seed": ' + b"9" * 5000 + b"}", "5,000 digits"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b'{"temperature": -1e999}', "temperature: a number beyond"),
        (b"[]", "found an array"),
        (b"null", "found null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"": 1, "model": "m", "prompt": "x"}', '"" is not a parameter'),
        (b'{"model": "m", "prompt": "x", "echo": true}', "echo: this server takes false here"),
    ],
)
def test_what_json_does_not_allow_or_leaves_open_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ApiError) as refusal:
        validate_completion(parse_object(body))
    assert refusal.value.status == 400
    assert says in refusal.value.message
    assert "sys." not in refusal.value.message, "what a client can do, not what Python has"


@pytest.mark.parametrize("many", [{"messages": [HELLO] * 4097}, {"messages": [HELLO], "tools": [TOOL] * 4096}])
def test_more_messages_than_tokens_are_not_even_rendered(
    embedded_engine: Engine, many: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.server.tasks.render", None)
    with pytest.raises(ApiError) as refusal:
        check(embedded_engine, **many)
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(embedded_engine: Engine, fields: dict[str, Any]) -> None:
    check(embedded_engine, **fields)


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=ascii)
def test_refused(embedded_engine: Engine, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as refusal:
        check(embedded_engine, **fields)
    error = refusal.value
    assert error.status == 400
    assert error.kind == "invalid_request_error"
    if param is not None:
        assert error.param == param
        assert error.message.startswith(param)
    json.dumps(error.body).encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff{}", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_object(body)
    assert refusal.value.status == 400


def test_a_number_of_many_digits_is_refused() -> None:
    with pytest.raises(ApiError):
        validate_completion(parse_object(b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}"))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([], "prompt"), (["a", "b"], "prompt"), ([1 << 40], "prompt"), ([-1], "prompt"), (3, "prompt")],
)
def test_a_prompt_that_is_none(embedded_engine: Engine, prompt: Any, param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        completion_task(validate_completion({"model": "m", "prompt": prompt}), embedded_engine)
    assert refusal.value.param == param


@pytest.mark.parametrize("prompt", ["Hello", ["Hello"]])
def test_the_forms_of_a_prompt_are_the_same_prompt(embedded_engine: Engine, prompt: Any) -> None:
    assert embedded_engine.tokenizer is not None
    ids = embedded_engine.tokenizer.encode("Hello")
    for form in (prompt, ids, [ids]):
        task = completion_task(validate_completion({"model": "m", "prompt": form}), embedded_engine)
        assert task.prompt == ids
        assert task.max_new == 16


def test_text_and_parts_are_the_same_prompt(embedded_engine: Engine) -> None:
    """Parts are segments of their own, as the template has them, so one part is the same as its text."""
    whole, part = (
        chat_task(validate_chat({"model": "m", "messages": [{"role": "user", "content": content}]}), embedded_engine)
        for content in ("Hello there", [{"type": "text", "text": "Hello there"}])
    )
    assert whole.prompt == part.prompt


def test_a_prompt_as_long_as_the_context_leaves_room_for_one_token(embedded_engine: Engine) -> None:
    context = embedded_engine.context
    for length, room in ((context - 1, 2), (context, 1)):
        body = {"model": "m", "prompt": [5] * length, "max_tokens": 100}
        assert completion_task(validate_completion(body), embedded_engine).max_new == room
    for length in (context + 1, 10 * context):
        with pytest.raises(ApiError) as refusal:
            completion_task(validate_completion({"model": "m", "prompt": [5] * length}), embedded_engine)
        assert refusal.value.code == "context_length_exceeded"
        assert refusal.value.status == 400


def test_an_unset_bound_is_the_room_there_is(embedded_engine: Engine) -> None:
    task = chat_task(validate_chat({"model": "m", "messages": [HELLO]}), embedded_engine)
    assert task.max_new == embedded_engine.context - len(task.prompt) + 1
    assert task.settings["X-Max-Tokens"] == str(task.max_new)


def test_a_seed_that_was_not_given_is_told(embedded_engine: Engine) -> None:
    tasks = [
        chat_task(validate_chat({"model": "m", "messages": [HELLO], "temperature": 1}), embedded_engine)
        for _ in range(2)
    ]
    assert tasks[0].settings["X-Seed"] != tasks[1].settings["X-Seed"]
