"""The server over drives that hang, fail and come back: what clients are told, and whose place is free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serverside import BODY, HANGS_S, Served, served
from trouble import Doings, by_drive, lost, trouble

from runtime.drives.throttled import Limit
from runtime.generate import Engine
from runtime.weights.layout import Layout

TWO = Layout(limits=(Limit("a", 4e8), Limit("b", 3e8)))
LONG = BODY | {"max_tokens": 200}


@pytest.fixture
def drives() -> Iterator[Doings]:
    """What the drives do before a read: by name."""
    with by_drive(), trouble() as doings:
        yield doings


def until(condition: Callable[[], bool]) -> None:
    for _ in range(HANGS_S * 200):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("never")


class Standing:
    """Reads stand before it while it is shut. Counts those that have begun."""

    def __init__(self) -> None:
        self.open, self.begun, self.lock = threading.Event(), 0, threading.Lock()
        self.open.set()

    def __call__(self, read: Callable[[], int], into: memoryview) -> int:
        with self.lock:
            self.begun += 1
        assert self.open.wait(HANGS_S)
        return read()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_who_goes_away_while_a_layer_waits_for_its_reads_is_not_waited_for(
    tiny: Path, drives: Doings, phase: str
) -> None:
    """The reads hang: the place is free nevertheless, and nothing more is read for nobody."""
    gate = drives["a"] = drives["b"] = Standing()
    with Engine.load(tiny, backend="reference", layout=TWO, reuse=False) as engine, served(engine, queue=1) as server:
        alone = server.post("/v1/completions", BODY).json["choices"]
        if phase == "prefill":
            gate.open.clear()
        begun = gate.begun
        running = server.begin("/v1/completions", LONG | {"stream": True})
        if phase == "decode":
            read = b""
            while read.count(b"data: ") < 2:
                read += running.recv(1 << 16)
            gate.open.clear()
            begun = gate.begun
        until(lambda: gate.begun > begun)
        waiting = server.begin("/v1/completions", LONG)
        assert server.until(running=1, waiting=1)["running"]["phase"] == phase
        waiting.close()
        server.until(running=1, waiting=0)
        running.close()
        server.until(running=0)
        begun = gate.begun
        gate.open.set()
        assert engine.drives is not None
        assert engine.drives.reader is not None
        until(lambda: engine.drives.reader.idle)  # type: ignore[union-attr]
        assert gate.begun == begun
        assert server.post("/v1/completions", BODY).json["choices"] == alone


@pytest.mark.parametrize("streamed", [False, True])
def test_a_drive_that_fails_costs_nothing_and_the_last_one_that_answer(
    tiny: Path, drives: Doings, streamed: bool
) -> None:
    def ask(server: Served) -> object:
        answer = server.post("/v1/completions", BODY | {"stream": streamed})
        if not streamed:
            return answer.json if answer.status == 500 else answer.json["choices"]
        *said, last = answer.events
        assert last == "[DONE]"
        return said[-1] if "error" in said[-1] else [part["choices"] for part in said]

    with Engine.load(tiny, backend="reference", layout=TWO, reuse=False) as engine, served(engine) as server:
        alone = ask(server)
        drives["b"] = lost
        until(lambda: ask(server) == alone and server.get("/health").json["status"] == "degraded")
        facts = server.get("/health")
        assert facts.status == 200
        assert facts.json["drives"]["b"]["errors"] > 0 == facts.json["drives"]["a"]["errors"]
        drives["a"] = lost
        error = ask(server)
        assert isinstance(error, dict)
        assert (error["error"]["type"], error["error"]["code"]) == ("server_error", "storage_failed")
        assert "no such device" in error["error"]["message"]
        del drives["a"], drives["b"]
        until(lambda: ask(server) == alone)
        until(lambda: ask(server) == alone and server.get("/health").json["status"] == "ready")
