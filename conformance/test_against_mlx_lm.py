"""Our reference against an implementation that shares nothing with it: mlx-lm's own `kimi_k3`."""

from __future__ import annotations

import pytest
from shapes import SHAPES
from trajectory import assert_same_run, reference

pytest.importorskip("mlx_lm.models.kimi_k3", reason="mlx-lm with kimi_k3 is not installed: pip install 'mlx-lm>=0.32'")


@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_and_every_token_as_mlx_lm_has_them(name: str) -> None:
    from oracle import MlxLm

    path, ours = reference(name)
    ours.require_margins()
    assert_same_run(MlxLm(path).feed, ours)
