"""Which experts tokens ask for: recorded, or drawn to be like what was recorded; and which of them a cache spares.

Routes are [positions, MoE layers, k] int64, the k experts of a token in a layer being distinct.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.config import no_file
from runtime.errors import UsageError
from runtime.weights.worth import Worth

Routes = npt.NDArray[np.int64]

SIGMA = 1.15
"""Of the lognormal weights of a layer's experts, fitted to 12 recorded positions of Kimi K3."""
FIRST_SIGMA = 0.6
"""The same in the first MoE layer, whose usage is flatter."""
CARRIED = 0.34
"""Part of a token's experts that it has from the token before; chance adds a little."""
WARM_AT_MOST = 128
"""Tokens drawn to fill a cache before any is counted."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A synthetic router. Each layer has lognormal weights; a token keeps some experts of the one before and draws the
    rest by weight, without replacement. The same seed gives the same routes."""

    layers: int
    experts: int
    k: int
    seed: int = 0
    sigma: float = SIGMA
    first_sigma: float = FIRST_SIGMA
    carried: float = CARRIED

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[MoE layers, experts], each layer's summing to 1."""
        sigma = np.full((self.layers, 1), self.sigma)
        sigma[:1] = self.first_sigma
        normal = np.random.default_rng([self.seed, 0]).standard_normal((self.layers, self.experts))
        weights = np.exp(sigma * normal)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def tokens(self, stream: int) -> Iterator[npt.NDArray[np.int64]]:
        """Token after token, [MoE layers, k] with ids ascending. Each `stream` is a text of its own."""
        weights, rng = self.weights, np.random.default_rng([self.seed, 1, stream])
        shape = (self.layers, self.k)
        ids: npt.NDArray[np.int64] | None = None
        while True:
            # Whoever waits least for an exponential clock of rate w comes first: drawing by weight without replacement.
            waits = rng.standard_exponential((self.layers, self.experts)) / weights
            if ids is not None:
                row, column = np.nonzero(rng.random(shape) < self.carried)
                waits[row, ids[row, column]] = -1.0
            nearest = np.argpartition(waits, self.k - 1, axis=1)[:, : self.k]
            ids = np.sort(nearest, axis=1).astype(np.int64)
            yield ids

    def unions(self, rows: int, stream: int) -> list[list[int]]:
        """By MoE layer, the distinct experts of a text of `rows` tokens, ascending."""
        used = np.zeros((self.layers, self.experts), np.bool_)
        for _, ids in zip(range(rows), self.tokens(stream), strict=False):
            np.put_along_axis(used, ids, True, axis=1)
        return [np.flatnonzero(layer).tolist() for layer in used]


class Cache:
    """The experts that a run of so many slots would keep between tokens, by the store's own rule (`weights.worth`),
    but for what is learned over runs."""

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        self.slots = slots
        self.wanted = self.hits = 0
        self._held: set[tuple[int, int]] = set()
        self._worth = Worth(range(layers), experts)

    @property
    def full(self) -> bool:
        return len(self._held) >= self.slots

    def token(self, ids: npt.NDArray[np.int64]) -> list[list[int]]:
        """By MoE layer, those of ids [MoE layers, k] that have to be read. Slots are none or at least k."""
        missing = []
        for row, experts in enumerate(ids.tolist()):
            missing.append([e for e in experts if (row, e) not in self._held])
            self.wanted += len(experts)
            self.hits += len(experts) - len(missing[-1])
            if self.slots:
                self._read(row, experts, missing[-1])
        return missing

    def _read(self, row: int, experts: list[int], missing: list[int]) -> None:
        """Keep the missing ones of a layer's experts, in place of what is worth least."""
        self._worth.visit(row, np.array(experts))
        in_use = {(row, e) for e in experts}
        for e in missing:
            if self.full:
                least = self._worth.least(in_use)
                assert least is not None
                self._held.remove(least)
                self._worth.leave(least)
            self._held.add((row, e))
            self._worth.enter((row, e))


@dataclass(frozen=True)
class Window:
    """The tokens that are counted: by token and MoE layer, the experts to read.

    warm: tokens before them, for the cache's sake; hit_rate: of the counted tokens; full: whether the cache was.
    """

    reads: tuple[list[list[int]], ...]
    warm: int
    hit_rate: float
    full: bool


def _count(warmed: Iterable[npt.NDArray[np.int64]], counted: Iterable[npt.NDArray[np.int64]], cache: Cache) -> Window:
    warm = sum(1 for _ in map(cache.token, warmed))
    cache.wanted = cache.hits = 0
    full = cache.full
    reads = tuple(cache.token(ids) for ids in counted)
    return Window(reads, warm, cache.hits / cache.wanted if cache.wanted else 0.0, full)


def drawn_window(usage: Usage, tokens: int, slots: int) -> Window:
    """`tokens` drawn tokens, after as many as fill the cache (at most WARM_AT_MOST)."""
    text, cache = usage.tokens(stream=0), Cache(slots, usage.layers, usage.experts)
    warmed = (next(text) for _ in range(WARM_AT_MOST) if not cache.full)
    return _count(warmed, (next(text) for _ in range(tokens)), cache)


def recorded_window(routes: Routes, experts: int, tokens: int, slots: int) -> Window:
    """The last `tokens` of the recorded ones. A cache is warmed by those before, at least by half of all."""
    first = max(len(routes) - tokens, len(routes) // 2 if slots else 0)
    cache = Cache(slots, routes.shape[1], experts)
    return _count(routes[:first] if slots else (), routes[first:], cache)


def read_routes(path: Path, option: str, layers: int, experts: int, k: int | None = None) -> Routes:
    """Recorded routes, a NumPy file of integers [positions, MoE layers, k], of any k where None is asked for.

    Raises UsageError, beginning with the option that named the file.
    """
    try:
        if other := no_file(path):
            raise UsageError(f"{option}: cannot read {path}: it is not a regular file but {other}")
        with open(path, "rb") as file:
            found = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{option}: cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError):  # what it says is for those who call NumPy
        raise UsageError(f"{option}: {path} is no NumPy file of integers, or not the whole of one") from None
    shape = (layers, *found.shape[2:]) if k is None else (layers, k)
    if found.ndim != 3 or found.dtype.kind not in "iu" or found.shape[1:] != shape or not found.size:
        raise UsageError(
            f"{option}: {path} holds {found.dtype} of shape {list(found.shape)}; wanted integers "
            f"[positions, {layers} MoE layers, {'k' if k is None else k} experts]"
        )
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= experts:
        raise UsageError(f"{option}: {path} names experts {low} to {high}; wanted ids from 0 to {experts - 1}")
    return np.asarray(found.astype(np.int64))


def load_routes(path: Path, layers: int, experts: int, k: int) -> Routes:
    """Recorded routes of a model with k experts a token, each token's ids ascending. Raises UsageError."""
    routes = np.sort(read_routes(path, "--routes", layers, experts, k), axis=2)
    if (twice := np.argwhere(routes[..., 1:] == routes[..., :-1])).size:
        position, layer = twice[0][:2].tolist()
        raise UsageError(f"--routes: {path}: position {position}, MoE layer {layer} names an expert twice")
    return routes


def uses(routes: Routes, experts: int) -> npt.NDArray[np.float64]:
    """How often each expert is used, [MoE layers, experts]."""
    return np.array([np.bincount(layer.ravel(), minlength=experts) for layer in routes.swapaxes(0, 1)], np.float64)


def counts(routes: Routes, experts: int, seed: int) -> npt.NDArray[np.float64]:
    """`uses`, where equals are ranked by chance, by less than one use."""
    used = uses(routes, experts)
    return np.asarray(used + np.random.default_rng([seed, 3]).random(used.shape))


def served(here: npt.NDArray[np.bool_], reads: Sequence[list[list[int]]]) -> float:
    """Part of the reads for which a drive with these copies could be asked; 0 when there are none."""
    asked = [here[row, e] for token in reads for row, experts in enumerate(token) for e in experts]
    return float(np.mean(asked)) if asked else 0.0
