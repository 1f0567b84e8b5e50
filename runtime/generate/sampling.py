"""From logits to the next token: the largest, or one drawn by a seed.

A draw is a function of the logits, the settings, the seed and the place in the sequence, and of nothing else: not of
what was drawn before, the machine, the threads or a library's mood. So a conversation taken up again, or begun anew,
draws the same tokens. For that,

* probabilities are float64, from an exponential made of IEEE 754's own operations (`reference.exp`, never libm's),
  and are summed one after the other from the largest down, equal ones by id;
* the number that decides is the first of a Philox 4×64-10 generator whose key is the seed and whose counter is the
  place plus one (NumPy counts before it draws): its upper 53 bits, as a fraction in [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from runtime.ops.reference import exp

Logits: TypeAlias = npt.NDArray[np.floating]

Choose: TypeAlias = Callable[[Logits, int], int]
"""Picks a token from the logits [V], none of them NaN, for a place of the sequence, counted from 0."""


def greedy(logits: Logits, place: int) -> int:
    """The lowest id among the largest logits."""
    return int(np.argmax(logits))


@dataclass(frozen=True)
class Sampler:
    """Draws from softmax(logits / temperature), cut to the fewest likeliest tokens that together reach `top_p`.

    temperature > 0, 0 < top_p ≤ 1, 0 ≤ seed < 2^64.
    """

    temperature: float
    top_p: float
    seed: int

    def __call__(self, logits: Logits, place: int) -> int:
        """The token drawn for this place."""
        order = np.argsort(-logits, kind="stable")
        scaled = logits[order].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            below = (scaled - scaled[0]) / self.temperature
        below[scaled == scaled[0]] = 0.0  # also where both are infinite
        mass = np.cumsum(exp(below))  # one after the other, whatever the machine
        kept = int(np.searchsorted(mass, self.top_p * mass[-1])) + 1
        mass = mass[:kept]
        return int(order[np.searchsorted(mass, uniform(self.seed, place) * mass[-1], side="right")])


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1) that decides at a place."""
    key, counter = (np.array(words, np.uint64) for words in ([seed, 0], [place, 0, 0, 0]))
    return float(int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53
