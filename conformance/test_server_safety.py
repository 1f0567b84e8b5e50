"""Who may ask, and what is told to whom."""

from __future__ import annotations

from serverside import QUESTION, Served, lend, served

from runtime.generate import Engine


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


def test_a_log_has_no_text_in_it(embedded_engine: Engine) -> None:
    told: list[str] = []
    with served(lend(embedded_engine), log=told.append) as server:
        answer = server.chat(QUESTION, max_tokens=8).json
        server.chat("secret", stop="")
    assert len(told) == 1
    assert answer["id"] in told[0]
    assert "91 prompt tokens, up to 8 new" in told[0]
    assert "France" not in told[0]
