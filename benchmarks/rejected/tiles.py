"""How the rows of a prompt share what is read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from benchmarks.rejected.trial import Outcome, Trial

TILE_EXPERTS, TILE_ROWS = 64, 16


def prefill_tiles(trial: Trial) -> Outcome:
    """A prompt is computed in tiles of consecutive rows: one ends before it would want more than 64 distinct experts,
    or have more than 16 rows. Each reads its experts."""
    layers = trial.routes.swapaxes(0, 1)
    distinct = sum(len(np.unique(layer)) for layer in layers)
    counted = f"expert reads, {len(trial.routes)} rows: once a layer | once a tile"
    return Outcome(counted, distinct, sum(tiled(layer.tolist()) for layer in layers))


def tiled(rows: Iterable[Iterable[int]]) -> int:
    """Experts that the tiles of one layer read; of each row its experts."""
    reads, held, inside = 0, set[int](), 0
    for row in map(set, rows):
        if len(held | row) > TILE_EXPERTS or inside == TILE_ROWS:
            reads, held, inside = reads + len(held), set(), 0
        held |= row
        inside += 1
    return reads + len(held)
