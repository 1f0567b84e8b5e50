"""Connections: how many there may be, how long a request's head may take, and how dead ones are noticed.

A peer that has gone without a word is found by the system's probes, one that is there and does not read by what it
leaves unread: either ends the request as a closed connection does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from http import HTTPStatus
from typing import Any

import h11
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

    unread_s = 60.0
    """Seconds for which a peer may leave what it was sent."""

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _probe_the_peer(transport.get_extra_info("socket"))
        if len(self.connections) > self.most:
            message = f"this server takes {self.most} connections at a time, and has them"
            code, kind = "too_many_connections", "server_error"
            self._refuse(ApiError(503, message, code=code, kind=kind, retry_after=10, close=True))
            return
        self._head = self.loop.call_later(self.head_s, self._late)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._in_time()
            if not self.cycle.more_body:
                self._listen_on()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self.head_s, self._late)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or no more, in the shape of all other errors; what is being answered is broken off."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, "what came is no HTTP/1.1 request, or too long a head", close=True))
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._read()
        super().connection_lost(exc)

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the app, and close."""
        body = json.dumps(error.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **error.headers}
        start = h11.Response(
            status_code=error.status, headers=list(headers.items()), reason=HTTPStatus(error.status).phrase
        )
        for event in (start, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _listen_on(self) -> None:
        """uvicorn reads no further when something follows a request, and would not see the connection close."""
        if len(self.conn.trailing_data[0]) > HEAD_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def _in_time(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
