"""What a request may be. Everything unknown, and everything that cannot be honoured, is refused with its field's name.

null is as good as absent, for every field. Fields that clients send by default and that ask for nothing are accepted
with the values that ask for nothing (docs/server.md lists them); `Only` marks them.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import core_schema

from runtime.server.body import join
from runtime.server.errors import ApiError, refused

Request = TypeVar("Request", bound="Common")

MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
"""What /v1/completions generates when `max_tokens` is not given, as the API has it."""


class Strict(BaseModel):
    """No coercion, nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class FirstError(FailFast):
    """Ends at the first wrong item of a list, so that a long list of nonsense costs nothing. May stand in a union."""

    def __hash__(self) -> int:
        return 0


class Only:
    """Annotates a field that takes nothing but these values."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def check(self, value: Any) -> Any:
        """The value. Raises ValueError, which pydantic expects, for another one."""
        same = (value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for wanted in self.values)
        if value is not None and not any(same):
            listed = " or ".join(map(json.dumps, self.values)) or "nothing"
            raise ValueError(f"this server takes {listed} here, and cannot honour anything else")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


One = Annotated[Any, Only(1)]
Zero = Annotated[Any, Only(0)]
Off = Annotated[Any, Only(False)]
Nothing = Annotated[Any, Only()]


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list):
        if len(texts) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop texts are taken, not {len(texts)}")
        if any(text == "" for text in texts):
            raise ValueError("an empty text stops everything: leave it out")
    return value


class StreamOptions(Strict):
    """`include_progress` is this server's own: comments that tell how much of the prompt is read."""

    include_usage: bool | None = None
    include_progress: bool | None = None
    include_obfuscation: Off = None


class Common(Strict):
    """What both kinds of request have."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[str | Annotated[list[str], FirstError()] | None, AfterValidator(_stops)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: One = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    repetition_penalty: One = None
    min_p: Zero = None
    top_k: Annotated[Any, Only(0, -1)] = None
    logit_bias: Annotated[Any, Only({})] = None

    @property
    def stop_texts(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def tokens_asked(self) -> int | None:
        """The most tokens to generate, None when the request does not say."""
        return self.max_tokens


# -- chat ------------------------------------------------------------------------------------------------------


class TextPart(Strict):
    """A part of a content."""

    type: Literal["text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], FirstError()]


class Function(Strict):
    """A function that may be called. `strict` is shown to the model like the rest; nothing enforces it."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """A call of an earlier answer."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """A call of an earlier answer; `index` is what streamed ones carry."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class SystemMessage(Strict):
    """`developer` is another name for it. `tools` brings further tools in the middle of a conversation."""

    role: Literal["system", "developer"]
    content: Content | None = None
    name: str | None = None
    tools: Annotated[list[Tool], FirstError()] | None = None


class UserMessage(Strict):
    """What a person said."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer, as this server gave it: its reasoning belongs to it."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[ToolCall], FirstError()] | None = None
    refusal: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    annotations: Annotated[Any, Only([])] = None


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class JsonSchema(Strict):
    """The schema of an answer. It is shown to the model; nothing enforces it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Strict):
    """How the answer is to be written."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _choice(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError("one tool cannot be forced: this server takes auto, none and required")
    return value


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1), FirstError()]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: Literal["low", "high", "max"] | None = None
    tools: Annotated[list[Tool], FirstError()] | None = None
    tool_choice: Annotated[Literal["auto", "none", "required"] | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: Off = None
    logprobs: Off = None
    top_logprobs: Zero = None
    service_tier: Annotated[Any, Only("auto", "default")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    verbosity: Annotated[Any, Only("medium")] = None
    audio: Nothing = None
    functions: Nothing = None
    function_call: Nothing = None
    prediction: Nothing = None
    web_search_options: Nothing = None

    @property
    def tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Ids: TypeAlias = Annotated[list[int], FirstError()]


class CompletionRequest(Common):
    """POST /v1/completions. The prompt is text, or token ids as they are."""

    prompt: str | Ids | Annotated[list[str], FirstError()] | Annotated[list[Ids], FirstError()]
    best_of: One = None
    echo: Off = None
    logprobs: Nothing = None
    suffix: Annotated[Any, Only("")] = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt, out of a list of one."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise refused(f"prompt: one at a time, not {len(prompt)}", "prompt")
            prompt = prompt[0]
        return prompt  # type: ignore[no-any-return]


def validate_chat(body: dict[str, Any]) -> ChatRequest:
    """Raises ApiError 400 naming the field."""
    request = _validate(ChatRequest, body)
    _check_common(request)
    both = request.max_tokens, request.max_completion_tokens
    if None not in both and both[0] != both[1]:
        raise refused("max_tokens and max_completion_tokens are the same thing: give one of them", "max_tokens")
    if request.tool_choice == "required" and not request.tools:
        raise refused("tool_choice: a call is required, but there are no tools", "tool_choice")
    form = request.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        wanted = "is needed" if form.type == "json_schema" else f"does not go with type {form.type}"
        raise refused(f"response_format.json_schema {wanted}", "response_format.json_schema")
    return request


def validate_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError 400 naming the field."""
    request = _validate(CompletionRequest, body)
    _check_common(request)
    return request


def _check_common(request: Common) -> None:
    if request.stream_options is not None and not request.stream:
        raise refused("stream_options is for streams: set stream to true, or leave it out", "stream_options")


def _validate(kind: type[Request], body: dict[str, Any]) -> Request:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error, body) from None


def _refusal(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """The error that got furthest into the body, which of a choice of types is the one that was meant."""
    found = [(_path(details["loc"], body), details) for details in error.errors(include_url=False)]
    path, details = max(found, key=lambda pair: len(pair[0]))
    param = ""
    for step in path:
        param = f"{param}[{step}]" if isinstance(step, int) else join(param, step)
    match details["type"]:
        case "extra_forbidden":
            what = "is not a parameter that this server knows"
        case "missing":
            what = "is missing"
        case "union_tag_invalid" | "union_tag_not_found":
            param, what = join(param, "role"), "must be one of system, developer, user, assistant, tool"
        case _:
            what = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
            what = what if what.startswith("should") else f"- {what}"
    return refused(f"{param or json.dumps(param)} {what}".replace(" - ", ": ", 1), param)


def _path(location: tuple[int | str, ...], body: Any) -> list[int | str]:
    """The steps of a location that lead into the body; the others name types of a choice."""
    path: list[int | str] = []
    for index, step in enumerate(location):
        last = index == len(location) - 1
        if isinstance(body, dict) and isinstance(step, str) and (step in body or last):
            path.append(step)
            body = body.get(step)
        elif isinstance(body, list) and isinstance(step, int) and step < len(body):
            path.append(step)
            body = body[step]
    return path
