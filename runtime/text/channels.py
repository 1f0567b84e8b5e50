"""From the ids of an answer to its parts: reasoning, content and tool calls.

An answer starts inside a channel that the prompt has opened, `think` or `response`, and moves on by tags:
`<|open|>` tag attributes `<|sep|>` and `<|close|>` tag `<|sep|>`. Only the four control ids are structure; the same
spelling in ordinary tokens is text. The written form is

    reasoning close(think) open(response) content close(response) [open(tools) call* close(tools)] close(message) end

but models leave it. So no order is demanded: `OPENED` and `CLOSED_BY` say where text goes after a tag, from
wherever it was. What follows from them:

* any opening tag ends the think channel, and so does any closing one; a stream that stops in it was all reasoning;
* a tag that another tag or the end interrupts is no tag; the message is over when it is closed, whatever follows;
* control ids, and the other specials, never reach reasoning, content or arguments;
* between channels white space is layout; anything else there is the answer's content, so nothing said is lost;
* a call counts once it is closed, by itself or by whatever ends the tools channel or the message. A stream cut off
  inside a call does not deliver it: half of a call's arguments are worse than none.

Rendering `message.to_dict()` as history gives back the ids it was parsed from, provided that they are what the
chat encoding writes. This file knows the tags, never the model. Format: specification, section 6.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from runtime.text.incremental import IncrementalDecoder
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reasoning:
    """The next part of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """The next part of the answer proper."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call. `index` counts the answer's calls from 0; `arguments` is JSON, or the text that was not."""

    index: int
    name: str
    arguments: str


Event: TypeAlias = Reasoning | Content | ToolCall


@dataclass(frozen=True)
class ParsedMessage:
    """An answer, or what there is of it so far."""

    reasoning_content: str
    content: str
    tool_calls: tuple[ToolCall, ...]

    def to_dict(self) -> dict[str, Any]:
        """The message in the OpenAI shape, as `chat.render` takes it for history. Calls carry no `id`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class Channel(Enum):
    """Where text goes."""

    REASONING = "reasoning"
    CONTENT = "content"
    BETWEEN = "nowhere, until it is more than white space: then content"
    TOOLS = "nowhere: outside of any call"
    CALL = "nowhere: outside of any argument"
    VALUE = "an argument, or the whole object of arguments"
    CLOSED = "nowhere: the message is over"


OPENED = {
    "think": Channel.REASONING,
    "response": Channel.CONTENT,
    "tools": Channel.TOOLS,
    "call": Channel.CALL,
    "argument": Channel.VALUE,
    "json": Channel.VALUE,
    "message": Channel.CLOSED,  # somebody's next turn, not this answer
}
"""The channel after open(tag); any other tag opens content."""

CLOSED_BY = {
    "argument": Channel.CALL,
    "json": Channel.CALL,
    "call": Channel.TOOLS,
    "message": Channel.CLOSED,
}
"""The channel after close(tag); any other tag leads between channels."""

PARTS_OF_A_CALL = ("argument", "json")
"""Tags that leave the call around them open. Where there is none, or one without a name, they lead between channels."""


@dataclass
class _Call:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    whole: str | None = None


@dataclass
class _Value:
    """An argument being read; `key` None is the whole object, from a `json` tag."""

    key: str | None
    type: str
    text: list[str] = field(default_factory=list)


class ChannelParser:
    """Parses one answer, id by id. `message` is what has arrived; `done` once the model has ended it."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool = True) -> None:
        """`thinking` says which channel the prompt left open: think, or response."""
        self.done = False
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._channel = Channel.REASONING if thinking else Channel.CONTENT
        self._header: list[int] | None = None  # ids of the tag being read
        self._closing = False
        self._between = ""
        self._call: _Call | None = None
        self._value: _Value | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[ToolCall] = []

    @property
    def message(self) -> ParsedMessage:
        """The answer so far."""
        return ParsedMessage("".join(self._reasoning), "".join(self._content), tuple(self._tool_calls))

    def feed(self, token_id: int) -> list[Event]:
        """What this id adds to the answer. After the end of the message, nothing."""
        tokenizer = self._tokenizer
        if self.done:
            return []
        if token_id < tokenizer.n_ranks:
            if self._header is None:
                return self._put(self._decoder.feed(token_id))
            self._header.append(token_id)
            return []
        events = self._put(self._decoder.flush())
        if token_id in (tokenizer.open_id, tokenizer.close_id):
            self._header = []
            self._closing = token_id == tokenizer.close_id
        elif token_id == tokenizer.sep_id and self._header is not None:
            header, self._header = tokenizer.decode(self._header), None
            events += self._turn(header)
        elif token_id == tokenizer.end_of_msg_id:
            self._closing = True
            events += self._turn("message")
            self.done = True
        return events

    def finish(self) -> list[Event]:
        """The stream has stopped: what is still held back. A call or a tag left unfinished is dropped."""
        if self.done:
            return []
        self.done = True
        return self._put(self._decoder.flush())

    def _put(self, text: str) -> list[Event]:
        """Text for the channel that is open."""
        if not text:
            return []
        if self._channel is Channel.BETWEEN:
            self._between += text
            if not self._between.strip():
                return []
            text, self._between, self._channel = self._between, "", Channel.CONTENT
        if self._channel is Channel.REASONING:
            self._reasoning.append(text)
            return [Reasoning(text)]
        if self._channel is Channel.CONTENT:
            self._content.append(text)
            return [Content(text)]
        if self._value is not None:
            self._value.text.append(text)
        return []

    def _turn(self, header: str) -> list[Event]:
        """A complete tag: end what it ends, and move to the channel it leads to."""
        if self._channel is Channel.CLOSED:
            return []
        tag, attributes = parse_header(header)
        channel = CLOSED_BY.get(tag, Channel.BETWEEN) if self._closing else OPENED.get(tag, Channel.CONTENT)
        self._end_value()
        events: list[Event] = []
        call = self._call
        if call is not None and tag not in PARTS_OF_A_CALL:
            events.append(self._end_call(call))
            self._call = None
        if tag == "call" and not self._closing:
            name = attributes.get("tool")
            call = self._call = _Call(name) if name else None
        if call is None and tag in ("call", *PARTS_OF_A_CALL):
            channel = Channel.BETWEEN  # of no call
        if channel is Channel.VALUE:
            key = attributes.get("key", "") if tag == "argument" else None
            self._value = _Value(key, attributes.get("type", ""))
        self._channel, self._between = channel, ""
        return events

    def _end_value(self) -> None:
        value, self._value = self._value, None
        if value is None or self._call is None:
            return
        text = "".join(value.text)
        if value.key is None:
            self._call.whole = text
        else:
            self._call.arguments[value.key] = parse_value(value.type, text)

    def _end_call(self, call: _Call) -> ToolCall:
        arguments = call.whole if call.whole and call.whole.strip() else json.dumps(call.arguments, ensure_ascii=False)
        done = ToolCall(len(self._tool_calls), call.name, arguments)
        self._tool_calls.append(done)
        return done


_TAG = re.compile(r'\s*([^\s="]*)')
_ATTRIBUTE = re.compile(r'([^\s="]+)="([^"]*)"')


def parse_header(header: str) -> tuple[str, dict[str, str]]:
    """`tag a="1" b="2"` as the tag and its attributes, unescaped. Never fails; a tag may come out empty."""
    tag = _TAG.match(header)
    attributes = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(header)}
    return (tag[1] if tag else ""), attributes


def parse_value(kind: str, text: str) -> Any:
    """An argument's value. A string is its text; the rest is JSON, or, where it is not, text after all.

    What JSON or UTF-8 could not carry on to the caller (NaN, an endless number, half a character) stays text too.
    """
    if kind == "string":
        return text
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return value
