"""What comes over the wire that is no good request: every way of HTTP that a client may get wrong, or use."""

from __future__ import annotations

import gzip
import json
import re
import threading

import pytest
from serverside import BODY, HANGS_S, Served, lend, read_to_end, served

from runtime.generate import Engine
from runtime.server.schema import validate_completion
from runtime.server.tasks import completion_task
from runtime.server.worker import Ended, Failed, News

DATA = json.dumps(BODY).encode()
HEAD = b"Host: localhost\r\nConnection: close\r\n"
CHUNKS = b"".join(b"1\r\n%c\r\n" % byte for byte in DATA) + b"0\r\n\r\n"


def post(headers: bytes = b"", body: bytes = DATA, version: bytes = b"1.1") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return b"POST /v1/completions HTTP/%b\r\n" % version + HEAD + headers + length + b"\r\n" + body


def chunked(body: bytes, headers: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\n" + HEAD + headers + b"Transfer-Encoding: chunked\r\n\r\n" + body


TAKEN = [
    post(version=b"1.0"),
    post(b"Expect: 100-continue\r\n"),
    post(b"Content-Type: text/plain\r\nContent-Encoding: identity\r\n"),
    post(b"X: " + b"x" * 60_000 + b"\r\n"),
    post(b"Upgrade: h2c\r\n"),
    chunked(CHUNKS),
    chunked(CHUNKS[:-2] + b"Trailer: x\r\n\r\n"),
]
REFUSED = [
    (post(b"Content-Encoding: gzip\r\n", gzip.compress(DATA)), 415, "not compressed"),
    (post(b"X: " + b"x" * 70_000 + b"\r\n"), 431, "65,536"),
    (post(b"X: x\r\n" * 14_000), 431, "65,536"),
    (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 431, "65,536"),
    (b"GET /health?" + b"x" * 70_000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 431, "65,536"),
    (post(b"Content-Length: 3\r\n"), 400, "no HTTP"),
    (post(b"Host: other\r\n"), 400, "no HTTP"),
    (chunked(b"zz\r\nabc\r\n"), 400, "no HTTP"),
    (chunked(b"f" * 30 + b"\r\nabc\r\n"), 400, "no HTTP"),
    (b"GET /health HTTP/1.1\r\n\r\n", 400, "no HTTP"),
    (b"GET /health HTTP/1.0\r\n\r\n", 403, "no name at all"),
    (b"GET /\xff HTTP/1.1\r\n" + HEAD + b"\r\n", 400, "no HTTP"),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "no HTTP"),
    (b"OPTIONS /v1/completions HTTP/1.1\r\n" + HEAD + b"\r\n", 405, "does not take OPTIONS"),
    (b"GET /../etc/passwd HTTP/1.1\r\n" + HEAD + b"\r\n", 404, "there is no /../etc/passwd"),
]


@pytest.mark.parametrize("request_", TAKEN)
def test_what_http_allows_is_taken(server: Served, request_: bytes) -> None:
    head, _, body = (
        read_to_end(server.raw(request_)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    )
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("request_", "status", "says"), REFUSED)
def test_what_cannot_be_taken_is_told_in_the_shape_of_errors(
    server: Served, request_: bytes, status: int, says: str
) -> None:
    head, _, body = read_to_end(server.raw(request_)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert says in json.loads(body)["error"]["message"]
    assert server.get("/health").status == 200


def test_requests_in_one_breath_are_answered_in_their_order(server: Served) -> None:
    keep = [request.replace(b"Connection: close\r\n", b"") for request in (post(), post(body=b"{"))]
    answers = read_to_end(server.raw(b"".join(keep) + b"HEAD /health HTTP/1.1\r\n" + HEAD + b"\r\n"))
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]
    assert answers.endswith(b"\r\n\r\n"), "no body for HEAD"


def test_rubbish_after_an_answer_breaks_nothing(server: Served, capfd: pytest.CaptureFixture[str]) -> None:
    """The rest of a body that nobody waited for, and it is none."""
    peer = server.raw(chunked(b"", b"Origin: http://evil.example\r\n").replace(b"Connection: close\r\n", b""))
    answer = b""
    while not answer.endswith(b"}"):
        answer += peer.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 403 ")
    peer.sendall(b"zz\r\n")
    assert read_to_end(peer) == b""
    assert server.get("/health").status == 200
    assert capfd.readouterr().err == ""


def test_a_client_that_still_sends_sees_why_it_is_refused(embedded_engine: Engine) -> None:
    """Not a connection that was reset under its hands, which it would take for a reason to try again."""
    with served(lend(embedded_engine), body_bytes=4000) as server:
        large = b" " * 20_000_000
        for headers in ({}, {"Content-Encoding": "gzip"}, {"X": "x" * 70_000}, {"Origin": "http://evil.example"}):
            status = server.post("/v1/completions", large, **headers).status
            assert status == {"Content-Encoding": 415, "X": 431, "Origin": 403}.get(next(iter(headers), ""), 413)
        with server.raw(b"") as peer:
            peer.sendall(post(body=large).replace(b"Connection: close\r\n", b"") + post())
            assert re.findall(rb"HTTP/1.1 (\d+)", read_to_end(peer)) == [b"413", b"200"]


def test_a_refused_body_is_not_taken_for_ever(embedded_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.protocol.Connection.head_s", 0.2)
    with served(lend(embedded_engine), body_bytes=4000) as server:
        peer = server.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n")
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 413 ")

        def send_on() -> None:
            for _ in range(HANGS_S * 100):
                peer.sendall(b" " * 1000)
                threading.Event().wait(0.01)

        with pytest.raises(ConnectionError):
            send_on()


def test_whoever_has_an_answer_has_left_the_place(server: Served) -> None:
    """So that one client that asks again and again is never one too many."""
    told: list[object] = []
    ended = threading.Event()

    def tell(news: News) -> None:
        if isinstance(news, Ended | Failed):
            told.extend([type(news), server.worker.running, server.worker.current])
            ended.set()

    server.worker.submit(completion_task(validate_completion(dict(BODY)), server.worker.engine), tell)
    assert ended.wait(HANGS_S)
    assert told == [Ended, None, None]
