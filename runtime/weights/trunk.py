"""The trunk: every weight that is not a routed expert, resident in memory in the backend's own form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import PREFIX
from runtime.ops import Ops, Weight
from runtime.progress import Progress

LayerWeights: TypeAlias = Mapping[str, Weight]
"""Weights of one layer by released name, less the layer's prefix and the ending `.weight`."""

VECTORS = ("norm", "layernorm", "res_proj", "conv1d", "A_log", "dt_bias", "e_score_correction_bias")
"""Endings of names that are not matrices, whatever their shape: the rest of the trunk is."""


class Trunk:
    """All trunk weights of a checkpoint, read once."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops, progress: Progress | None = None) -> None:
        config = checkpoint.config
        self._layers: list[dict[str, Weight]] = [{} for _ in range(config.num_hidden_layers)]
        self.top: dict[str, Weight] = {}
        done = 0
        for name in checkpoint.trunk_names():
            weight = checkpoint.read(name)
            done += weight.nbytes
            home, short = self._place(name)
            home[short] = ops.vector(weight) if short.endswith(VECTORS) else ops.matrix(weight)
            if progress is not None:
                progress(done, checkpoint.trunk_nbytes)
        self.embed_tokens: Weight = self.top["embed_tokens"]
        self.lm_head: Weight = self.top["lm_head"]

    def layer(self, layer: int) -> LayerWeights:
        """The weights of 0-based layer `layer`."""
        return self._layers[layer]

    def _place(self, name: str) -> tuple[dict[str, Weight], str]:
        """Where a released name belongs, and its short form there."""
        short = name.removeprefix(PREFIX).removeprefix("model.").removesuffix(".weight")
        if not short.startswith("layers."):
            return self.top, short
        _, layer, short = short.split(".", 2)
        return self._layers[int(layer)], short
