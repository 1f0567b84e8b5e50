"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette

from runtime.errors import UsageError
from runtime.server.protocol import HEAD_BYTES, Connection
from runtime.server.worker import Worker

GRACE_S = 5
"""How long responses may take to end when the server stops."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: who connects before the server runs waits. Raises UsageError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host}: no such address here: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(
            f"cannot serve at {host} port {port}: {getattr(error, 'strerror', None) or error}: choose another --port"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn's, with the signals left to whoever runs it."""

    def __init__(self, config: uvicorn.Config, over: Callable[[], bool], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._over, self._ending = over, ending

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._over()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()  # so that the answers under way end, and their connections with them
        await super().shutdown(sockets)


def serve_until(
    app: Starlette, listener: socket.socket, worker: Worker, over: Callable[[], bool], connections: int
) -> None:
    """Serve until `over()` or until the worker is done. The worker is started, and has ended when this returns."""

    class Limited(Connection):
        most = connections

    config = uvicorn.Config(
        app,
        http=Limited,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, lambda: over() or worker.state == "stopped", lambda: worker.stop(0))
    worker.start()
    try:
        asyncio.run(server.serve([listener]))
    finally:
        worker.stop()
