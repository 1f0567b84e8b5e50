"""Connections: how many there may be, how long a request's head may take, and how one that is dead is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.server.errors import ApiError

HEAD_BYTES = 64 << 10
"""A request line and its headers, at most."""


class Connection(H11Protocol):
    """uvicorn's, and more: closed when a head does not come in time, refused beyond a number of connections."""

    most = 128
    """Connections at one time."""
    head_s = 10.0
    """Seconds for a request's line and headers, once the connection is made or the request has begun."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _probe_the_peer(transport.get_extra_info("socket"))
        if len(self.connections) > self.most:
            message = f"this server takes {self.most} connections at a time, and has them"
            error = ApiError(503, message, code="too_many_connections", kind="server_error")
            body = json.dumps(error.body).encode()
            transport.write(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Retry-After: 10\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            transport.close()
            return
        self._head = self.loop.call_later(self.head_s, self._late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self.head_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        if not self.transport.is_closing():
            self.transport.close()


def _probe_the_peer(peer: Any) -> None:
    """Have the system find out when the other machine is gone without a word, within about a minute."""
    options = (
        ("SO_KEEPALIVE", 1),
        ("TCP_KEEPIDLE", 30),
        ("TCP_KEEPALIVE", 30),
        ("TCP_KEEPINTVL", 10),
        ("TCP_KEEPCNT", 3),
    )
    for name, value in options:
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            with contextlib.suppress(OSError, AttributeError):
                peer.setsockopt(level, getattr(socket, name), value)
