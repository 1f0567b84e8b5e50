"""`chat`: a conversation, one line a message, over one session, so that every turn costs only its new part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.checkpoint import Checkpoint
from runtime.commands.answer import Answer, ChatReader, generate
from runtime.commands.drives import Failures
from runtime.commands.loading import Loading, learning
from runtime.commands.terminal import Interrupts, is_terminal, say
from runtime.commands.tracing import Tracing
from runtime.errors import Cancelled, UsageError
from runtime.generate import Session
from runtime.text.chat import render
from runtime.text.tokenizer import Tokenizer, check_unicode

HELP = "one line is one message; /reset forgets the conversation, /exit or ^D leaves, ^C stops an answer"


@dataclass
class Conversation:
    """The messages so far, and the session that has read them."""

    session: Session
    tokenizer: Tokenizer
    system: str | None
    reasoning_effort: str
    max_new: int
    stats: bool
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._failures = Failures(self.session.engine)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def say(self, text: str) -> None:
        """Print the answer to `text`. The history keeps what was received of it, whatever ended it.

        Raises Cancelled when it was stopped, and what generating raises.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        reader = ChatReader(self.tokenizer)
        prompt = self.tokenizer.encode_segments(render(messages, reasoning_effort=self.reasoning_effort))
        answer = Answer(reader)
        try:
            with Interrupts() as stop:
                steps = generate(self.session, prompt, self.max_new, answer, stop, stats=self.stats)
        finally:
            if answer.begun:
                self.messages = [*messages, reader.message]
        self._failures.tell()
        if steps[-1].finish_reason == "length":
            say(f"(cut after {len(steps):,} tokens)")


def chat(loading: Loading, system: str | None, reasoning_effort: str, max_new: int, stats: bool) -> None:
    """Answer line after line of stdin. Mistakes end a piped conversation; at a terminal they are only told."""

    def ready(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise UsageError("this checkpoint has no tiktoken.model, so it cannot read text: use run --prompt-ids")

    if max_new < 1:
        raise UsageError(f"at least one new token must be asked for, not {max_new}: give --max-new 1 or more")
    with Tracing(loading) as tracing:
        with Interrupts() as stop:
            engine = tracing.load(stop, ready)
        assert engine.tokenizer is not None
        with learning(engine):
            _talk(Conversation(engine.session(), engine.tokenizer, system, reasoning_effort, max_new, stats))


def _talk(conversation: Conversation) -> None:
    interactive = is_terminal(sys.stdin)
    if interactive:
        say(HELP)
    for line in _lines(interactive):
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/") and " " not in line:
            say(HELP)
        elif line:
            try:
                check_unicode(line, "this message")
                conversation.say(line)
            except Cancelled as error:
                if error.exit_code != Cancelled.exit_code:
                    raise
                say("(stopped)")
            except UsageError as error:
                if not interactive:
                    raise
                say(f"{error} (or /reset)")


def _lines(interactive: bool) -> Iterator[str]:
    """The lines of stdin, without the white space around them. ^C at an empty prompt is not a way out, ^D is."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing for input)
    while True:
        try:
            line = _line(interactive)
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\n(/exit or ^D leaves)")
            continue
        if line is None:
            return
        yield line.strip()


def _line(interactive: bool) -> str | None:
    """One line, or None at the end. The prompt never goes into a pipe."""
    if interactive and is_terminal(sys.stdout):
        try:
            return input("> ")
        except EOFError:
            say("")
            return None
    if interactive:
        say("> ", end="")
    return sys.stdin.readline() or None
