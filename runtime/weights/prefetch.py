"""Which experts the next layer will want: guesses, and how good they were.

Two predictors. *Look-ahead*: the next layer's own router, applied to what is known of its input while this layer's
experts are being read (`K3.look_ahead`). *Previous*: what the layer wanted for the token before; it needs no input,
so it serves the first MoE layer, too. Each is scored for each layer by its recall, the share of a row's experts that
it named, also where it is not followed. The better one is followed, unless even that one is nearly always wrong.

A guess is only ever a hint to the store; what is computed does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.weights.experts import ExpertStore

MEMORY = 0.2
"""What the newest sample counts in a score."""

WARM_UP = 16
"""Samples before a score decides anything."""

LEAST_RECALL = 0.1
"""A predictor that names fewer is not followed."""

UNKNOWN_RECALL = 0.5
"""What a predictor is taken for before it has a score."""

Ids = npt.NDArray[np.int64]
Predictor = Literal["look-ahead", "previous"]
PREDICTORS: tuple[Predictor, ...] = ("look-ahead", "previous")
"""Of two equally good ones, the first is followed."""


@dataclass(slots=True)
class Score:
    """Recall, newest samples first. `total` and `samples` give the plain mean."""

    recall: float = 0.0
    samples: int = 0
    total: float = 0.0

    def add(self, sample: float) -> None:
        self.samples += 1
        self.total += sample
        self.recall += max(MEMORY, 1 / self.samples) * (sample - self.recall)

    @property
    def mean(self) -> float:
        """Recall over all samples."""
        return self.total / self.samples


class Prefetch:
    """Guesses for a store. `scores`, by (layer, predictor), of those that have been tried."""

    def __init__(self, config: ModelConfig, store: ExpertStore) -> None:
        self.scores: dict[tuple[int, Predictor], Score] = {}
        self._store = store
        self._layers = config.moe_layers
        self._previous: dict[int, Ids] = {}
        self._open: dict[tuple[int, Predictor], Ids] = {}

    def routed(self, layer: int, ids: Ids) -> None:
        """The layer wants ids [T, k]: score what was guessed of it."""
        for predictor in PREDICTORS:
            guess = self._open.pop((layer, predictor), None)
            if guess is not None and len(guess) in (1, len(ids)) and (predictor == "look-ahead" or len(ids) == 1):
                named = (ids[:, :, None] == guess[:, None, :]).any(axis=2)
                self.scores.setdefault((layer, predictor), Score()).add(float(named.mean()))
        self._previous[layer] = ids[-1:]

    def guess(self, layer: int, ahead: Ids | None) -> None:
        """Have the store read what the layer after this one may want; `ahead` [T, k] is its look-ahead, if any.

        Where that is a chunk of many rows, the previous token says nothing of them.
        """
        after = self._layers[(self._layers.index(layer) + 1) % len(self._layers)]
        guesses: dict[Predictor, Ids] = {}
        if ahead is not None:
            guesses["look-ahead"] = ahead
        if (ahead is None or len(ahead) == 1) and (previous := self._previous.get(after)) is not None:
            guesses["previous"] = previous
        for predictor, ids in guesses.items():
            self._open[after, predictor] = ids
        followed = max(guesses, key=lambda p: self._chance(after, p), default=None)
        if followed is not None and (chance := self._chance(after, followed)) >= LEAST_RECALL:
            self._store.hint(after, ranked(guesses[followed]), chance)

    def recalls(self, predictor: Predictor) -> Iterator[tuple[int, float]]:
        """(layer, mean recall) of a predictor, where it was tried."""
        for layer in self._layers:
            if (score := self.scores.get((layer, predictor))) is not None:
                yield layer, score.mean

    def _chance(self, layer: int, predictor: Predictor) -> float:
        score = self.scores.get((layer, predictor))
        return score.recall if score is not None and score.samples >= WARM_UP else UNKNOWN_RECALL


def ranked(ids: Ids) -> list[int]:
    """The distinct experts of ids [T, k], those that most rows name first, then those that rows name early."""
    experts, place, rows = np.unique(ids.T, return_index=True, return_counts=True)
    return [int(e) for e in experts[np.lexsort((place, -rows))]]
