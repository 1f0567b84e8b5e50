"""The backends against the float64 reference, and what mlx promises beyond a tolerance."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shapes import SHAPES
from trajectory import GREEDY, PROMPT, TOLERANCE, assert_same_run, feed_engine, reference, relative_error

from runtime.drives.buffers import address
from runtime.drives.throttled import Limit
from runtime.errors import UsageError
from runtime.generate import Engine
from runtime.ops import make_ops
from runtime.weights.layout import Layout


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


def test_mlx_computes_with_experts_where_drives_have_read_them_to(tiny: Path) -> None:
    """The same bits as from copies, in no memory but the buffers, and every buffer is an expert's."""
    pytest.importorskip("mlx.core", reason="needs MLX")
    answers = []
    for layout in (None, Layout(limits=(Limit("a", 4e8), Limit("b", 2e8)))):
        with Engine.load(tiny, backend="mlx", layout=layout, context=16, prefetch=False) as engine:
            steps = engine.session().generate([1, 2, 3, 4, 5], 6, logits_hash=True)
            answers.append([(step.token_id, step.logits_sha256) for step in steps])
            held = [held.weight for held in engine.experts._held.values()]
            assert all(expert.lent == (layout is not None) for expert in held)
            if engine.drives is not None:
                assert engine.drives.reader is not None
                buffers = {address(buffer.view): buffer for buffer in engine.drives.reader.pool._out}
                assert {np.asarray(memoryview(expert.w1)).ctypes.data for expert in held} == set(buffers)
    assert answers[0] == answers[1]


class Noting:
    """A module whose functions `names` are noted in `calls` when they are given an MLX array, or nothing."""

    def __init__(self, module: Any, calls: list[str], *names: str) -> None:
        self._module, self._calls, self._names = module, calls, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in self._names:
            return found

        def noted(*given: Any) -> Any:
            if not (given and isinstance(given[0], np.ndarray)):
                self._calls.append(name)
            return found(*given)

        return noted


@pytest.mark.parametrize("reuse", [True, False])
def test_mlx_waits_for_its_device_where_experts_are_chosen_and_for_the_logits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, reuse: bool
) -> None:
    """Each time for what that takes, then for outputs of experts, which are there by then."""
    pytest.importorskip("mlx.core", reason="needs MLX")
    layout, waits = Layout(limits=(Limit("a", 4e8),)), list[str]()
    with Engine.load(tiny, backend="mlx", layout=layout, context=16, reuse=reuse, prefetch=False) as engine:
        steps = engine.session().generate([1, 2, 3, 4, 5], 3)
        next(steps)
        backend: Any = sys.modules[type(engine.ops).__module__]
        monkeypatch.setattr(backend, "mx", Noting(backend.mx, waits, "eval", "synchronize"))
        monkeypatch.setattr(backend, "np", Noting(np, waits, "array", "asarray"))
        next(steps)
    assert waits == ["array", "eval"] * (len(engine.config.moe_layers) + 1)


def test_a_missing_mlx_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.delitem(sys.modules, "runtime.ops.mlx", raising=False)
    with pytest.raises(UsageError, match=r"needs MLX.*pip install"):
        make_ops("mlx")
