"""Kimi K3's chat encoding: messages in the OpenAI shape become segments of text, some of them structural.

A prompt is a flat list of segments. Only the markers written here (and image blocks, which the caller makes) are
structural; everything a person, a tool or an earlier answer contributed is ordinary text, so a `<|sep|>` typed by
a user is punctuation around a word and nothing more. Segments are encoded one by one, which makes their boundaries
part of the format: an attribute is four segments, because that is what the model was trained on.

    open(tag, k=v)   S <|open|>  T tag  (T ` k`  T `="`  T v  T `"`)*  S <|sep|>
    close(tag)       S <|close|> T tag  S <|sep|>
    a message        open(message, role=...) ... close(message) S <|end_of_msg|>

This file knows the format, never the ids. Format: specification, section 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from runtime.errors import UsageError
from runtime.text.tokenizer import check_unicode

Message: TypeAlias = Mapping[str, Any]

EFFORTS = ("low", "high", "max")
ROLES = ("system", "user", "assistant", "tool")
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{J}\n```"
TOOLS_DYNAMIC = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{J}\n```"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={e}`."
)
CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
FMT_OBJECT = (
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
FMT_SCHEMA = (
    "The system is invoked with `response_format=json_schema`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
    "The JSON data must match the following schema:\n```json\n{J}\n```"
)


class Segment(NamedTuple):
    """A stretch of the prompt that is encoded alone; `structural` text may contain special tokens."""

    text: str
    structural: bool


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    reasoning_effort: str | None = "max",
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    image_blocks: Sequence[str] | None = None,
    generation_prompt: bool = True,
) -> list[Segment]:
    """The segments of a prompt.

    `reasoning_effort` None leaves the effort note out; with `thinking` off it is never written, and the thoughts
    of earlier answers are left out. `image_blocks` holds one block per image of the conversation, in order, each
    `<|media_begin|>image {W}x{H}<|media_content|><|media_pad|><|media_end|>`. Without `generation_prompt` the
    result ends with the last message instead of the opening of an answer.

    Raises UsageError naming the field that cannot be rendered.
    """
    writer = _Writer(thinking, image_blocks)
    if tools:
        writer.note("tool-declare", TOOLS.replace("{J}", _canonical(_list(tools, "tools"), "tools")))
    if reasoning_effort is not None and reasoning_effort not in EFFORTS:
        raise _unwanted("reasoning_effort", f"one of {', '.join(EFFORTS)}", reasoning_effort)
    if thinking and reasoning_effort is not None:
        writer.note("thinking-effort", EFFORT.replace("{e}", reasoning_effort))
    _render_messages(writer, messages)
    _render_demands(writer, tool_choice, response_format)
    writer.check_images_used()
    if generation_prompt:
        writer.open("message", role="assistant")
        writer.open("think" if thinking else "response")
    return writer.segments


class _Writer:
    """Collects segments. Holds what one render carries along: the thinking mode and the images left to place."""

    def __init__(self, thinking: bool, image_blocks: Sequence[str] | None) -> None:
        self.segments: list[Segment] = []
        self.thinking = thinking
        self._has_images = bool(image_blocks)
        self._images = list(image_blocks or ())[::-1]

    def mark(self, text: str) -> None:
        self.segments.append(Segment(text, True))

    def text(self, text: str) -> None:
        if text:
            self.segments.append(Segment(text, False))

    def open(self, tag: str, **attributes: str | None) -> None:
        """An opening tag; attributes that are None are left out."""
        self.mark("<|open|>")
        self.text(tag)
        for key, value in attributes.items():
            if value is not None:
                self.text(f" {key}")
                self.text('="')
                self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
                self.text('"')
        self.mark("<|sep|>")

    def close(self, tag: str) -> None:
        self.mark("<|close|>")
        self.text(tag)
        self.mark("<|sep|>")

    def end_message(self) -> None:
        self.close("message")
        self.mark("<|end_of_msg|>")

    def note(self, kind: str, body: str) -> None:
        """A system message of the template's own."""
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()

    def content(self, content: Any, field: str) -> None:
        """A message's content: a string, or a list of text and image parts."""
        if isinstance(content, str):
            self._text_with_images(content, field)
            return
        if not isinstance(content, list | tuple):
            raise _unwanted(field, "a string or a list of parts", content)
        for i, part in enumerate(content):
            where = f"{field}[{i}]"
            kind = _mapping(part, where).get("type")
            if kind == "text":
                self._text_with_images(part.get("text"), f"{where}.text")
            elif kind in ("image", "image_url"):
                self._image(where)
            else:
                raise _unwanted(f"{where}.type", "text, image or image_url", kind)

    def _text_with_images(self, text: Any, field: str) -> None:
        text = _string(text, field)
        pieces = text.split(IMAGE_PLACEHOLDER) if self._has_images else [text]
        for i, piece in enumerate(pieces):
            if i:
                self._image(field)
            self.text(piece)

    def _image(self, field: str) -> None:
        if not self._images:
            raise UsageError(f"{field}: an image, but no image block is left for it; send text only")
        self.mark(self._images.pop())

    def check_images_used(self) -> None:
        if self._images:
            raise UsageError(f"image_blocks: {len(self._images)} more than the messages have images")


# -- messages ------------------------------------------------------------------------------------------------


def _render_messages(writer: _Writer, messages: Sequence[Message]) -> None:
    calls: list[_Call] = []
    n_results = 0
    for run in _runs_of_tool_messages(messages):
        if run[0].role == "tool":
            for turn, name in _order_results(run, calls, n_results):
                n_results += 1
                writer.open("message", role="tool", tool=name, index=str(n_results))
                writer.content(turn.message.get("content"), f"{turn.field}.content")
                writer.end_message()
        elif run[0].role == "assistant":
            calls, n_results = _calls(run[0]), 0
            _render_answer(writer, run[0], calls)
        else:
            _render_request(writer, run[0])


class _Turn(NamedTuple):
    """A message, its role, and where it stands, for error messages."""

    message: Message
    role: str
    field: str


def _runs_of_tool_messages(messages: Sequence[Message]) -> Iterator[list[_Turn]]:
    """The messages one by one, except that tool messages in a row come together."""
    run: list[_Turn] = []
    for i, message in enumerate(_list(messages, "messages")):
        field = f"messages[{i}]"
        role = _mapping(message, field).get("role")
        if role not in ROLES:
            raise _unwanted(f"{field}.role", f"one of {', '.join(ROLES)}", role)
        if run and not (role == run[0].role == "tool"):
            yield run
            run = []
        run.append(_Turn(message, role, field))
    if run:
        yield run


def _render_request(writer: _Writer, turn: _Turn) -> None:
    """A user or system message, or the system message that brings new tools."""
    message, role, field = turn
    if role == "system" and message.get("tools"):
        tools = _list(message["tools"], f"{field}.tools")
        writer.note("tool-declare", TOOLS_DYNAMIC.replace("{J}", _canonical(tools, f"{field}.tools")))
        return
    writer.open("message", role=role, name=_name(turn))
    writer.content(message.get("content"), f"{field}.content")
    writer.end_message()


def _render_answer(writer: _Writer, turn: _Turn, calls: Sequence[_Call]) -> None:
    """An earlier answer. The think channel is there even when empty, or, with thinking off, not at all."""
    message, role, field = turn
    writer.open("message", role=role, name=_name(turn))
    if writer.thinking:
        key = "reasoning_content" if message.get("reasoning_content") is not None else "reasoning"
        reasoning = _string(message.get(key) or "", f"{field}.{key}")
        writer.open("think")
        writer.text(reasoning if reasoning.strip() else "")
        writer.close("think")
    writer.open("response")
    if message.get("content") is not None:
        writer.content(message["content"], f"{field}.content")
    writer.close("response")
    if calls:
        writer.open("tools")
        for index, call in enumerate(calls, 1):
            writer.open("call", tool=call.name, index=str(index))
            _render_arguments(writer, call.arguments, f"{call.field}.function.arguments")
            writer.close("call")
        writer.close("tools")
    writer.end_message()


# -- tool calls and their results ------------------------------------------------------------------------------


class _Call(NamedTuple):
    """One tool call of an earlier answer. `arguments` as given: an object, JSON text, or None."""

    id: Any
    name: str
    arguments: Any
    field: str


def _calls(turn: _Turn) -> list[_Call]:
    field = f"{turn.field}.tool_calls"
    calls = []
    for i, call in enumerate(_list(turn.message.get("tool_calls") or [], field)):
        where = f"{field}[{i}]"
        if _mapping(call, where).get("type", "function") != "function":
            raise _unwanted(f"{where}.type", "function", call["type"])
        function = _mapping(call.get("function"), f"{where}.function")
        name = _string(function.get("name") or None, f"{where}.function.name")
        calls.append(_Call(call.get("id"), name, function.get("arguments"), where))
    return calls


def _render_arguments(writer: _Writer, arguments: Any, field: str) -> None:
    """One channel per argument, typed; text that is not JSON goes whole into a `json` channel."""
    if isinstance(arguments, str):
        raw = _string(arguments, field)
        try:
            arguments = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            writer.open("json", type="object")
            writer.text(raw)
            writer.close("json")
            return
    if arguments is None:
        return
    if not isinstance(arguments, Mapping):
        raise _unwanted(field, "a JSON object", arguments)
    for key, value in arguments.items():
        where = f"{field}[{key!r}]"
        kind = _json_type(value, where)
        writer.open("argument", key=_string(key, where), type=kind)
        writer.text(_string(value, where) if kind == "string" else _json(value, where))
        writer.close("argument")


def _json_type(value: Any, field: str) -> str:
    if value is None:
        return "null"
    for kind, types in (
        ("boolean", bool),  # before number: a Python bool is an int
        ("number", int | float),
        ("string", str),
        ("object", dict),
        ("array", list | tuple),
    ):
        if isinstance(value, types):
            return kind
    raise _unwanted(field, "a JSON value", value)


def _order_results(run: list[_Turn], calls: Sequence[_Call], n_before: int) -> list[tuple[_Turn, str]]:
    """Tool results in the order of the calls they answer, with the tool's name.

    When one of the run answers no call, the run stays as it is, and each result names its tool itself or is
    taken to answer the call at its place; `n_before` results came since the calls.
    """
    places = [_answered_call(turn.message, calls) for turn in run]
    matched = [(place, turn) for place, turn in zip(places, run, strict=True) if place is not None]
    if len(matched) == len(run):
        return [(turn, calls[place].name) for place, turn in sorted(matched, key=lambda pair: pair[0])]
    named = []
    for i, turn in enumerate(run, n_before):
        name = turn.message.get("tool") or turn.message.get("name") or (calls[i].name if i < len(calls) else None)
        if name is None:
            raise UsageError(f"{turn.field}: a result of no known call; give `tool_call_id` or `name`")
        named.append((turn, _string(name, f"{turn.field}.name")))
    return named


def _answered_call(message: Message, calls: Sequence[_Call]) -> int | None:
    call_id = message.get("tool_call_id") or message.get("id")
    return next((i for i, call in enumerate(calls) if call_id and call.id == call_id), None)


# -- what is asked of the next answer ----------------------------------------------------------------------------


def _render_demands(
    writer: _Writer, tool_choice: str | Mapping[str, Any] | None, response_format: Mapping[str, Any] | None
) -> None:
    if isinstance(tool_choice, str) and tool_choice in CHOICE:
        writer.note("tool-choice", CHOICE[tool_choice])
    elif not (tool_choice is None or tool_choice == "auto" or isinstance(tool_choice, Mapping)):
        raise _unwanted("tool_choice", "auto, none, required or a named function", tool_choice)
    if response_format is None:
        return
    kind = _mapping(response_format, "response_format").get("type")
    if kind == "json_object":
        writer.note("response-format", FMT_OBJECT)
    elif kind == "json_schema":
        schema = _mapping(response_format.get("json_schema"), "response_format.json_schema")
        wrapped = (schema[key] for key in ("schema", "json_schema") if schema.get(key) is not None)
        body = _canonical(next(wrapped, schema), "response_format.json_schema")
        writer.note("response-format", FMT_SCHEMA.replace("{J}", body))
    elif kind != "text":
        raise _unwanted("response_format.type", "text, json_object or json_schema", kind)


# -- values ------------------------------------------------------------------------------------------------------


def _name(turn: _Turn) -> str | None:
    name = turn.message.get("name")
    return _string(name, f"{turn.field}.name") if name else None


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _unwanted(field, "a string", value)
    check_unicode(value, field)
    return value


def _list(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _unwanted(field, "a list", value)
    return value


def _mapping(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unwanted(field, "an object", value)
    return value


def _canonical(value: Any, field: str) -> str:
    """Compact JSON with all keys sorted: how tools and schemas are shown to the model."""
    return _json(value, field, sort_keys=True, separators=(",", ":"))


def _json(value: Any, field: str, **style: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, **style)
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"{field}: cannot be written as JSON ({e})") from None
    return _string(text, field)


def _unwanted(field: str, wanted: str, found: Any) -> UsageError:
    shown = "nothing" if found is None else repr(found)
    return UsageError(f"{field}: wanted {wanted}, found {shown if len(shown) <= 80 else shown[:77] + '...'}")
