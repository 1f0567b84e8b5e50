"""The backends against the float64 reference, and what mlx promises beyond a tolerance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from shapes import SHAPES
from trajectory import GREEDY, PROMPT, TOLERANCE, assert_same_run, feed_engine, reference, relative_error

from runtime.errors import UsageError
from runtime.generate import Engine
from runtime.ops import make_ops


def load(name: str, backend: str) -> Engine:
    """The shape's checkpoint on a backend, or a skip where that backend cannot be."""
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]'")
    return Engine.load(reference(name)[0], backend=backend, threads=1, context=PROMPT + GREEDY)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_and_every_token_as_the_reference_has_them(name: str, backend: str) -> None:
    engine = load(name, backend)
    _, wanted = reference(name)
    wanted.require_margins()
    assert_same_run(feed_engine(engine), wanted)


@pytest.mark.parametrize("chunks", [[1, 23], [7, 7, 7, 3], [1] * PROMPT])
def test_mlx_does_not_care_how_a_prompt_is_cut(chunks: list[int]) -> None:
    """Within the tolerance: on mlx the bits of a row may depend on how many rows are computed together."""
    _, wanted = reference("released-proportions")
    feed = feed_engine(load("released-proportions", "mlx"))
    cuts = np.cumsum([0, *chunks])
    parts = [feed(wanted.fed[0][start:stop]) for start, stop in pairwise(cuts)]
    assert relative_error(np.concatenate([part.logits for part in parts]), wanted.passes[0].logits) <= TOLERANCE


def test_mlx_has_the_same_bits_whatever_expert_landed_first() -> None:
    engine = load("released-proportions", "mlx")
    prompt = reference("released-proportions")[1].fed[0]
    first = feed_engine(engine)(prompt)
    plan = engine.experts.plan

    def backwards(layer: int, ids: Any, pulse: Any = None) -> Iterator[tuple[int, Any]]:
        yield from reversed(list(plan(layer, ids, pulse)))

    engine.experts.plan = backwards  # type: ignore[method-assign]
    last = feed_engine(engine)(prompt)
    for a, b in zip([*first.layers, first.logits], [*last.layers, last.logits], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_missing_mlx_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "runtime.ops.mlx", raising=False)
    with pytest.raises(UsageError, match=r"needs MLX.*pip install"):
        make_ops("mlx")
