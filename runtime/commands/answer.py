"""An answer as it arrives: token by token, split into what is thought and what is said, printed at once.

What is said goes to stdout. What is thought goes to stderr, dimmed on a terminal, so that a pipe gets the answer
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol

from runtime.commands.stats import table, token_line
from runtime.commands.terminal import Interrupts, is_terminal, progress, say, write
from runtime.generate import Session, Step
from runtime.text.channels import ChannelParser, Content, Event, Reasoning
from runtime.text.incremental import IncrementalDecoder
from runtime.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """A stretch of an answer."""

    channel: Literal["reasoning", "text"]
    text: str


class Reader(Protocol):
    """Turns tokens into pieces of text."""

    def feed(self, step: Step) -> list[Piece]:
        """What can be said after this token."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, when there is no further token."""
        ...


class IdReader:
    """For a checkpoint without a tokenizer: the ids, separated by commas as --prompt-ids takes them."""

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, step: Step) -> list[Piece]:
        piece = Piece("text", f"{self._separator}{step.token_id}")
        self._separator = ","
        return [piece]

    def finish(self) -> list[Piece]:
        return []


class PlainReader:
    """For a continuation: its text. The stop token ends it and is no part of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = IncrementalDecoder(tokenizer)

    def feed(self, step: Step) -> list[Piece]:
        return [] if step.finish_reason == "stop" else [Piece("text", self._decoder.feed(step.token_id))]

    def finish(self) -> list[Piece]:
        return [Piece("text", self._decoder.flush())]


class ChatReader:
    """For a message: its channels apart. No tools are offered, so a call would go to nobody and is left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._parser = ChannelParser(tokenizer)

    @property
    def message(self) -> dict[str, Any]:
        """What has arrived, as history."""
        return self._parser.message.to_dict()

    def feed(self, step: Step) -> list[Piece]:
        return self._pieces(self._parser.feed(step.token_id))

    def finish(self) -> list[Piece]:
        return self._pieces(self._parser.finish())

    @staticmethod
    def _pieces(events: Sequence[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            match event:
                case Reasoning(text):
                    pieces.append(Piece("reasoning", text))
                case Content(text):
                    pieces.append(Piece("text", text))
        return pieces


class Answer:
    """Prints the pieces as they come, unless `silent`, and keeps them."""

    def __init__(self, reader: Reader, *, silent: bool = False) -> None:
        self._reader = reader
        self.silent = silent
        self.begun = False
        self._kept: dict[str, list[str]] = {"reasoning": [], "text": []}
        self._last: Piece | None = None

    @property
    def thinks(self) -> bool:
        """Whether thoughts may come, beside the text."""
        return isinstance(self._reader, ChatReader)

    @property
    def text(self) -> str:
        """What was said."""
        return "".join(self._kept["text"])

    @property
    def reasoning(self) -> str:
        """What was thought."""
        return "".join(self._kept["reasoning"])

    def take(self, step: Step) -> str:
        """Print what the token adds, and return it."""
        self.begun = True
        return self._put(self._reader.feed(step))

    def end(self) -> str:
        """Print what was held back and end the line; returns what was held back."""
        rest = self._put(self._reader.finish())
        if self._last is not None:
            self._end_line(self._last)
        return rest

    def _put(self, pieces: list[Piece]) -> str:
        for piece in pieces:
            if not piece.text:
                continue
            self._kept[piece.channel].append(piece.text)
            if self.silent:
                continue
            if self._last is not None and self._last.channel != piece.channel:
                self._end_line(self._last)
            if piece.channel == "text":
                write(piece.text)
            else:
                say(piece.text, dim=True, end="")
            self._last = piece
        return "".join(piece.text for piece in pieces)

    @staticmethod
    def _end_line(last: Piece) -> None:
        if not last.text.endswith("\n"):
            if last.channel == "text":
                write("\n")
            else:
                say("")


def generate(
    session: Session,
    prompt: Sequence[int],
    max_new: int,
    answer: Answer,
    stop: Interrupts,
    *,
    stats: bool = False,
    logits_hash: bool = False,
) -> list[Step]:
    """Let the session answer, printing as it goes. Before an error leaves, what was said is printed to its end."""
    steps: list[Step] = []
    # Lines about tokens would tear apart a text in the same place, thoughts on stderr too: there they come after it.
    hold = not answer.silent and (answer.thinks or (is_terminal(sys.stdout) and is_terminal(sys.stderr)))
    lines: list[str] = []
    try:
        with progress("prompt") as report:
            report(0, len(prompt))
            generation = session.generate(
                prompt, max_new, logits_hash=logits_hash, cancelled=stop.cancelled, prefilled=report
            )
            first = next(generation)
        for step in chain([first], generation):
            steps.append(step)
            piece = answer.take(step)
            if stats:
                lines.append(token_line(len(steps), step, piece))
                if not hold:
                    say(lines.pop())
    finally:
        answer.end()
    if stats:
        say("\n".join([*lines, table(session, steps)]))
    return steps
