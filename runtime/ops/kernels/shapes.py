"""How many rows are multiplied together, by the vector registers of the CPU.

Every chain of multiply-adds keeps its own accumulator, so no shape here can change a result. It decides how often a
register meets what is loaded: n weight rows times r activation rows are n · r multiply-adds for n + r loads, and as
long as n · r accumulators, the smaller of n and r, and one more fit in the registers, nothing is spilled. A chain has
16 lanes: one register of AVX-512, two of AVX2, four of NEON.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.ops.kernels.formats import BF16, F32, INT8, MXFP4, MXFP4_EDGE, SPLIT
from runtime.ops.kernels.jit import VECTORS


class Shapes(NamedTuple):
    """Of one set of vector registers."""

    lanes: int
    """float32 in a register."""
    accumulators: int
    """Registers that a tile may fill with them."""
    panels: tuple[int, ...]
    """Activation rows that are multiplied together: as many of the first number as there are, then fewer."""
    staged_from: int | None
    """Activation rows from which on weights are decoded before they are used, once for all, and lanes of one register
    are taken after those of another; only such rows make first panels. For chains wider than a register, of which too
    few whole ones have room."""
    staged_as: dict[int, int]
    """By format: the one that decoded weights wait in, where it is not SPLIT. In BF16 they are half as many bytes to
    write; each multiplication widens them once more, which is free where others than the multipliers do it."""
    heads: int
    """Heads whose latents are mixed together."""
    weight_rows: dict[int, tuple[int, ...]]
    """By format: weight rows beside a panel of 1, 2 … rows where each is decoded as it is used; the fastest of those
    measured."""


_AVX512 = {BF16: (8, 8, 4, 3), F32: (8, 8, 4, 3), SPLIT: (8, 8, 6, 3), INT8: (8, 8, 4, 3), MXFP4: (4, 4, 4, 2)}
_HALVES = {BF16: (6, 3), F32: (6, 3), SPLIT: (6, 3), INT8: (6, 3), MXFP4: (4, 2)}
_SHAPES = {
    "avx512": Shapes(16, 24, (8, 4, 2, 1), None, {}, 4, {**_AVX512, MXFP4_EDGE: (1, 1, 1, 1)}),
    "avx2": Shapes(8, 12, (4, 2, 1), 6, {BF16: BF16, MXFP4: BF16}, 6, {**_HALVES, MXFP4_EDGE: (1, 1)}),
    "portable": Shapes(4, 24, (4, 2, 1), 8, {}, 6, {**_HALVES, MXFP4_EDGE: (1, 1)}),
}
"""What is called portable is meant for NEON, with its 32 registers."""
SHAPES = _SHAPES[VECTORS]
