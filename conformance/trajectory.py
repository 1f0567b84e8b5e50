"""One run of a model, pass by pass: a prompt at once, then greedy tokens one by one, every layer looked at.

The reference run decides the tokens; another implementation is fed the same ones. If it agrees on the largest
logit at every step, its own greedy run is the same run.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from shapes import SEEDS, SHAPES, write_checkpoint

from runtime.generate import Engine

PROMPT = 24
"""Tokens of the prompt."""

GREEDY = 64
"""Tokens generated after it."""

TOLERANCE = 1e-4
"""Of every layer output and of the logits, relative to the largest value in it."""

ROUTER_MARGIN = 1e-4
"""The least distance between the last expert chosen and the first one not, for a seed to be usable."""

LOGIT_MARGIN = 1e-3
"""The same between the two largest logits, relative to the largest: more than twice the tolerance."""


@dataclass
class Pass:
    """What one call gave: per layer the running sum h [T, H] as it leaves the layer, and the logits [T, V]."""

    layers: list[npt.NDArray[Any]] = field(default_factory=list)
    logits: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))


Feed = Callable[[npt.NDArray[np.int64]], Pass]
"""Runs the next tokens of a sequence."""


@dataclass
class Trajectory:
    """A finished run: the calls' tokens, what they gave, and how close its closest decisions were."""

    fed: list[npt.NDArray[np.int64]]
    passes: list[Pass]
    router_margin: float
    logit_margin: float

    def require_margins(self) -> None:
        """Fail unless every decision is clear enough for other arithmetic to make it alike."""
        clear = self.router_margin >= ROUTER_MARGIN and self.logit_margin >= LOGIT_MARGIN
        assert clear, (
            f"this seed makes no test: its closest choice of experts has a margin of {self.router_margin:.1e} "
            f"(needs {ROUTER_MARGIN:.0e}), of a token {self.logit_margin:.1e} (needs {LOGIT_MARGIN:.0e}); "
            "find another with `python conformance/trajectory.py`"
        )

    @property
    def clearness(self) -> float:
        """The smaller of the two margins, in units of what is needed."""
        return min(self.router_margin / ROUTER_MARGIN, self.logit_margin / LOGIT_MARGIN)


def feed_engine(engine: Engine) -> Feed:
    """A new sequence on one of our backends."""
    state = engine.model.new_state(PROMPT + GREEDY)

    def feed(ids: npt.NDArray[np.int64]) -> Pass:
        seen = Pass()
        to_numpy = engine.ops.numpy
        logits = engine.model.forward(ids, state, logits="all", tap=lambda _, h: seen.layers.append(to_numpy(h)))
        seen.logits = to_numpy(logits)
        return seen

    return feed


def reference_run(engine: Engine, prompt: npt.NDArray[np.int64]) -> Trajectory:
    """Run the reference over `prompt` and GREEDY choices, and note the margins of its decisions."""
    watch = _RouterWatch(engine.ops)
    engine.model.ops = watch
    feed = feed_engine(engine)
    run = Trajectory([], [], math.inf, math.inf)
    ids = prompt
    for _ in range(GREEDY):
        run.fed.append(ids)
        run.passes.append(feed(ids))
        logits = run.passes[-1].logits[-1]
        second, first = np.sort(logits)[-2:]
        run.logit_margin = min(run.logit_margin, float((first - second) / np.abs(logits).max()))
        ids = np.array([np.argmax(logits)])
    run.router_margin = watch.margin
    return run


def assert_same_run(feed: Feed, wanted: Trajectory) -> float:
    """Feed the run's tokens; every layer and the logits within TOLERANCE, every choice the same.

    Returns the largest relative error.
    """
    worst = 0.0
    for step, (ids, there) in enumerate(zip(wanted.fed, wanted.passes, strict=True)):
        here = feed(ids)
        assert len(here.layers) == len(there.layers)
        named = [*(f"layer {i}" for i in range(len(there.layers))), "logits"]
        pairs = zip([*here.layers, here.logits], [*there.layers, there.logits], strict=True)
        for name, (a, b) in zip(named, pairs, strict=True):
            assert a.shape == b.shape
            error = relative_error(a, b)
            assert error <= TOLERANCE, f"{name} of pass {step} ({len(ids)} tokens) is off by {error:.1e}"
            worst = max(worst, error)
        assert np.argmax(here.logits[-1]) == np.argmax(there.logits[-1]), f"pass {step} chooses another token"
    return worst


def relative_error(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """The largest difference over the largest value of b."""
    return float(np.abs(a - b).max() / np.abs(b).max())


class _RouterWatch:
    """The reference's arithmetic, noting how far the first expert not chosen was from the last one chosen."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.margin = math.inf

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(self, logits: Any, bias: Any, k: int, renormalize: bool, scaling: float) -> Any:
        choice = np.sort(self._ops.numpy(self._ops.sigmoid(logits) + bias), axis=1)[:, ::-1]
        if k < choice.shape[1]:
            self.margin = min(self.margin, float((choice[:, k - 1] - choice[:, k]).min()))
        return self._ops.route(logits, bias, k, renormalize, scaling)


_DIRECTORY = tempfile.TemporaryDirectory(prefix="expertstream-shapes-")


@cache
def reference(name: str) -> tuple[Path, Trajectory]:
    """The shape's checkpoint and its reference run, made once per process."""
    path = Path(_DIRECTORY.name) / name
    return path, _attempt(name, SEEDS[name], path)


def _attempt(name: str, seed: int, path: Path) -> Trajectory:
    write_checkpoint(name, seed, path)
    engine = Engine.load(path, backend="reference", context=PROMPT + GREEDY)
    return reference_run(engine, make_prompt(seed, engine.config.vocab_size))


def make_prompt(seed: int, vocab_size: int) -> npt.NDArray[np.int64]:
    """The prompt that goes with a seed."""
    return np.random.default_rng(seed).integers(0, vocab_size, PROMPT)


def find_seed(name: str, enough: float = 2.0, tries: int = 100) -> tuple[int, Trajectory]:
    """The first seed whose closest decision is `enough` times clearer than needed."""
    for seed in range(tries):
        run = _attempt_in_passing(name, seed)
        if run.clearness >= enough:
            return seed, run
    raise SystemExit(f"none of {tries} seeds makes {name} clear: ask for less, or for fewer tokens")


def _attempt_in_passing(name: str, seed: int) -> Trajectory:
    with tempfile.TemporaryDirectory() as path:
        return _attempt(name, seed, Path(path))


if __name__ == "__main__":
    for shape in sys.argv[1:] or SHAPES:
        seed, run = find_seed(shape)
        distinct = len({int(ids[-1]) for ids in run.fed[1:]})
        print(
            f'    "{shape}": {seed},  # router {run.router_margin:.1e}, logits {run.logit_margin:.1e}, '
            f"{distinct} different tokens",
            flush=True,
        )


def same_weight(a: Any, b: Any) -> bool:
    """Whether two weights of one backend, in its own form, have the same bits."""
    if isinstance(a, tuple):
        return all(same_weight(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "array"):
        return same_weight(a.array, b.array) and same_weight(a.scales, b.scales)
    return a.shape == b.shape and bool((a == b).all()) if hasattr(a, "shape") else a == b
