"""What the tests of the server share: a server on a port of its own, clients that see every byte, a scripted model."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from runtime.errors import Cancelled
from runtime.generate import Engine
from runtime.model.state import State
from runtime.server.app import Settings, make_app
from runtime.server.metrics import Metrics
from runtime.server.run import bind, serve_until
from runtime.server.worker import Worker

MODEL = "small"
QUESTION = "What is the capital of France?"
BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}
HANGS_S = 60
"""When a client counts as hanging, on a machine however busy."""


class Lent(Engine):
    """An engine that outlives the servers it is lent to."""

    def close(self) -> None:
        pass


def lend(engine: Engine, snapshots: int = 0, **changed: Any) -> Lent:
    values = {f.name: getattr(engine, f.name) for f in fields(engine)}
    parts = {**engine.plan.parts, "snapshots": snapshots}
    return Lent(**values | {"plan": replace(engine.plan, parts=parts), "chunk": 512} | changed)


class ScriptedModel:
    """Logits by script: after a prompt, its tokens one after the other, whatever the prompt. `gate`, before a layer."""

    trunk = SimpleNamespace(precision="bf16", streamed_bytes=0)

    def __init__(self, vocab: int, layers: int = 2) -> None:
        self.vocab, self.layers = vocab, layers
        self.script: Sequence[int] = ()
        self.gate: Callable[[], None] | None = None
        self.passes = 0
        self._begun: int | None = None

    def begin(self) -> None:
        """The script begins after the next prompt."""
        self._begun = None

    def new_state(self, capacity: int) -> State:
        self.begin()
        return State(0, capacity, [])

    def forward(self, ids: Any, state: State, *, logits: str = "last", tap: Any = None, cancelled: Any = None) -> Any:
        for layer in range(self.layers):
            if self.gate is not None:
                self.gate()
            if cancelled is not None and cancelled():
                raise Cancelled(f"before layer {layer}")
            if tap is not None:
                tap(layer, None)
        self.passes += 1
        state.commit([], len(ids))
        if logits == "none":
            return None
        self._begun = state.length if self._begun is None else self._begun
        out = np.zeros((1, self.vocab))
        out[0, self.script[state.length - self._begun]] = 1.0
        return out


@dataclass
class Served:
    """A server that runs."""

    port: int
    worker: Worker

    def post(self, path: str, body: Any, **headers: str) -> Response:
        """One request, whole. `body` is JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, {"Content-Type": "application/json", **headers})

    def get(self, path: str, **headers: str) -> Response:
        return self.request("GET", path, None, headers)

    def request(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS_S)
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return Response(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def chat(self, text: str = "Hello", **fields: Any) -> Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, prompt: Any, **fields: Any) -> Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which these bytes were sent."""
        peer = socket.create_connection(("127.0.0.1", self.port), timeout=HANGS_S)
        peer.sendall(data)
        return peer

    def begin(self, path: str, body: Any) -> socket.socket:
        """A request that was sent and whose answer is not read yet."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        return self.raw(head.encode() + data)

    def until(self, **expected: Any) -> dict[str, Any]:
        """/health, once its queue is as expected."""
        patience = threading.Event()
        for _ in range(HANGS_S * 100):
            facts = self.get("/health").json
            if expected.items() <= facts["queue"].items():
                return facts
            patience.wait(0.01)
        raise AssertionError(f"the queue never came to {expected}, only to {facts}")


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def message(self) -> dict[str, Any]:
        return self.json["choices"][0]["message"]

    @property
    def events(self) -> list[Any]:
        """A stream, read strictly: `data: ` and one line, an empty line, comments apart; `[DONE]` as it is."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert self.body.endswith(b"\n\n")
        blocks = [block for block in self.body[:-2].split(b"\n\n") if not block.startswith(b":")]
        assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
        data = [block[6:] for block in blocks]
        return [part.decode() if part == b"[DONE]" else json.loads(part) for part in data]

    @property
    def comments(self) -> list[str]:
        return [line[2:].decode() for line in self.body.split(b"\n") if line.startswith(b": ")]


def joined(events: list[Any]) -> dict[str, Any]:
    """A streamed chat answer, put together."""
    assert events[-1] == "[DONE]"
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
            message["finish_reason"] = choice["finish_reason"]
    return message


@contextmanager
def served(
    engine: Engine, queue: int = 8, connections: int = 64, disk: Any = None, **settings: Any
) -> Iterator[Served]:
    """A server over a lent engine, ready; stopped when the block ends."""
    listener, over = bind("127.0.0.1", 0), threading.Event()
    metrics = Metrics()
    worker = Worker(lambda: engine, queue, metrics, disk)
    metrics.watch(worker)
    app = make_app(worker, Settings(MODEL, **settings))
    thread = threading.Thread(target=serve_until, args=(app, listener, worker, over.is_set, connections))
    thread.start()
    served = Served(listener.getsockname()[1], worker)
    try:
        while worker.state == "loading":
            threading.Event().wait(0.005)
        yield served
    finally:
        over.set()
        thread.join(HANGS_S)
        listener.close()
        assert not thread.is_alive()
        assert worker.failure is None


def read_to_end(peer: socket.socket) -> bytes:
    """Until the other side closes."""
    out = b""
    while part := peer.recv(1 << 16):
        out += part
    return out


class Gate:
    """Holds the model before a layer until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(HANGS_S)
