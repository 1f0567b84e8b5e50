"""Many requests of every kind, from four clients at once, against a server process: nothing is left behind.

EXPERTSTREAM_SOAK says how many; the 1,000 of a release take a minute or two.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
from commandline import Start, read_until
from serverside import Served

REQUESTS = int(os.environ.get("EXPERTSTREAM_SOAK", "160"))
MODEL = "small"
SLOPE = 100_000
"""Bytes that one request may add to what the process holds."""

GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 6}),
    ("/v1/completions", {"prompt": "The capital of Japan is", "max_tokens": 5, "stop": "."}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1.2, "seed": 5}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is the capital of Italy?"}], "max_tokens": 8},
    ),
]
BAD: list[bytes] = [
    b"",
    b"{",
    b"\xff",
    b"[" * 3000,
    b'{"model": "small"}',
    b'{"model": "small", "prompt": "\\ud83d"}',
    b'{"model": "small", "prompt": "x", "n": 2}',
    b'{"model": "another", "prompt": "x"}',
]


def text_of(answer: dict[str, Any]) -> Any:
    choice = answer["choices"][0]
    return choice.get("text", choice.get("message")), choice["finish_reason"], answer["usage"]["completion_tokens"]


def test_nothing_is_left_behind(start: Start) -> None:
    process = start(
        "serve", "--port", "0", "--threads", "1", "--model-name", MODEL, "--queue", "8", "--heartbeat", "0.05"
    )
    assert process.stderr is not None
    said = read_until(process.stderr.fileno(), b"/v1\n").decode()
    server = Served(int(re.findall(r"serving .*:(\d+)/v1", said)[0]), None)  # type: ignore[arg-type]
    alone = [text_of(server.post(path, {"model": MODEL, **body}).json) for path, body in GOOD]
    watched, wrong, lock = psutil.Process(process.pid), [], threading.Lock()

    def one(number: int) -> None:
        """A good request, plain or streamed, a bad one, or one whose client goes away, wherever that finds it."""
        choice = random.Random(number)
        kind, which = choice.choice(["good", "good", "stream", "bad", "leave", "head"]), choice.randrange(len(GOOD))
        path, body = GOOD[which][0], {"model": MODEL, **GOOD[which][1]}
        if kind == "good":
            answer = server.post(path, body)
            if answer.status != 200 or text_of(answer.json) != alone[which]:
                with lock:
                    wrong.append((number, answer.status, answer.body))
        elif kind == "stream":
            events = server.post(path, body | {"stream": True}).events
            if events[-1] != "[DONE]" or "error" in events[-2]:
                with lock:
                    wrong.append((number, events[-2:]))
        elif kind == "bad":
            status = server.post(path, choice.choice(BAD)).status
            if status not in (400, 404):
                with lock:
                    wrong.append((number, status))
        elif kind == "leave":
            with server.begin(path, body | {"stream": choice.random() < 0.5, "max_tokens": 500}) as peer:
                if choice.random() < 0.5:
                    peer.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        peer.recv(64)
        else:
            socket.create_connection(("127.0.0.1", server.port)).close()

    def spend(numbers: range) -> tuple[int, int]:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(one, numbers))
        server.until(running=0, waiting=0)
        return watched.memory_info().rss, watched.num_fds()

    quarter = REQUESTS // 4
    rss, fds = spend(range(quarter))
    rss_after, fds_after = spend(range(quarter, REQUESTS))
    assert not wrong
    assert fds_after <= fds + 1
    assert rss_after - rss <= SLOPE * (REQUESTS - quarter)
    assert server.get("/health").json["status"] == "ready"
    print(json.dumps({"requests": REQUESTS, "rss": [rss, rss_after], "descriptors": [fds, fds_after]}))
    assert process.poll() is None
