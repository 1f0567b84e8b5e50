"""The page, in a real browser: what it shows, what it says and hears, and that it asks nobody else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serverside import MODEL, Served, lend, served

from runtime.generate import Engine

api = pytest.importorskip("playwright.sync_api", reason="needs playwright: install the extra `browser`")

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

COLUMNS = ["state", "mode", "now", "learned", "read", "reads", "last", "errors"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = os.environ.get("EXPERTSTREAM_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}, or EXPERTSTREAM_CHROMIUM")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server(embedded_engine: Engine) -> Iterator[Served]:
    with served(lend(embedded_engine, snapshots=1_000_000)) as server:
        yield server


def test_the_page(browser: Any, server: Served) -> None:
    """The model and its drive are shown; a question is answered, and the next one knows of it."""
    page = browser.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    own = f"http://127.0.0.1:{server.port}/"
    page.goto(own)

    def shows(place: str, text: str | re.Pattern[str]) -> None:
        api.expect(page.locator(place)).to_have_text(text, timeout=60_000)

    shows("#status", "ready")
    shows("#model", MODEL)
    shows("#drives tr td:first-child", "model")
    shows("#queue", re.compile("^idle"))
    assert page.locator("th").all_text_contents() == ["drive", *COLUMNS]
    api.expect(page.locator("#drives td")).to_have_count(1 + len(COLUMNS))
    page.fill("#text", "What is the capital of France?")
    page.click("#send")
    shows(".said", "The capital of France is Paris.")
    shows(".thought", re.compile("."))
    api.expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    page.fill("#text", "What is the capital of Japan?")
    page.press("#text", "Enter")
    api.expect(page.locator(".user")).to_have_count(2)
    api.expect(page.locator("#send")).to_be_enabled(timeout=60_000)
    api.expect(page.locator(".error")).to_have_count(0)
    assert server.worker.metrics.registry.get_sample_value("expertstream_cached_tokens_total")
    assert all(url.startswith(own) for url in asked)
    assert not wrong
    page.close()
