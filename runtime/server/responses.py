"""An answer on its way to the client: as a stream of events, or whole; and the client that goes away meanwhile.

An event is `data: `, JSON in ASCII alone, so that no client can take a character in it for the end of a line, and an
empty line. A stream begins at once; when it has had nothing to say for the length of a heartbeat, by the clock on the
wall, it says a comment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from runtime.server.errors import ApiError
from runtime.server.replies import Reply
from runtime.server.tasks import Task
from runtime.server.worker import Ended, Failed, Job, News, Read, Said, Worker
from runtime.text.channels import Event

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """What clients skip."""
    return f": {text}\n\n".encode()


def error_response(error: ApiError) -> JSONResponse:
    """The error as a response of its own."""
    return JSONResponse(error.body, error.status, headers=error.headers)


class Delivery:
    """A task in the queue or under way, and its news as they come."""

    def __init__(self, worker: Worker, task: Task) -> None:
        """Raises ApiError when the worker does not take it."""
        self._loop = loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._heard = loop.time()

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                loop.call_soon_threadsafe(self._news.put_nowait, news)

        self.job: Job = worker.submit(task, tell)

    def wrote(self) -> None:
        """The client has just been sent something."""
        self._heard = self._loop.time()

    async def news(self, receive: Receive, heartbeat_s: float | None) -> AsyncGenerator[News | None, None]:
        """The news, to the last one; None when nothing was written for a heartbeat. Ends when the client goes away.

        However it is left, nothing of the job goes on without a reader.
        """
        gone = asyncio.ensure_future(_gone(receive))
        coming: asyncio.Future[News] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(self._news.get())
                waited: set[asyncio.Future[Any]] = {coming, gone}
                rest = None if heartbeat_s is None else max(0.0, self._heard + heartbeat_s - self._loop.time())
                await asyncio.wait(waited, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                if coming.done():
                    news, coming = coming.result(), None
                    yield news
                    if isinstance(news, Ended | Failed):
                        return
                if heartbeat_s is not None and self._loop.time() >= self._heard + heartbeat_s:
                    yield None
        finally:
            self.job.cancel()
            for future in (gone, coming):
                if future is not None:
                    future.cancel()


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self, delivery: Delivery, reply: Reply, headers: dict[str, str], heartbeat_s: float, progress: bool
    ) -> None:
        super().__init__(headers=headers | {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._delivery, self._reply = delivery, reply
        self._heartbeat_s, self._progress = heartbeat_s, progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._delivery.wrote()

        async with contextlib.aclosing(self._delivery.news(receive, self._heartbeat_s)) as coming:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await put(b"".join(map(event, self._reply.begin())) or comment("accepted"))
            async for news in coming:
                if data := self._written(news):
                    await put(data)
        await put(b"", more=False)

    def _written(self, news: News | None) -> bytes:
        match news:
            case None:
                return comment("still here")
            case Read(done, total):
                return comment(f"prompt {done}/{total}") if self._progress else b""
            case Said(events):
                return b"".join(map(event, self._reply.say(events)))
            case Ended(reason, usage):
                return b"".join(map(event, self._reply.end(reason, usage))) + DONE
            case Failed(error):
                return event(error.body) + DONE


async def whole(delivery: Delivery, reply: Reply, headers: dict[str, str], receive: Receive) -> Response:
    """The answer in one piece."""
    events: list[Event] = []
    async with contextlib.aclosing(delivery.news(receive, None)) as coming:
        async for news in coming:
            match news:
                case Said(more):
                    events += more
                case Failed(error):
                    return error_response(error)
                case Ended(reason, usage):
                    return JSONResponse(reply.whole(events, reason, usage), headers=headers)
    return Response(status_code=499)  # nobody is there to read it
