"""From tokens to the parts of an answer, on the engine's thread, so that an answer ends at the token that ends it.

Stop texts end what is said, never what is thought or a tool call: those are looked for in the content alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.generate import Step
from runtime.server.stops import StopTexts
from runtime.text.channels import ChannelParser, Content, Event, ToolCall
from runtime.text.incremental import IncrementalDecoder
from runtime.text.tokenizer import Tokenizer


class Answer(Protocol):
    """Reads tokens. `reason` is None until the answer has ended, then `stop`, `length` or `tool_calls`."""

    reason: str | None

    def feed(self, step: Step) -> list[Event]:
        """What this token adds; after the last one, also what was held back."""
        ...


class PlainAnswer:
    """A continuation: its text. The token that ends it is no part of it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = StopTexts(stops)

    def feed(self, step: Step) -> list[Event]:
        text = "" if step.finish_reason == "stop" else self._stops.feed(self._decoder.feed(step.token_id))
        if step.finish_reason is not None:
            text += self._stops.feed(self._decoder.flush()) + self._stops.finish()
        self.reason = "stop" if self._stops.hit else step.finish_reason
        return [Content(text)] if text else []


class ChatAnswer:
    """A message: reasoning, content and calls. Calls are left out unless tools were offered (`calls`).

    With `calls` "one", the first call ends the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], calls: str) -> None:
        self.reason: str | None = None
        self._parser = ChannelParser(tokenizer)
        self._stops = StopTexts(stops)
        self._calls = calls
        self._called = False

    def feed(self, step: Step) -> list[Event]:
        events = self._parser.feed(step.token_id)
        if step.finish_reason is not None:
            events = events + self._parser.finish()
        kept = [event for event in map(self._let_through, events) if event is not None]
        ended = step.finish_reason is not None or (self._called and self._calls == "one")
        if ended and (rest := self._stops.finish()):
            kept.append(Content(rest))
        if self._stops.hit:
            self.reason = "stop"
        elif ended:
            self.reason = "tool_calls" if self._called and step.finish_reason != "length" else step.finish_reason
        return kept

    def _let_through(self, event: Event) -> Event | None:
        match event:
            case Content(text):
                text = self._stops.feed(text)
                return Content(text) if text else None
            case ToolCall():
                if self._calls == "none" or self._stops.hit or (self._called and self._calls == "one"):
                    return None
                self._called = True
        return event
