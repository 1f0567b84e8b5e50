"""Long turns: those that wait, those that go away, and those that are told that the server is there."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serverside import BODY, HANGS_S, MODEL, Gate, ScriptedModel, Served, joined, lend, served

from runtime.generate import Engine


def test_five_clients_and_a_queue_of_two(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    server, _, gate = gated
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.complete, "Hello", max_tokens=3)
        assert gate.reached.wait(HANGS_S)
        server.until(running=1, waiting=0)
        others = [pool.submit(server.complete, "Hello", max_tokens=3) for _ in range(2)]
        server.until(running=1, waiting=2)
        for _ in range(2):
            refused = server.complete("Hello", max_tokens=3)
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
        gate.open.set()
        assert [answer.result().status for answer in [first, *others]] == [200, 200, 200]


def test_other_routes_answer_while_one_is_computed(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    server, _, gate = gated
    with server.begin("/v1/completions", BODY):
        assert gate.reached.wait(HANGS_S)
        facts = server.get("/health").json
        assert facts["running"]["phase"] == "prefill"
        assert server.get("/v1/models").status == 200
        assert b"expertstream_queue_running 1.0" in server.get("/metrics").body
        assert server.chat(n=2).status == 400


@pytest.mark.parametrize("after", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_frees_its_place(
    gated: tuple[Served, ScriptedModel, Gate], streamed: bool, after: bytes
) -> None:
    """One in prefill and two in the queue: the ones that wait leave it at once, the other before the next layer.

    Also where something follows the request, which is for the next one or for nothing.
    """
    server, model, gate = gated
    running = server.begin("/v1/completions", BODY | {"stream": streamed})
    assert gate.reached.wait(HANGS_S)
    waiting = [server.begin("/v1/completions", BODY | {"stream": streamed}) for _ in range(2)]
    server.until(running=1, waiting=2)
    for peer in (running, *waiting):
        peer.sendall(after)
    for peer in waiting:
        peer.close()
    server.until(running=1, waiting=0)
    running.close()
    server.until(running=1, waiting=0)
    assert server.worker.metrics.registry.get_sample_value("expertstream_requests_total", {"outcome": "cancelled"}) == 2
    while not any(job.gone for job in list(jobs(server))):
        threading.Event().wait(0.005)
    gate.open.set()
    server.until(running=0)
    assert model.passes == 0
    model.gate = None
    assert server.complete("Hello", max_tokens=3).json["usage"]["completion_tokens"] == 3


def jobs(server: Served) -> list[object]:
    """The job that runs."""
    current = server.worker.current
    return [] if current is None else [current]


def test_a_client_that_goes_away_while_it_reads_an_answer(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    server, model, gate = gated
    gate.open.set()
    said, held = threading.Event(), threading.Event()

    def stop_at_third_token() -> None:
        if model.passes == 3:
            said.set()
            assert held.wait(HANGS_S)

    model.gate = stop_at_third_token
    with server.begin("/v1/completions", BODY | {"max_tokens": 50, "stream": True}) as peer:
        assert said.wait(HANGS_S)
        read = b""
        while read.count(b"data: ") < 3:
            read += peer.recv(1 << 16)
    while server.worker.current is not None and not server.worker.current.gone:
        threading.Event().wait(0.005)
    held.set()
    server.until(running=0)
    assert model.passes == 3


def test_a_silent_stream_says_that_it_is_there(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    """Headers at once, comments by the clock, in prefill, before there is any token."""
    server, _, gate = gated
    with server.begin("/v1/completions", BODY | {"stream": True}) as peer:
        read = b""
        while read.count(b": still here\n\n") < 3:
            read += peer.recv(1 << 16)
        assert read.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"data: " not in read
        gate.open.set()
        while not read.endswith(b"0\r\n\r\n"):
            read += peer.recv(1 << 16)
    assert read.count(b"data: [DONE]\n\n") == 1


def test_work_that_says_nothing_is_silence_too(embedded_engine: Engine) -> None:
    """A prompt of a hundred passes, each sooner than the heartbeat: the comments come all the same."""
    model = ScriptedModel(embedded_engine.config.vocab_size)
    model.script, model.gate = [5] * 3, lambda: time.sleep(0.005)
    with served(lend(embedded_engine, model=model, chunk=1), heartbeat_s=0.1) as server:
        answer = server.complete([5] * 100, max_tokens=2, stream=True)
    assert "still here" in answer.comments
    assert answer.events[-1] == "[DONE]"


def test_a_client_that_does_not_read_is_let_go(embedded_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.server.protocol.Connection.unread_s", 0.05)
    model, tokens = ScriptedModel(embedded_engine.config.vocab_size, layers=1), 60_000
    model.script = [300] * tokens
    with served(lend(embedded_engine, model=model, context=tokens)) as server:
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", server.port))
        data = json.dumps(BODY | {"stream": True, "max_tokens": tokens}).encode()
        peer.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        server.until(running=1)
        server.until(running=0)
        outcome = {"outcome": "cancelled"}
        assert server.worker.metrics.registry.get_sample_value("expertstream_requests_total", outcome) == 1
        peer.close()


def test_a_tool_call_is_not_silence(gated: tuple[Served, ScriptedModel, Gate], embedded_engine: Engine) -> None:
    """While a call is held back until it is whole, comments say that the server is there."""
    server, model, gate = gated
    tokenizer = embedded_engine.tokenizer
    assert tokenizer is not None
    call = '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>'
    end = "long<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>"
    begun = tokenizer.encode_structural(call)
    model.script = begun + tokenizer.encode_structural(end)
    gate.open.set()
    held = threading.Event()

    def stop_within_the_call() -> None:
        if model.passes >= len(begun):
            assert held.wait(HANGS_S)

    model.gate = stop_within_the_call
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": True}
    with server.begin("/v1/chat/completions", body) as peer:
        read = b""
        while read.count(b": still here\n\n") < 3:
            read += peer.recv(1 << 16)
        assert b"tool_calls" not in read
        held.set()
        while not read.endswith(b"0\r\n\r\n"):
            read += peer.recv(1 << 16)
    assert read.count(b'"finish_reason":"tool_calls"') == 1


def test_four_clients_at_once_get_what_each_gets_alone(server: Served) -> None:
    questions = [f"What is the capital of {country}?" for country in ("France", "Japan", "Italy", "Spain")]
    alone = [server.chat(question, max_tokens=40).message for question in questions]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda q: joined(server.chat(q, max_tokens=40, stream=True).events), questions))
    assert [message["content"] for message in together] == [message["content"] for message in alone]
    assert [m["reasoning_content"] for m in together] == [m.get("reasoning_content", "") for m in alone]
