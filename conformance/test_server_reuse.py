"""What is reused of earlier conversations: exactly what the prompt begins with, and the answer is the cold one."""

from __future__ import annotations

import threading

from serverside import BODY, HANGS_S, MODEL, QUESTION, Gate, ScriptedModel, Served, lend, served

from runtime.generate import Engine
from runtime.text.chat import render


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
