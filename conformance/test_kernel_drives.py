"""Whole runs over drives that the kernel limits, and that fail by the kernel's word. Need root and loop devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from copies import rewrite, write_experts
from loopback import ext4_image, limited
from trouble import Turns, trouble

from runtime.drives.ledger import Health
from runtime.generate import Engine
from runtime.weights.layout import Layout

NEW = 6
Answer = list[tuple[int, str | None]]


def answer(engine: Engine, after: int = 0, then: object = None) -> Answer:
    """The answer; after so many of its tokens, `then` is called."""
    assert engine.tokenizer is not None
    said: Answer = []
    for step in engine.session().generate(engine.tokenizer.encode("The capital of France is"), NEW, logits_hash=True):
        said.append((step.token_id, step.logits_sha256))
        if len(said) == after and callable(then):
            then()
    return said


@pytest.fixture(scope="module")
def alone(embedded: Path) -> Answer:
    with Engine.load(embedded, backend="cpu") as engine:
        return answer(engine)


@pytest.fixture
def drives(embedded: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[str, Path], dict[str, Path]]]:
    """(the model without experts, two mounted file systems with all of them, their images)."""
    with ExitStack() as stack:
        mounts, images = {}, {}
        for name in "ab":
            (tmp_path / name).mkdir()
            images[name], mounts[name] = stack.enter_context(ext4_image(tmp_path / name))
            write_experts(embedded, mounts[name] / "k3-experts", lambda *_: True)
            for file in (mounts[name] / "k3-experts").iterdir():
                fd = os.open(file, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        yield rewrite(embedded, tmp_path / "bare", lambda name: ".experts." not in name), mounts, images


def test_limited_by_the_kernel(drives: tuple[Path, dict[str, Path], dict[str, Path]], alone: Answer) -> None:
    bare, mounts, _ = drives
    with (
        limited({mounts["a"]: 30_000_000, mounts["b"]: 5_000_000}),
        Engine.load(bare, backend="cpu", layout=Layout(tuple(mounts.items())), reuse=False) as engine,
    ):
        assert answer(engine) == alone
        assert engine.drives is not None
        counts, _, modes = engine.drives.counts()
        assert set(modes.values()) == {"direct"}
        assert all(counts[name].requested_bytes > 0 for name in "ab")  # how it is shared out, time decides


def test_blocks_lost_in_the_middle_of_an_answer(
    drives: tuple[Path, dict[str, Path], dict[str, Path]], alone: Answer
) -> None:
    bare, mounts, images = drives
    with (
        trouble() as doings,
        Engine.load(bare, backend="cpu", layout=Layout(tuple(mounts.items())), reuse=False) as engine,
    ):

        def pull() -> None:
            os.truncate(images["b"], 4096)
            Turns(doings, "b", "a")  # b is asked first, on a machine however busy

        assert answer(engine, after=2, then=pull) == alone
        assert engine.drives is not None
        assert engine.drives.reader is not None
        counts, _, _ = engine.drives.counts()
        assert counts["b"].errors >= 1
        assert counts["a"].errors == 0
        assert engine.drives.reader.health("b") in (Health.SUSPECT, Health.LOST)
