"""Covering designs: few cells of a product of factors in which every pair of values still occurs.

    cells = pairwise({"drives": (1, 2, 4), "chunk": (1, 7)}, allowed=lambda cell: ...)

A fault that needs two circumstances to show is met by a design that has every pair. The design is a function of its
arguments alone. It knows names and values, never what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

import numpy as np

Value = str | int
Cell = dict[str, Value]
Factors = Mapping[str, Sequence[Value]]
Pair = tuple[tuple[str, Value], tuple[str, Value]]


def whole(factors: Factors, allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Every cell that is allowed, the last factor changing fastest."""
    cells = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [cell for cell in cells if allowed(cell)]


def pairs(cell: Cell) -> set[Pair]:
    """The pairs of values of different factors in a cell."""
    return set(combinations(cell.items(), 2))


def pairwise(factors: Factors, allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Allowed cells in which every pair that any allowed cell has occurs.

    Greedy: the next cell is one of those with the most pairs that are still missing, and of these one whose values
    have been used least.
    """
    cells = whole(factors, allowed)
    values = {name: list(levels) for name, levels in factors.items()}
    table = np.array([[values[name].index(cell[name]) for name in factors] for cell in cells])
    missing = {
        (i, j): np.zeros((len(values[a]), len(values[b])), np.int64)
        for (i, a), (j, b) in combinations(enumerate(factors), 2)
    }
    for (i, j), wanted in missing.items():
        wanted[table[:, i], table[:, j]] = 1
    used = [np.zeros(len(levels)) for levels in values.values()]
    chosen = []
    while any(wanted.any() for wanted in missing.values()):
        gain = sum(wanted[table[:, i], table[:, j]] for (i, j), wanted in missing.items())
        wear = sum(count[table[:, i]] * len(count) for i, count in enumerate(used))
        best = int(np.lexsort((wear, -gain))[0])
        chosen.append(cells[best])
        for (i, j), wanted in missing.items():
            wanted[table[best, i], table[best, j]] = 0
        for i, count in enumerate(used):
            count[table[best, i]] += 1
    return chosen
