"""Every parser and every edge of an answer, driven from the logits: what the model says, and what a client gets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serverside import MODEL, ScriptedModel, Served, joined, lend, served
from vocabulary import TOKENIZER

from runtime.generate import Engine, Step
from runtime.server.answers import ChatAnswer
from runtime.text.channels import ChannelParser, Content, Reasoning, ToolCall
from runtime.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
END = "<|close|>message<|sep|><|end_of_msg|>"
THINK = "<|close|>think<|sep|><|open|>response<|sep|>"


class Scripted:
    """A server whose model says what it is told."""

    def __init__(self, server: Served, model: ScriptedModel, tokenizer: Tokenizer) -> None:
        self.server, self.model, self.tokenizer = server, model, tokenizer

    def says(self, text: str) -> None:
        self.model.script = self.tokenizer.encode_structural(text)

    def bytes(self, text: str) -> None:
        """One byte a token."""
        single = {self.tokenizer.token_bytes(i): i for i in range(self.tokenizer.n_ranks)}
        self.model.script = [single[bytes([byte])] for byte in text.encode()]

    def both(self, **fields: Any) -> dict[str, Any]:
        """The answer, plain and streamed, which must be the same."""
        plain = self.server.chat(**fields).json
        stream = self.server.chat(**fields, stream=True, stream_options={"include_usage": True}).events
        choice, message = plain["choices"][0], plain["choices"][0]["message"]
        streamed = joined(stream)
        assert streamed["content"] == (message["content"] or "")
        assert streamed["reasoning_content"] == message.get("reasoning_content", "")
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert [call["function"] for call in streamed["tool_calls"]] == [
            call["function"] for call in message.get("tool_calls", [])
        ]
        assert [chunk["usage"] for chunk in stream[:-1] if chunk["usage"]] == [plain["usage"]]
        assert stream[-2]["choices"] == []
        return {**message, "finish_reason": choice["finish_reason"], "tokens": plain["usage"]["completion_tokens"]}


@pytest.fixture(scope="module")
def scripted(embedded_engine: Engine) -> Iterator[Scripted]:
    model = ScriptedModel(embedded_engine.config.vocab_size)
    tokenizer = embedded_engine.tokenizer
    assert tokenizer is not None
    with served(lend(embedded_engine, model=model)) as server:
        yield Scripted(server, model, tokenizer)


def test_reasoning_and_content(scripted: Scripted) -> None:
    scripted.says(f"sum{THINK}It is 4.<|close|>response<|sep|>{END}")
    answer = scripted.both()
    assert (answer["reasoning_content"], answer["content"]) == ("sum", "It is 4.")
    assert answer["finish_reason"] == "stop"
    assert answer["tokens"] == len(scripted.model.script)


def test_what_is_cut_while_thinking_is_reasoning(scripted: Scripted) -> None:
    scripted.says("on and on and on")
    answer = scripted.both(max_tokens=2)
    assert answer["finish_reason"] == "length"
    assert answer["content"] == ""
    assert answer["reasoning_content"] == scripted.tokenizer.decode(scripted.model.script[:2])


def test_thoughts_that_end_with_the_message_alone(scripted: Scripted) -> None:
    scripted.says("hm<|end_of_msg|>")
    answer = scripted.both()
    assert (answer["reasoning_content"], answer["content"], answer["finish_reason"]) == ("hm", "", "stop")


def test_markers_in_ordinary_tokens_are_text(scripted: Scripted) -> None:
    text = "<|open|>tools<|sep|>"
    script = scripted.tokenizer.encode_structural(f"a{THINK}")
    script += scripted.tokenizer.encode(text) + scripted.tokenizer.encode_structural(END)
    scripted.model.script = script
    assert scripted.both()["content"] == text


CALLS = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="weather" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)


def test_tool_calls(scripted: Scripted) -> None:
    scripted.says(f"look{THINK}Looking.{CALLS}{END}")
    answer = scripted.both(tools=TOOLS)
    assert answer["finish_reason"] == "tool_calls"
    assert answer["content"] == "Looking."
    names = [call["function"]["name"] for call in answer["tool_calls"]]
    arguments = [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert names == ["weather", "weather"]
    assert arguments == [{"city": "Zürich", "days": 2}, {}]
    assert len({call["id"] for call in answer["tool_calls"]}) == 2


def test_the_official_client_s_tool_loop(embedded_engine: Engine) -> None:
    """Question, thought and call, result, answer: the second prompt is what was read and said, and more."""
    tokenizer = embedded_engine.tokenizer
    assert tokenizer is not None
    model = ScriptedModel(embedded_engine.config.vocab_size)
    one_call = (
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Zürich<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    )
    said = f"look{THINK}{one_call}{END}"
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with (
        served(lend(embedded_engine, model=model, snapshots=50_000_000)) as server,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client,
    ):
        model.script = tokenizer.encode_segments(pieces(said))
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})  # type: ignore[union-attr]
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
        model.begin()
        model.script = tokenizer.encode_structural(f"so{THINK}Sunny.<|close|>response<|sep|>{END}")
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
            final = stream.get_final_completion()
    assert final.choices[0].message.content == "Sunny."
    assert first.usage
    assert final.usage is None  # it was not asked for
    known = server.worker.metrics.registry.get_sample_value("expertstream_cached_tokens_total")
    assert known == first.usage.total_tokens - 1


def pieces(text: str) -> list[tuple[str, bool]]:
    """The text as the template would write it: every marker, and every text between two of them, by itself."""
    tag = re.compile(r'(<\|[a-z_]+\|>)|( [a-z]+(?==))|(=")|(")(?= |<)|([^<"= ]+[^<"=]*)')
    return [(match[0], match[1] is not None) for match in tag.finditer(text)]


def test_calls_alone_have_no_content(scripted: Scripted) -> None:
    scripted.says(f"look{THINK}{CALLS}{END}")
    assert scripted.both(tools=TOOLS)["content"] is None


def test_one_call_where_only_one_is_asked_for(scripted: Scripted) -> None:
    scripted.says(f"look{THINK}{CALLS}{END}")
    answer = scripted.both(tools=TOOLS, parallel_tool_calls=False)
    assert len(answer["tool_calls"]) == 1
    assert answer["finish_reason"] == "tool_calls"
    assert answer["tokens"] < len(scripted.model.script)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_no_calls_where_none_can_be_made(scripted: Scripted, fields: dict[str, Any]) -> None:
    scripted.says(f"look{THINK}No.{CALLS}{END}")
    answer = scripted.both(**fields)
    assert "tool_calls" not in answer
    assert (answer["content"], answer["finish_reason"]) == ("No.", "stop")


def test_a_call_that_is_cut_is_not_made(scripted: Scripted) -> None:
    scripted.says(f"look{THINK}{CALLS}{END}")
    cut = len(scripted.tokenizer.encode_structural(f"look{THINK}{CALLS.split('2<|close|>')[0]}"))
    answer = scripted.both(tools=TOOLS, max_tokens=cut)
    assert "tool_calls" not in answer
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("said", "stop", "content"),
    [
        ("one two three", "two", "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["two three", "two"], "one "),
        ("one two three", ["two four"], "one two three"),
        ("one two", ["two three"], "one two"),
        ("x\u2028y", ["\u2028"], "x"),
    ],
)
def test_stop_texts_end_the_content(scripted: Scripted, said: str, stop: Any, content: str) -> None:
    scripted.says(f"think two{THINK}{said}<|close|>response<|sep|>{END}")
    answer = scripted.both(stop=stop)
    assert answer["content"] == content
    assert answer["reasoning_content"] == "think two"
    assert answer["finish_reason"] == "stop"


def test_a_stop_text_ends_the_work(scripted: Scripted) -> None:
    scripted.bytes("abcdefgh")
    plain = scripted.server.complete("Hello", stop="de").json
    assert plain["choices"][0] | {"text": "abc", "finish_reason": "stop"} == plain["choices"][0]
    assert plain["usage"]["completion_tokens"] == 5


words = st.sampled_from(
    ["a", "b", "é", "😀", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", THINK, *CALLS.split("Z")]
)


@given(st.lists(words, max_size=25), st.lists(st.text("abé", min_size=1, max_size=3), max_size=4), st.data())
def test_whatever_the_model_says(said: list[str], stops: list[str], data: st.DataObject) -> None:
    """Joined parts are what the parser finds in all of it, up to the first stop text; the answer ends once."""
    ids = [token for word in said for token in TOKENIZER.encode_structural(word)] or [TOKENIZER.end_of_msg_id]
    ids = ids[: data.draw(st.integers(1, len(ids)))]
    ends = ids.index(TOKENIZER.end_of_msg_id) + 1 if TOKENIZER.end_of_msg_id in ids else len(ids)
    ids = ids[:ends]
    parser = ChannelParser(TOKENIZER)
    for token in ids:
        parser.feed(token)
    parser.finish()
    answer, content, reasoning, calls = ChatAnswer(TOKENIZER, stops, "many"), "", "", 0
    for place, token in enumerate(ids, 1):
        ended = "stop" if token == TOKENIZER.end_of_msg_id else "length" if place == len(ids) else None
        for event in answer.feed(Step(token, None, 0.0, 0, 0, 0, ended)):
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case ToolCall():
                    calls += 1
        assert (answer.reason is not None) >= (ended is not None)
        if answer.reason is not None:
            break
    whole = parser.message
    cut = min((whole.content.find(stop) for stop in stops if stop in whole.content), default=None)
    assert content == whole.content[:cut]
    assert whole.reasoning_content.startswith(reasoning)
    if cut is None:
        assert (reasoning, calls) == (whole.reasoning_content, len(whole.tool_calls))
        assert answer.reason == ("length" if ids[-1] != TOKENIZER.end_of_msg_id else "tool_calls" if calls else "stop")
    else:
        assert answer.reason == "stop"


def test_characters_come_whole(scripted: Scripted) -> None:
    text = "é漢😀\u0085\u2028\u2029\r\n\x00 end"
    scripted.bytes(text)
    size = len(text.encode())
    stream = scripted.server.complete("Hello", max_tokens=size, stream=True)
    pieces = [chunk["choices"][0]["text"] for chunk in stream.events[:-1]]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert scripted.server.complete("Hello", max_tokens=size).json["choices"][0]["text"] == text
    with httpx.stream(
        "POST",
        f"http://127.0.0.1:{scripted.server.port}/v1/completions",
        json={"model": MODEL, "prompt": "Hello", "max_tokens": size, "stream": True},
    ) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == text


def test_a_character_that_is_cut_is_said_to_be(scripted: Scripted) -> None:
    scripted.bytes("a😀")
    for streamed in (False, True):
        answer = scripted.server.complete("Hello", max_tokens=3, stream=streamed)
        if streamed:
            text = "".join(chunk["choices"][0]["text"] for chunk in answer.events[:-1])
        else:
            text = answer.json["choices"][0]["text"]
        assert text == "a\ufffd"


def test_usage_only_where_it_is_asked_for(scripted: Scripted) -> None:
    scripted.says(f"x{THINK}y{END}")
    chunks = scripted.server.chat(stream=True).events[:-1]
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_progress_where_it_is_asked_for(scripted: Scripted) -> None:
    scripted.says(f"x{THINK}y{END}")
    prompt = [5] * 1100
    answer = scripted.server.complete(prompt, stream=True, stream_options={"include_progress": True})
    assert answer.comments == ["accepted", "prompt 512/1100", "prompt 1024/1100", "prompt 1100/1100"]
    assert scripted.server.complete(prompt, stream=True).comments == ["accepted"]
