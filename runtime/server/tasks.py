"""From a request that is valid to what the model is to do: prompt ids, a bound, a choice of tokens, a reading."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import UsageError
from runtime.generate import Engine, Sampler, greedy
from runtime.generate.sampling import Choose
from runtime.server.answers import Answer, ChatAnswer, PlainAnswer
from runtime.server.errors import ApiError, from_engine, refused
from runtime.server.schema import DEFAULT_COMPLETION_TOKENS, ChatRequest, Common, CompletionRequest
from runtime.text.chat import render
from runtime.text.tokenizer import Tokenizer

DEFAULT_EFFORT = "max"


@dataclass(frozen=True)
class Task:
    """`settings` are what the server has settled where the request left it open, for the response's headers."""

    prompt: list[int]
    max_new: int
    choose: Choose
    answer: Answer
    settings: Mapping[str, str]


def chat_task(request: ChatRequest, engine: Engine) -> Task:
    """Raises ApiError 400 for what cannot be rendered and for a prompt that is too long.

    Each message and each tool is at least a token: what has too many is not rendered, which would take long.
    """
    tokenizer = _tokenizer(engine)
    fields = request.model_dump(exclude_unset=True, by_alias=True)
    if (least := len(request.messages) + len(request.tools or ())) > engine.context:
        raise too_long(f"more than {least}", engine.context, "messages")
    messages = [_for_template(message) for message in fields["messages"]]
    tools = fields.get("tools")
    try:
        segments = render(
            messages,
            tools=tools,
            reasoning_effort=request.reasoning_effort or DEFAULT_EFFORT,
            tool_choice=request.tool_choice,
            response_format=fields.get("response_format"),
        )
        prompt = tokenizer.encode_segments(segments)
    except UsageError as error:
        raise from_engine(error) from None
    offered = tools or any(message.get("tools") for message in messages)
    calls = "none" if not offered or request.tool_choice == "none" else "many"
    if calls == "many" and request.parallel_tool_calls is False:
        calls = "one"
    answer = ChatAnswer(tokenizer, request.stop_texts, calls)
    return _task(request, engine, prompt, request.tokens_asked, answer, "messages")


def completion_task(request: CompletionRequest, engine: Engine) -> Task:
    """Raises ApiError 400 for a prompt that is empty, too long, or has ids that are none."""
    tokenizer, prompt = _tokenizer(engine), request.one_prompt
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise refused("prompt: it is empty, and there is nothing to continue from", "prompt")
    vocabulary = engine.config.vocab_size
    for place, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise refused(f"prompt[{place}]: {token} is no token id: they are 0 to {vocabulary - 1}", "prompt")
    answer = PlainAnswer(tokenizer, request.stop_texts)
    return _task(request, engine, ids, request.tokens_asked or DEFAULT_COMPLETION_TOKENS, answer, "prompt")


def _task(request: Common, engine: Engine, prompt: list[int], asked: int | None, answer: Answer, param: str) -> Task:
    room = engine.context - len(prompt) + 1  # the last token is not read again
    if room < 1:
        raise too_long(len(prompt), engine.context, param)
    max_new = min(asked or room, room)
    settings = {"X-Max-Tokens": str(max_new)}
    choose: Choose = greedy
    if request.temperature:
        seed = (secrets.randbits(53) if request.seed is None else request.seed) % (1 << 64)
        choose = Sampler(request.temperature, 1.0 if request.top_p is None else request.top_p, seed)
        settings["X-Seed"] = str(seed)
    return Task(prompt, max_new, choose, answer, settings)


def too_long(tokens: int | str, context: int, param: str) -> ApiError:
    """The prompt does not fit."""
    return refused(
        f"this model's maximum context length is {context} tokens, the prompt has {tokens}: "
        "shorten it, or start the server with a longer --context",
        param,
        "context_length_exceeded",
    )


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "system"} if message["role"] == "developer" else message


def _tokenizer(engine: Engine) -> Tokenizer:
    assert engine.tokenizer is not None, "the server refuses to start without one"
    return engine.tokenizer
