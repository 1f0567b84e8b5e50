"""The server as its users meet it: the official client, and the command with what the README shows of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from commandline import Command, Start, read_until
from conftest import ROOT
from serverside import HANGS_S, MODEL, QUESTION, Served

from runtime.generate import embedded_model


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


def test_the_operator_is_told_of_reads_that_failed(start: Start, tiny: Path, tmp_path: Path) -> None:
    """Of an answer that failed with them, and not that they were made good."""
    model = shutil.copytree(tiny, tmp_path / "m")
    process = start(
        *("serve", "--port", 0, "--model", model, "--model-name", MODEL, "--threads", 1, "--context", 64),
        *("--simulate-drive", "a=400MB/s", "--expert-cache", "off", "--snapshots", "off"),
    )
    assert process.stderr is not None
    said = read_until(process.stderr.fileno(), b"/v1\n").decode()
    server = Served(int(re.findall(r"^serving .*:(\d+)/v1$", said, re.MULTILINE)[0]), None)  # type: ignore[arg-type]
    for file in model.glob("*.safetensors"):
        os.truncate(file, 4096)
    answer = server.complete("secret", max_tokens=3)
    assert (answer.status, answer.error["code"]) == (500, "storage_failed")
    assert server.get("/health").json["status"] == "degraded"
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS_S) == 143
    told = process.stderr.read().decode()
    assert re.search(r"^note     drive a: \d+ reads failed; the last: .+$", told, re.MULTILINE)
    assert f"failed   {answer.error['message']}\n" in told
    assert "secret" not in told


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
