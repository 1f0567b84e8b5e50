"""The server as a whole: the official client, the queue, clients that go away, other clients' mistakes."""

from __future__ import annotations

import asyncio
import json
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from commandline import Command, Start, read_until
from conftest import ROOT
from serverside import HANGS_S, MODEL, ScriptedModel, Served, joined, lend, served

from runtime.drives.throttled import Limit
from runtime.errors import StorageError
from runtime.generate import Engine, embedded_model
from runtime.server.health import Drive
from runtime.text.chat import render
from runtime.weights.layout import Layout

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def server(embedded_engine: Engine) -> Iterator[Served]:
    with served(lend(embedded_engine, snapshots=0)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


# -- the official client --------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    message = whole.choices[0].message
    assert message.content == "The capital of France is Paris."
    assert message.reasoning_content  # type: ignore[attr-defined]
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == message.content
    assert chunks[-1].usage == whole.usage


def test_an_earlier_answer_is_accepted_as_it_came(client: openai.OpenAI) -> None:
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    messages += [first.choices[0].message, {"role": "user", "content": "What is the capital of Japan?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert second.choices[0].message.content


def test_the_async_client(server: Served) -> None:
    async def talk() -> tuple[str | None, str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5)
            stream = await client.completions.create(
                model=MODEL, prompt="The capital of France is", max_tokens=5, stream=True
            )
            return whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])

    whole, streamed = asyncio.run(talk())
    assert whole == streamed
    assert whole.startswith(" Paris")


def test_a_mistake_is_the_client_s_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], n=2)
    assert refusal.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")


def test_a_seed_decides(server: Served) -> None:
    texts = [
        server.complete("The capital of France is", max_tokens=12, temperature=2, seed=seed).json["choices"][0]["text"]
        for seed in (1, 1, 2, 3)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


# -- what goes wrong --------------------------------------------------------------------------------------------


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
        ready, _, _ = select.select(peers, [], [], HANGS_S)
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
        "runtime.server.health.drives", lambda engine: {"a": Drive("suspect", "direct", 1e9, 5, 1, 3, 2)}
    )
    with served(lend(embedded_engine)) as server:
        answer = server.get("/health")
        assert answer.status == 200
        assert answer.json["status"] == "degraded"
        assert answer.json["drives"]["a"]["errors"] == 3


def test_the_drives_of_a_run_are_told_apart(tmp_path: Path, tiny: Path) -> None:
    limits = tuple(Limit.parse(text) for text in ("a=400MB/s", "b=300MB/s"))
    with Engine.load(tiny, backend="reference", layout=Layout(limits=limits)) as engine, served(engine) as server:
        assert server.complete("Hello", max_tokens=2).status == 200
        facts = server.get("/health").json
        assert facts["status"] == "ready"
        drives = {name: facts["drives"][name] for name in ("a", "b")}
        assert sum(drive["bytes"] for drive in drives.values()) >= facts["bytes_by_kind"]["demand"] > 0
        assert all(drive["rate_bytes_per_s"] > 0 for drive in drives.values())
        metrics = server.get("/metrics").body.decode()
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


def read_to_end(peer: socket.socket) -> bytes:
    """Until the other side closes."""
    out = b""
    while part := peer.recv(1 << 16):
        out += part
    return out


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


# -- the queue, and clients that go away --------------------------------------------------------------------------


class Gate:
    """Holds the model before a layer until it is let through."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(HANGS_S)


@pytest.fixture
def gated(embedded_engine: Engine) -> Iterator[tuple[Served, ScriptedModel, Gate]]:
    """A server with room for two that wait; its model stands at the gate."""
    model, gate = ScriptedModel(embedded_engine.config.vocab_size), Gate()
    model.script, model.gate = [5] * 100, gate
    with served(lend(embedded_engine, model=model), queue=2, heartbeat_s=0.02) as server:
        try:
            yield server, model, gate
        finally:
            gate.open.set()


BODY = {"model": MODEL, "prompt": "Hello", "max_tokens": 3}


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


# -- what is reused -----------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_where_it_was(embedded_engine: Engine, server: Served) -> None:
    """Turn two reads only what is new, an edited history what differs, and the answers are the cold ones."""

    def body(messages: list[object]) -> dict[str, object]:
        return {"model": MODEL, "messages": messages, "max_tokens": 60}

    user = {"role": "user", "content": QUESTION}
    with served(lend(embedded_engine, snapshots=50_000_000)) as warm:

        def ask(messages: list[object]) -> tuple[dict[str, object], int]:
            answer = warm.post("/v1/chat/completions", body(messages)).json
            cold = server.post("/v1/chat/completions", body(messages)).json
            assert answer["choices"] == cold["choices"]
            cached = answer["usage"]["prompt_tokens_details"].pop("cached_tokens")
            assert cold["usage"]["prompt_tokens_details"].pop("cached_tokens") == 0
            assert answer["usage"] == cold["usage"]
            return answer, cached

        first, cached = ask([user])
        assert cached == 0
        spent = first["usage"]["total_tokens"]  # type: ignore[index]
        message = first["choices"][0]["message"]  # type: ignore[index]
        again, cached = ask([user])
        assert cached == again["usage"]["prompt_tokens"]  # type: ignore[index]
        follow = {"role": "user", "content": "What is the capital of Japan?"}
        _, cached = ask([user, message, follow])
        assert cached == spent - 1  # all but the token that ended the answer, which nobody has read yet
        without_thoughts = {"role": "assistant", "content": message["content"]}
        _, cached = ask([user, without_thoughts, follow])
        assert cached == first["usage"]["prompt_tokens"]  # type: ignore[index]
        _, cached = ask([{"role": "user", "content": QUESTION + " Please."}, message, follow])
        assert cached == 0
        assert warm.get("/health").json["snapshots"]["kept"] >= 4


def test_what_two_conversations_begin_with_is_read_twice_and_then_known(
    embedded_engine: Engine, server: Served
) -> None:
    """The second leaves a snapshot where the common system message ends, and the third uses it."""
    system = {"role": "system", "content": "You answer questions about the capitals of countries. " * 4}

    def body(country: str) -> dict[str, object]:
        user = {"role": "user", "content": f"What is the capital of {country}?"}
        return {"model": MODEL, "messages": [system, user], "max_tokens": 12}

    with served(lend(embedded_engine, snapshots=50_000_000)) as warm:
        cached = []
        for country in ("France", "Japan", "Italy"):
            answer = warm.post("/v1/chat/completions", body(country)).json
            assert answer["choices"] == server.post("/v1/chat/completions", body(country)).json["choices"]
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    tokenizer = embedded_engine.tokenizer
    assert tokenizer is not None
    messages = [system, {"role": "user", "content": "x"}]
    prompt = tokenizer.encode_segments(render(messages, generation_prompt=False))
    ends = [place + 1 for place, token in enumerate(prompt) if token == tokenizer.end_of_msg_id]
    assert cached == [0, 0, ends[-2]]


def test_snapshots_stay_within_their_budget(embedded_engine: Engine) -> None:
    one = embedded_engine.snapshot_nbytes(120)
    with served(lend(embedded_engine, snapshots=one)) as server:
        for text in ("One", "Two", "Three"):
            server.chat(text, max_tokens=4)
            facts = server.get("/health").json["snapshots"]
            assert 0 < facts["held_bytes"] <= facts["budget_bytes"] == one


def test_one_token_changed_is_another_prompt(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    server, _, gate = gated
    server.worker.snapshots.budget_bytes = 50_000_000
    gate.open.set()
    prompt = list(range(300, 340))
    for changed, known in ((None, 0), (None, 40), (39, 0), (0, 0), (None, 40)):
        asked = [1 if place == changed else token for place, token in zip(range(40), prompt, strict=True)]
        usage = server.complete(asked, max_tokens=1).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == known
    usage = server.complete([*prompt, 7], max_tokens=1).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 40
    usage = server.complete(prompt[:-1], max_tokens=1).json["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_retry_goes_on_where_the_client_had_left(gated: tuple[Served, ScriptedModel, Gate]) -> None:
    """A prompt of three chunks, left after two of them: the next try reads the third alone."""
    server, model, gate = gated
    server.worker.snapshots.budget_bytes = 50_000_000
    gate.open.set()
    read, held = threading.Event(), threading.Event()

    def stop_after_two() -> None:
        if model.passes == 2:
            read.set()
            assert held.wait(HANGS_S)

    model.gate = stop_after_two
    body = BODY | {"prompt": [5] * 1100}
    with server.begin("/v1/completions", body):
        assert read.wait(HANGS_S)
    while server.worker.current is not None and not server.worker.current.gone:
        threading.Event().wait(0.005)
    held.set()
    server.until(running=0)
    model.gate = None
    answer = server.post("/v1/completions", body).json
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024


# -- who may ask --------------------------------------------------------------------------------------------------


def test_a_key_is_needed_where_there_is_one(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), api_key="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            refused = server.get("/v1/models", **headers)
            assert refused.status == 401
            assert refused.error["code"] == "invalid_api_key"
            assert server.get("/metrics", **headers).status == 401
            assert server.get("/health", **headers).json == {"status": "ready"}
        assert server.get("/v1/models", Authorization="Bearer s3cret").status == 200
        assert "drives" in server.get("/health", Authorization="Bearer s3cret").json
        assert server.get("/").status == 200


def test_pages_of_others_may_not_ask(embedded_engine: Engine) -> None:
    with served(lend(embedded_engine), origins=("https://friend.example",)) as server:
        own = f"http://127.0.0.1:{server.port}"
        assert server.get("/v1/models", Origin="https://evil.example").status == 403
        assert server.get("/v1/models", Origin=own).status == 200
        friend = server.get("/v1/models", Origin="https://friend.example")
        assert friend.headers["access-control-allow-origin"] == "https://friend.example"
        assert server.get("/v1/models", Host="evil.example").status == 403
        assert server.get("/v1/models", Host=f"localhost:{server.port}").status == 200


def test_the_page_asks_nobody_else(server: Served) -> None:
    page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert b"://" not in page.body


def test_no_other_site_is_let_in_unasked(server: Served) -> None:
    assert "access-control-allow-origin" not in server.get("/v1/models").headers


# -- the command, as the README has it ----------------------------------------------------------------------------


def shown(language: str, containing: str) -> str:
    """A block of the README."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if containing in block)


def test_what_the_readme_shows_of_the_server(start: Start, tmp_path: Path) -> None:
    """The command, with a free port; curl, the official client and an agent's settings, at that port; ^C."""
    words = shlex.split(shown("sh", " serve "))
    assert words[1:3] == ["-m", "runtime"]
    process = start(*words[3:-1], "0", "--threads", "1")
    assert process.stderr is not None
    said = read_until(process.stderr.fileno(), b"/v1\n").decode()
    url = re.findall(r"^serving .* at (http://127.0.0.1:\d+/v1)$", said, re.MULTILINE)[0]

    def moved(text: str) -> str:
        return text.replace("http://127.0.0.1:8000/v1", url)

    if shutil.which("curl"):
        curl = subprocess.run(shlex.split(moved(shown("sh", "curl"))), capture_output=True, check=True, timeout=HANGS_S)
        assert curl.stdout.endswith(b"data: [DONE]\n\n")
        assert b" Paris" in curl.stdout
    program = [sys.executable, "-c", moved(shown("python", "OpenAI"))]
    client = subprocess.run(program, capture_output=True, check=True, timeout=HANGS_S, cwd=tmp_path, text=True)
    assert client.stdout == "The capital of France is Paris.\n"
    agent = json.loads(moved(shown("json", "provider")))
    provider, model = agent["model"].split("/")
    options = agent["provider"][provider]["options"]
    assert model in agent["provider"][provider]["models"]
    with openai.OpenAI(base_url=options["baseURL"], api_key=options["apiKey"], max_retries=0) as asked:
        stream = asked.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": "You are an agent."}, {"role": "user", "content": QUESTION}],
            tools=[{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
            tool_choice="auto",
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert [chunk.usage for chunk in stream][-1] is not None
    process.send_signal(signal.SIGINT)
    assert process.wait(HANGS_S) == 130
    assert process.stderr.read() == b"stopped, as asked\n"
    assert process.stdout is not None
    assert process.stdout.read() == b""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
        (["--queue", "-1"], "--queue -1"),
        (["--heartbeat", "0"], "--heartbeat 0"),
        (["--api-key", " "], "--api-key is empty"),
        (["--snapshots", "much"], "--snapshots 'much'"),
        (["--snapshots-dir", "/no/such/place"], "--snapshots-dir /no/such/place"),
        (["--snapshots-dir", str(embedded_model())], "is in the model's directory"),
    ],
)
def test_settings_that_cannot_be(cli: Command, options: list[str], message: str) -> None:
    outcome = cli("serve", *options)
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_server_for_everybody_is_warned_of(cli: Command, tmp_path: Path) -> None:
    for options, warned in (([], True), (["--api-key", "k"], False)):
        outcome = cli("serve", "--host", "0.0.0.0", "--port", 0, "--model", tmp_path, *options)
        assert outcome.status == 3
        assert ("warning  bound to 0.0.0.0 without --api-key" in outcome.err) == warned


def test_a_port_that_is_taken(cli: Command, server: Served) -> None:
    outcome = cli("serve", "--port", server.port)
    assert outcome.status == 2
    assert f"port {server.port}" in outcome.err


def test_a_model_that_is_none_ends_the_server(cli: Command, tmp_path: Path) -> None:
    outcome = cli("serve", "--port", 0, "--model", tmp_path)
    assert outcome.status == 3
    assert "config.json" in outcome.err
