"""What a held expert is worth: an estimate of the chance that its layer wants it when it comes next.

Every layer comes once a token, so what counts is how likely an expert is to be chosen at its layer's next visit, not
how long ago in time it was used. The estimate is short memory plus long memory:

    recency     halves at each visit of its layer, and gains ½ when the visit wants the expert
    heat / 2    the share of passes that ever wanted it, as learned over runs (`heat.py`)

Among equals that goes first whose layer comes last: a cache smaller than one token's experts then keeps a part of
the layers, where least recently used keeps nothing until it comes round. Hits on the real routing of 12 tokens
(10,010 different experts of 17,664 choices, so no cache that starts empty has more than 43.3 %; Belady knows the
future; budgets are in experts):

    budget                500    1000    1472    2000    3000    4000
    least recently used     0       0    31.5    31.5    37.3    39.2  %
    this, without heat   13.2    23.2    31.5    34.3    38.2    39.8  %
    Belady               26.5    36.7    40.3    43.3    43.3    43.3  %

With the heat of the first half of the tokens, the second half has 14.4 → 15.2 % hits at 500 experts, 19.5 → 21.2 % at
736, 36.6 → 36.4 % at 1472, 38.5 → 39.6 % at 2000 and 41.5 → 42.3 % at 3000: little, of a short prompt, but for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from runtime.weights.heat import Heat

Key = tuple[int, int]
"""(layer, expert)"""

FADING = 0.5
"""What is left of the recency after a visit of the layer."""

HEAT_SHARE = 0.5
"""What the share of all passes counts beside the recency."""

CHANCE = 0.34 / FADING
"""Worth times this is about the chance to be wanted: an expert that one visit wants, the next wants in 34 of 100 cases
on the real routes."""

WINDOW = 64
"""How many are put in order at once."""


class Worth:
    """The worth of what is held; recency is kept of what is not held, too."""

    def __init__(self, layers: Sequence[int], experts: int, heat: Heat | None = None) -> None:
        """layers: the model's numbers of its MoE layers, each with so many experts."""
        self._layers = list(layers)
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._recency = np.zeros((len(layers), experts))
        self._held = np.zeros(self._recency.shape, np.bool_)
        self._heat = heat
        self._row = 0
        self._next: list[tuple[float, Key]] = []

    def visit(self, layer: int, chosen: npt.NDArray[np.int64]) -> None:
        """The layer is there and wants these distinct experts."""
        self._row = self._rows[layer]
        recency = self._recency[self._row]
        recency *= FADING
        recency[chosen] += 1 - FADING
        if self._heat is not None:
            self._heat.want(layer, chosen)
        self._next.clear()

    def enter(self, key: Key) -> None:
        """The expert is held."""
        self._held[self._rows[key[0]], key[1]] = True

    def leave(self, key: Key) -> None:
        """The expert is not held any more."""
        self._held[self._rows[key[0]], key[1]] = False

    def least(self, but: Collection[Key], below: float | None = None) -> Key | None:
        """What is worth least of what is held, `but` for some, if it is worth less than `below`."""
        fresh = False
        while True:
            while self._next:
                worth, (layer, expert) = self._next[-1]
                if self._held[self._rows[layer], expert] and (layer, expert) not in but:
                    return (layer, expert) if worth < (inf if below is None else below) else None
                self._next.pop()
            if fresh:
                return None
            self._next = self._order(but)
            fresh = True

    def _order(self, but: Collection[Key]) -> list[tuple[float, Key]]:
        """The WINDOW that are worth least, those that go first at the end."""
        idle = self._held.copy()
        for layer, expert in but:
            idle[self._rows[layer], expert] = False
        rows, experts = np.nonzero(idle)
        worth = self._recency[rows, experts]
        if self._heat is not None:
            worth = worth + HEAT_SHARE * self._heat.shares(rows, experts)
        visits_until = (rows - self._row - 1) % len(self._layers)
        first = np.lexsort((-visits_until, worth))[:WINDOW][::-1]
        return [(float(worth[i]), (self._layers[rows[i]], int(experts[i]))) for i in first]
