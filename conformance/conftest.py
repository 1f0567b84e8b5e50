"""Fixtures that several topics share."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.generate import embedded_model
from runtime.setup.synth import synthesize

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint of the shape `tiny`, with a tokenizer. Not to be written to."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize("tiny", path, vocab=1024)
    return path


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded default model. Not to be written to."""
    return embedded_model()
