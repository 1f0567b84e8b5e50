"""Answers in OpenAI's shapes, whole and in chunks, from the same parts: joined, the chunks say what the whole says."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any, Protocol

from runtime.server.worker import Usage
from runtime.text.channels import Content, Event, Reasoning, ToolCall

Json = dict[str, Any]


class Reply(Protocol):
    """The shape of one answer."""

    id: str

    def begin(self) -> list[Json]:
        """Chunks before anything is said."""
        ...

    def say(self, events: Iterable[Event]) -> list[Json]:
        """Chunks for these parts."""
        ...

    def end(self, reason: str, usage: Usage) -> list[Json]:
        """The last chunks."""
        ...

    def whole(self, events: Iterable[Event], reason: str, usage: Usage) -> Json:
        """Everything at once."""
        ...


class _Shape:
    """What both kinds share. With `include_usage`, a stream ends with a chunk of usage and no choices."""

    object: str
    prefix: str

    def __init__(self, model: str, include_usage: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head: Json = {"id": self.id, "object": self.object, "created": int(time.time()), "model": model}
        self._include_usage = include_usage

    def _chunk(self, choice: Json) -> Json:
        chunk = self._head | {"choices": [{"index": 0, "logprobs": None, "finish_reason": None} | choice]}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _usage_chunk(self, usage: Usage) -> list[Json]:
        return [self._head | {"choices": [], "usage": usage_object(usage)}] if self._include_usage else []


def usage_object(usage: Usage) -> Json:
    """Usage as the API has it."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class ChatReply(_Shape):
    """/v1/chat/completions."""

    object = "chat.completion.chunk"
    prefix = "chatcmpl"

    def begin(self) -> list[Json]:
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})]

    def say(self, events: Iterable[Event]) -> list[Json]:
        return [self._chunk({"delta": self._delta(event)}) for event in events]

    def end(self, reason: str, usage: Usage) -> list[Json]:
        return [self._chunk({"delta": {}, "finish_reason": reason}), *self._usage_chunk(usage)]

    def whole(self, events: Iterable[Event], reason: str, usage: Usage) -> Json:
        events = list(events)
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = [self._call(event) for event in events if isinstance(event, ToolCall)]
        message: Json = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": usage_object(usage)}

    def _delta(self, event: Event) -> Json:
        match event:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case ToolCall():
                return {"tool_calls": [{"index": event.index, **self._call(event)}]}

    def _call(self, call: ToolCall) -> Json:
        return {
            "id": f"call_{self.id.removeprefix(self.prefix + '-')}_{call.index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class CompletionReply(_Shape):
    """/v1/completions."""

    object = "text_completion"
    prefix = "cmpl"

    def begin(self) -> list[Json]:
        return []

    def say(self, events: Iterable[Event]) -> list[Json]:
        return [self._chunk({"text": _text([event])}) for event in events]

    def end(self, reason: str, usage: Usage) -> list[Json]:
        return [self._chunk({"text": "", "finish_reason": reason}), *self._usage_chunk(usage)]

    def whole(self, events: Iterable[Event], reason: str, usage: Usage) -> Json:
        choice = {"index": 0, "text": _text(events), "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice], "usage": usage_object(usage)}


def _text(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))
