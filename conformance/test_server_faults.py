"""What goes wrong, on either side: the request or the one answer is lost, the server goes on."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commandline import readable
from serverside import HANGS_S, ScriptedModel, Served, lend, read_to_end, served
from trouble import by_drive

from runtime.drives.throttled import Limit
from runtime.errors import StorageError, memory_refused
from runtime.generate import Engine
from runtime.server.health import Drive
from runtime.weights.layout import Layout


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "small", "prompt": "\\ud83d"}', 400),
        (b"x" * 5000, 413),
    ],
)
def test_a_bad_body_is_refused_and_the_server_lives(embedded_engine: Engine, data: bytes, status: int) -> None:
    with served(lend(embedded_engine), body_bytes=4000) as server:
        assert server.post("/v1/completions", data).status == status
        assert server.complete("Hello", max_tokens=1).status == 200


def test_a_body_in_chunks_is_bounded_too(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), body_bytes=4000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        peer = server.raw(head + b"7d0\r\n" + b" " * 2000 + b"\r\n")
        peer.sendall(b"7d1\r\n" + b" " * 2001 + b"\r\n")
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_bodies_are_bounded_together(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), body_bytes=4000) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n"
        peers = [server.raw(head + b" " * 3500) for _ in range(5)]
        ready = readable(peers, HANGS_S)
        assert ready[0].recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        for peer in peers:
            peer.close()
        while server.complete("Hello" + " " * 3000, max_tokens=1).status == 503:
            threading.Event().wait(0.01)


class Failing(ScriptedModel):
    """Fails with what it is given, once, after two passes."""

    failure: Exception | None = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.failure is not None and self.passes == 2:
            failure, self.failure = self.failure, None
            raise failure
        return super().forward(*arguments, **options)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("failure", "code"),
    [(StorageError("layer 3, expert 17: no copy left"), "storage_failed"), (ZeroDivisionError("a bug"), None)],
)
def test_a_failure_costs_one_answer(
    embedded_engine: Engine, failure: Exception, code: str | None, streamed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Failing(embedded_engine.config.vocab_size)
    model.script, model.failure = [5] * 10, failure
    with served(lend(embedded_engine, model=model)) as server:
        answer = server.complete("Hello", max_tokens=5, stream=streamed)
        if streamed:
            *said, failed, end = answer.events
            assert (len(said), end) == (2, "[DONE]")
            error = failed["error"]
        else:
            assert answer.status == 500
            error = answer.error
        assert (error["type"], error["code"]) == ("server_error", code)
        assert ("expert 17" in error["message"]) == (code is not None)
        assert server.complete("Hello", max_tokens=5).json["usage"]["completion_tokens"] == 5
    assert ("ZeroDivisionError" in capfd.readouterr().err) == (code is None)


def test_a_drive_that_sits_out_is_said(embedded_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtime.server.health.drives", lambda engine: {"a": Drive("suspect", "direct", 1e9, 5, 1, 3, 2, 0)}
    )
    with served(lend(embedded_engine)) as server:
        answer = server.get("/health")
        assert answer.status == 200
        assert answer.json["status"] == "degraded"
        assert answer.json["drives"]["a"]["errors"] == 3


def test_a_server_that_can_read_nothing_any_more_says_so(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that found out fails; those that waited meanwhile and those that come are told the same."""
    layout = Layout(limits=(Limit.parse("a=400MB/s"),))
    with by_drive(), Engine.load(tiny, backend="reference", layout=layout) as engine, served(engine) as server:
        assert engine.drives is not None
        reader = engine.drives.reader
        assert reader is not None
        began, waiting = threading.Event(), threading.Event()

        def refuse(*_: object) -> None:
            began.set()
            waiting.wait(HANGS_S)
            raise memory_refused("9 MB")

        monkeypatch.setattr(reader.pool, "take", refuse)
        with ThreadPoolExecutor(2) as clients:
            first = clients.submit(server.complete, "Hello")
            assert began.wait(HANGS_S)
            second = clients.submit(server.complete, "Hello")
            while server.worker.waiting == 0:
                threading.Event().wait(0.005)
            waiting.set()
        assert (first.result().status, first.result().error["code"]) == (500, "does_not_fit")
        for answer in (second.result(), server.complete("Hello")):
            assert (answer.status, answer.error["code"]) == (503, "engine_failed")
            assert answer.error["message"].startswith("the system refused 9 MB")
            assert answer.error["message"].endswith("; start the server again")
        health = server.get("/health")
        assert (health.status, health.json["status"]) == (503, "failed")
        assert health.json["reason"].startswith("the system refused 9 MB")
        assert "expertstream_ready 0.0" in server.get("/metrics").body.decode()


def test_the_drives_of_a_run_are_told_apart(tmp_path: Path, tiny: Path) -> None:
    limits = tuple(Limit.parse(text) for text in ("a=400MB/s", "b=300MB/s"))
    with (
        by_drive(),
        Engine.load(tiny, backend="reference", layout=Layout(limits=limits)) as engine,
        served(engine) as server,
    ):
        assert server.complete("Hello", max_tokens=2).status == 200
        assert engine.drives is not None
        assert engine.drives.reader is not None
        while not engine.drives.reader.idle:  # what was guessed or checked for is still being read
            threading.Event().wait(0.005)
        facts = server.get("/health").json
        assert facts["status"] == "ready"
        drives = {name: facts["drives"][name] for name in ("a", "b")}
        assert sum(drive["bytes"] for drive in drives.values()) >= facts["bytes_by_kind"]["demand"] > 0
        assert all(drive["rate_bytes_per_s"] > 0 for drive in drives.values())
        assert sum(drive["landed_last"] for drive in drives.values()) > 0
        metrics = server.get("/metrics").body.decode()
        read = re.findall(r'expertstream_read_bytes_total{drive="(\w+)",kind="(\w+)"} (\S+)', metrics)
        for name, drive in drives.items():
            assert sum(float(nbytes) for of, _, nbytes in read if of == name) == drive["bytes"]
        for kind, nbytes in facts["bytes_by_kind"].items():
            assert sum(float(n) for _, of, n in read if of == kind) == nbytes
        assert f'expertstream_drive_landed_last_total{{drive="a"}} {float(drives["a"]["landed_last"])}' in metrics
        assert f'expertstream_drive_reads_total{{drive="a"}} {float(drives["a"]["reads"])}' in metrics


def test_routes_that_are_none(server: Served) -> None:
    assert server.get("/v1/nothing").status == 404
    assert server.get("/v1/chat/completions").status == 405
    assert server.get("/v1/nothing").error["message"] == "there is no /v1/nothing here"


def test_a_body_that_does_not_come_is_given_up(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), body_s=0.05) as server:
        peer = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        assert read_to_end(peer) is not None


def test_a_head_that_does_not_come_is_given_up(embedded_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.protocol.Connection.head_s", 0.05)
    with served(lend(embedded_engine)) as server:
        for data in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
            read_to_end(server.raw(data))
        kept = server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        kept.sendall(b"GET /health")
        read_to_end(kept)


def test_connections_are_counted(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), connections=2) as server:
        held = [server.raw(b"") for _ in range(2)]
        assert read_to_end(server.raw(b"")).startswith(b"HTTP/1.1 503 ")
        for peer in held:
            peer.close()
