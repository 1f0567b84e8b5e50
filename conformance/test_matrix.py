"""The invariance matrix, run: on the embedded default, on synthetic checkpoints, on experts of the released size.

By default the cells of a pairwise design, in which every pair of values of two factors occurs; with `--full`, all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matrix
import pytest
import shapes
from copies import large_experts
from covering import Cell, pairwise, whole
from matrix import Answer, Prompt, Site

from fixtures.facts import CAPITALS
from runtime.drives.throttled import Limit
from runtime.generate import Engine, embedded_model
from runtime.setup.synth import synthesize
from runtime.weights.layout import Layout

LONG, SHORT = 8, 56
"""Prompts of the embedded default that are followed by 128 tokens, and by 16."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint: how it comes to be below a folder, on which backend it runs, and how many tokens follow a prompt
    of `rows` tokens."""

    name: str
    make: Callable[[Path], Path]
    rows: int
    new: int
    backend: str = "cpu"


def shaped(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        shapes.write_checkpoint(name, shapes.SEEDS[name], path)
        return path

    return make


def of_released_size(path: Path) -> Path:
    """A small ladder: two layers, one of them with four experts of 17,547,264 bytes."""
    synthesize("ladder", path, layers=2, experts=4, top_k=2, vocab=512)
    return path


EMBEDDED = Subject("embedded", lambda _: embedded_model(), 0, 0)
OTHERS = (
    *(Subject(name, shaped(name), 70, 6) for name in ("released-proportions", "unpadded-a-log", "top-1", "relative")),
    Subject("experts of 6.7 MB", large_experts, 9, 4),
    Subject("experts of 17.5 MB", of_released_size, 9, 3),
    *(Subject(name, shaped(name), 9, 3, "reference") for name in ("smallest", "every-layer-a-snapshot")),
)


@cache
def design(full: bool) -> list[Cell]:
    """The cells that are run."""
    return (whole if full else pairwise)(matrix.FACTORS, matrix.allowed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        cells = list(enumerate(design(metafunc.config.getoption("--full"))))
        metafunc.parametrize(("number", "cell"), cells, ids=[matrix.name_of(cell) for _, cell in cells])


@dataclass(frozen=True)
class Stand:
    """A subject made, with its prompts and what they must be answered with."""

    site: Site
    prompts: list[Prompt]
    wanted: list[Answer]

    def dealt(self, number: int, cells: int) -> list[int]:
        """The prompts of a cell: each prompt in one cell, and in every cell at least one."""
        mine = list(range(number, len(self.prompts), cells))
        return mine or [number % len(self.prompts)]


def facts(number: int) -> str:
    """Some sentences about capitals, the last of them not finished."""
    chance = random.Random(number)
    countries = chance.sample(sorted(CAPITALS), 1 + int(14 * chance.random() ** 2))
    *told, asked = (f"The capital of {country} is {CAPITALS[country][0]}." for country in countries)
    return " ".join([*told, asked.rpartition(" ")[0]])


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Subject], Stand]:
    """Makes each subject once."""

    @cache
    def made(subject: Subject) -> Stand:
        folder = tmp_path_factory.mktemp("matrix")
        model = subject.make(folder / "model")
        if subject is EMBEDDED:
            with Engine.load(model, backend="cpu") as engine:
                assert engine.tokenizer is not None
                texts = [tuple(engine.tokenizer.encode(facts(number))) for number in range(LONG + SHORT)]
            prompts = [Prompt(ids, 128 if number < LONG else 16) for number, ids in enumerate(texts)]
        else:
            chance = random.Random(subject.name)
            rows = (subject.rows, subject.rows // 2, subject.rows // 8)
            prompts = [Prompt(tuple(chance.randrange(256) for _ in range(n)), subject.new) for n in rows]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXPERTSTREAM_HOME", str(folder / "home"))
            return Stand(Site(model, folder), prompts, matrix.baseline(model, prompts, subject.backend))

    return made


@pytest.mark.parametrize("subject", [EMBEDDED, *OTHERS], ids=lambda subject: f"{subject.name}-{subject.backend}")
def test_the_answer_is_the_same(
    number: int,
    cell: Cell,
    subject: Subject,
    stand: Callable[[Subject], Stand],
    coverage: matrix.Coverage,
    request: pytest.FixtureRequest,
) -> None:
    there = stand(subject)
    mine = there.dealt(number, len(design(request.config.getoption("--full"))))
    prompts, wanted = [there.prompts[i] for i in mine], [there.wanted[i] for i in mine]
    matrix.run(there.site, cell, prompts, wanted, subject.backend, seed=number)
    coverage.add(subject.name, subject.backend, cell, prompts)


def test_a_layer_without_experts_is_not_looked_ahead_to(tmp_path: Path) -> None:
    """Every third layer routes, and the one after it does not."""
    shapes.write_checkpoint("relative", 0, tmp_path / "model")
    layout = Layout(limits=(Limit("a", 4e8),))
    with Engine.load(tmp_path / "model", backend="cpu", layout=layout, prefetch=True) as engine:
        said = matrix.answer(engine.session(), Prompt((1, 2, 3), 8))
    assert said == matrix.baseline(tmp_path / "model", [Prompt((1, 2, 3), 8)])[0]
