"""Covering designs: every pair that there can be, in allowed cells alone, and few of them."""

from __future__ import annotations

from itertools import combinations

import matrix
from covering import Cell, Factors, pairs, pairwise, whole
from hypothesis import given
from hypothesis import strategies as st


def anything(cell: Cell) -> bool:
    return True


@st.composite
def factors(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    return {f"f{i}": tuple(range(size)) for i, size in enumerate(sizes)}


@given(factors(), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=4))
def test_every_pair_that_there_can_be_occurs(factors: Factors, forbidden: set[tuple[int, int]]) -> None:
    def allowed(cell: Cell) -> bool:
        return (cell["f0"], cell.get("f1")) not in forbidden

    cells = whole(factors, allowed)
    if not cells:
        return
    chosen = pairwise(factors, allowed)
    assert all(map(allowed, chosen))
    assert {pair for cell in chosen for pair in pairs(cell)} == {pair for cell in cells for pair in pairs(cell)}
    assert chosen == pairwise(factors, allowed)
    assert len(chosen) <= len(cells)


def test_it_takes_few_cells() -> None:
    """The least there can be, the product of the two largest factors, and some more."""
    for least, most, sizes in ((4, 8, [2] * 8), (9, 15, [3] * 4), (12, 13, [4, 3, 2])):
        named = {f"f{i}": range(size) for i, size in enumerate(sizes)}
        assert least <= len(pairwise(named, anything)) <= most


def test_the_matrix_has_every_pair_of_every_two_factors_but_what_cannot_be() -> None:
    chosen = pairwise(matrix.FACTORS, matrix.allowed)
    assert len(chosen) <= 20
    found = {pair for cell in chosen for pair in pairs(cell)}
    every = {
        ((a, x), (b, y))
        for a, b in combinations(matrix.FACTORS, 2)
        for x in matrix.FACTORS[a]
        for y in matrix.FACTORS[b]
    }
    one_lost = ("lost", "one, mid-answer")
    assert every - found == {
        (("drives", 1), ("placement", "partial")),
        (("drives", 1), one_lost),
        (("placement", "split"), one_lost),
    }
    assert len(whole(matrix.FACTORS, matrix.allowed)) == 13824
