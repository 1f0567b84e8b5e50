"""The golden runs come out again: tokens everywhere, bits where they were shown to repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import shapes
from own import Own

from golden import cases
from runtime.generate import Engine, embedded_model
from runtime.weights.trunk import Precision

EMBEDDED = cases.load("embedded") + cases.load("int8")
SYNTHETIC = cases.load("synthetic")


def name_of(case: cases.Case) -> str:
    return f"{case.model} {case.trunk}: {case.name}"


@cache
def embedded_engine(backend: str, trunk: Precision) -> Engine:
    return Engine.load(embedded_model(), backend=backend, trunk=trunk)


@pytest.mark.parametrize("case", EMBEDDED, ids=name_of)
@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_the_embedded_default_answers_as_recorded(backend: str, case: cases.Case) -> None:
    cases.check(embedded_engine(backend, case.trunk), case)


@pytest.mark.parametrize("shape", shapes.SEEDS)
def test_synthetic_checkpoints_answer_as_recorded(shape: str, tmp_path: Path) -> None:
    shapes.write_checkpoint(shape, shapes.SEEDS[shape], tmp_path / shape)
    mine = [case for case in SYNTHETIC if case.model == shape]
    assert {case.name for case in mine} == {"short", "long"}
    for backend in cases.BACKENDS:
        engine = Engine.load(tmp_path / shape, backend=backend)
        for case in mine:
            cases.check(engine, case)


def test_no_recorded_run_is_trivial() -> None:
    for case in EMBEDDED + SYNTHETIC:
        assert len(set(case.token_ids)) > 1, name_of(case)
        assert set(case.digests) == set(cases.BACKENDS)
    assert len({case.digests["cpu"] for case in EMBEDDED}) == len(EMBEDDED)


@pytest.fixture(scope="module")
def engine_of_the_released(released: Own) -> Iterator[Engine]:
    with Engine.load(
        released.model, backend=released.backend, layout=released.layout, memory=released.memory
    ) as engine:
        yield engine


@pytest.mark.own_model
def test_the_released_model_has_the_published_logits(engine_of_the_released: Engine) -> None:
    """The first logits are the published ones of the released model"""
    vector = json.loads((cases.HERE / "released.json").read_text())["logits"]
    model = engine_of_the_released.model
    out = model.forward(np.array(vector["prompt_ids"]), model.new_state(16))
    logits = engine_of_the_released.ops.numpy(out)[0]
    assert int(np.argmax(logits)) == vector["argmax"]
    for token, value in vector["values"].items():
        assert abs(float(logits[int(token)]) - value) <= vector["tolerance"], token
    assert abs(float(logits.min()) - vector["min"]) <= vector["tolerance"]


@pytest.mark.own_model
def test_the_released_model_continues_as_published(engine_of_the_released: Engine) -> None:
    """The greedy continuation is the published one of the released model"""
    vector = json.loads((cases.HERE / "released.json").read_text())["continuation"]
    tokenizer = engine_of_the_released.tokenizer
    assert tokenizer is not None
    prompt_ids = tokenizer.encode(vector["prompt"])
    assert prompt_ids == vector["prompt_ids"]
    wanted = tokenizer.encode(vector["text"])
    steps = engine_of_the_released.session().generate(prompt_ids, len(wanted))
    assert tokenizer.decode([step.token_id for step in steps]) == vector["text"]
