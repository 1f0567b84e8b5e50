"""The description that the server gives of itself, and requests made from it: none finds an error of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from serverside import ScriptedModel, Served, lend, served

from runtime.generate import Engine

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def server(embedded_engine: Engine) -> Iterator[Served]:
    model = ScriptedModel(embedded_engine.config.vocab_size)
    model.script = [5] * 201
    with served(lend(embedded_engine, model=model, context=200)) as server:
        yield server


def test_it_describes_every_route(server: Served) -> None:
    described = server.get("/openapi.json").json["paths"]
    assert set(described) == {
        *("/health", "/metrics", "/v1/models", "/v1/models/{model}", "/v1/chat/completions", "/v1/completions"),
    }


def test_no_request_is_the_server_s_fault(server: Served) -> None:
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    seen: Counter[tuple[str, int]] = Counter()
    for operation in (found.ok() for found in schema.get_all_operations()):

        @given(case=operation.as_strategy())
        @settings(
            max_examples=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def check(case: schemathesis.Case) -> None:
            status = case.call(timeout=60).status_code
            seen[case.path, status] += 1
            assert status < 500

        check()
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert seen[path, 200]
        assert seen[path, 400]
