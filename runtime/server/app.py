"""The routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from runtime.server.body import Bodies, parse_object
from runtime.server.errors import ApiError
from runtime.server.health import report
from runtime.server.openapi import description
from runtime.server.replies import ChatReply, CompletionReply, Reply
from runtime.server.responses import Delivery, EventStream, error_response, whole
from runtime.server.safety import Guard
from runtime.server.schema import Common, validate_chat, validate_completion
from runtime.server.tasks import Task, chat_task, completion_task
from runtime.server.worker import Worker

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


BODIES = 4
"""Bodies of the largest size that may be there at one time; of smaller ones, more."""


@dataclass(frozen=True)
class Settings:
    """How the server behaves. `loopback`: it is bound to the loopback alone. `log`: told a line about each answer."""

    model: str
    api_key: str | None = None
    origins: Sequence[str] = ()
    loopback: bool = True
    heartbeat_s: float = 10.0
    body_bytes: int = 8_000_000
    body_s: float = 30.0
    log: Callable[[str], None] | None = None


Made = tuple[Common, Task, Reply]


class _Routes:
    """The endpoints, over one worker."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        self._bodies = Bodies(settings.body_bytes, settings.body_s, BODIES * settings.body_bytes)
        self._parser = ThreadPoolExecutor(1, "requests")  # one at a time: a parsed body is many times its size

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        def make(body: dict[str, Any]) -> Made:
            asked = validate_chat(body)
            self._check_model(asked.model)
            reply = ChatReply(self.settings.model, _include_usage(asked))
            return asked, chat_task(asked, self.worker.engine), reply

        return await self._answer(request, make)

    async def completions(self, request: Request) -> Response:
        def make(body: dict[str, Any]) -> Made:
            asked = validate_completion(body)
            self._check_model(asked.model)
            reply = CompletionReply(self.settings.model, _include_usage(asked))
            return asked, completion_task(asked, self.worker.engine), reply

        return await self._answer(request, make)

    async def health(self, request: Request) -> Response:
        facts = report(self.worker, self.settings.model)
        status = 503 if facts["status"] in ("loading", "failed", "stopped") else 200
        return JSONResponse(facts if request.scope["authorized"] else {"status": facts["status"]}, status)

    async def metrics(self, request: Request) -> Response:
        return Response(self.worker.metrics.page(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(description(self.settings.model))

    async def page(self, request: Request) -> Response:
        html = files("runtime.server").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(html, headers={"Content-Security-Policy": PAGE_POLICY})

    async def _answer(self, request: Request, make: Callable[[dict[str, Any]], Made]) -> Response:
        """Check everything, take a place in the queue, and only then begin a response."""
        async with self._bodies.read(request) as body:
            loop = asyncio.get_running_loop()
            asked, task, reply = await loop.run_in_executor(self._parser, lambda: make(parse_object(body)))
        if self.settings.log is not None:
            self.settings.log(f"{reply.id}  {len(task.prompt)} prompt tokens, up to {task.max_new} new")
        delivery = Delivery(self.worker, task)
        headers = {"X-Request-Id": reply.id, **task.settings}
        if not asked.stream:
            return await whole(delivery, reply, headers, request.receive)
        progress = asked.stream_options is not None and bool(asked.stream_options.include_progress)
        return EventStream(delivery, reply, headers, self.settings.heartbeat_s, progress)

    def _model(self) -> dict[str, Any]:
        return {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "expertstream"}

    def _check_model(self, name: str) -> None:
        if name != self.settings.model:
            message = f"model: this server has {self.settings.model}, not {name}"
            raise ApiError(404, message, param="model", code="model_not_found")


def _include_usage(request: Common) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def make_app(worker: Worker, settings: Settings) -> Starlette:
    """The application, over a worker that somebody else starts and stops."""
    on = _Routes(worker, settings)
    routes: list[tuple[str, Callable[[Request], Awaitable[Response]], str]] = [
        ("/", on.page, "GET"),
        ("/health", on.health, "GET"),
        ("/metrics", on.metrics, "GET"),
        ("/openapi.json", on.openapi, "GET"),
        ("/v1/models", on.models, "GET"),
        ("/v1/models/{model:path}", on.model, "GET"),
        ("/v1/chat/completions", on.chat, "POST"),
        ("/v1/completions", on.completions, "POST"),
    ]
    guard = Middleware(Guard, api_key=settings.api_key, origins=settings.origins, loopback=settings.loopback)
    cors = Middleware(
        CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for path, endpoint, method in routes],
        middleware=[cors, guard] if settings.origins else [guard],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    what = {404: f"there is no {path} here", 405: f"{path} does not take {request.method}"}
    response = error_response(ApiError(error.status_code, what.get(error.status_code, error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "the server failed; its log says how", kind="server_error"))
