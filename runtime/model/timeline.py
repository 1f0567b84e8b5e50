"""What the model's thread did when: a timeline, and the model that keeps one. The file is in docs/timeline.md.

Spans follow each other without gap or overlap: at each moment the thread is in one phase, so the spans of a pass add
up to the pass. A wait is told when it is over, and cuts its part out of the phase in which it happened. Reads go on in
other threads; they are in the log that a trace is made of.

Where arithmetic is put off until its result is needed, as MLX does, a span is what describing the work took, and what
had to be finished then: mostly routing, whose result decides what is read, and the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.drives.jobs import Key
from runtime.model.k3 import K3, Experts, Tap
from runtime.model.state import LayerState, State
from runtime.ops import Array, Ops, Weight
from runtime.progress import Pulse
from runtime.weights.prefetch import Prefetch
from runtime.weights.trunk import LayerWeights, Trunk

LIMIT = 1 << 17
"""Spans kept of a run: some thirty tokens of Kimi K3."""
SPAN_BYTES = 200
"""Memory of one of them."""

RESIDUAL, ATTENTION, ROUTING, LATENT = "residual", "attention", "routing", "latent"
SHARED, DENSE, LOOK_AHEAD, STORE = "shared", "dense", "look-ahead", "store"
EXPERT, HEAD, WAITING = "expert", "head", "waiting"
PHASES = (RESIDUAL, ATTENTION, ROUTING, STORE, LATENT, SHARED, LOOK_AHEAD, EXPERT, DENSE, HEAD, WAITING)
"""residual: mixes over depth, norms, sums, and whatever has no name of its own; store: asking for experts and keeping
them; latent: into the experts' space and back; look-ahead: what the next layer might route to."""


class Span(NamedTuple):
    """A phase from `began` to `ended`, by `time.monotonic`.

    layer: -1 behind the last one; expert: -1 for none; awaited: of a wait, what for (`drives.waits`), else "".
    """

    layer: int
    phase: str
    expert: int
    awaited: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """From beginning to end."""
        return self.ended - self.began


@dataclass
class Pass:
    """A pass of `rows` tokens behind `position` others. missing: spans for which there was no room."""

    position: int
    rows: int
    began: float
    ended: float = 0.0
    spans: list[Span] = field(default_factory=list)
    missing: int = 0

    @property
    def seconds(self) -> float:
        """From beginning to end."""
        return self.ended - self.began


class Timeline:
    """The passes of a run; their spans, as far as there is room for. For the thread that runs the model."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.passes: list[Pass] = []
        self._limit = self._room = limit
        self._layer, self._since = 0, 0.0
        self._stack: list[tuple[str, int, str]] = []

    @property
    def nbytes(self) -> int:
        """Memory of one that is full."""
        return self._limit * SPAN_BYTES

    @contextmanager
    def a_pass(self, position: int, rows: int) -> Iterator[None]:
        """The model computes `rows` tokens, beginning in layer 0."""
        self._layer, self._since = 0, time.monotonic()
        self.passes.append(Pass(position, rows, self._since))
        try:
            with self.phase(RESIDUAL):
                yield
        finally:
            self.passes[-1].ended = self._since

    @contextmanager
    def phase(self, phase: str, expert: int = -1) -> Iterator[None]:
        """The thread is in this phase; afterwards again in the one before. All of a look-ahead is one."""
        if self._stack and self._stack[-1][0] == LOOK_AHEAD:
            yield
            return
        self._turn(time.monotonic())
        self._stack.append((phase, expert, ""))
        try:
            yield
        finally:
            self._turn(time.monotonic())
            self._stack.pop()

    def enter(self, layer: int) -> None:
        """What comes now belongs to this layer; -1: to none."""
        self._turn(time.monotonic())
        self._layer = layer

    def waited(self, awaited: str, key: Key | None, began: float, ended: float) -> None:
        """A wait is over; outside of a pass it is none of ours."""
        if self._stack:
            expert = key[1] if isinstance(key, tuple) and isinstance(key[0], int) else -1
            self._turn(began)
            self._stack.append((WAITING, expert, awaited))
            self._turn(ended)
            self._stack.pop()

    def _turn(self, now: float) -> None:
        """The phase that was is over, or interrupted."""
        if self._stack and now > self._since:
            if self._room:
                self._room -= 1
                phase, expert, awaited = self._stack[-1]
                self.passes[-1].spans.append(Span(self._layer, phase, expert, awaited, self._since, now))
            else:
                self.passes[-1].missing += 1
            self._since = now


class TimedExperts:
    """An expert store, as the model sees it, that tells a timeline when the model has an expert and when it asks."""

    def __init__(self, store: Experts, timeline: Timeline) -> None:
        self._store, self._timeline = store, timeline
        self.release, self.end_of_token = store.release, store.end_of_token

    def plan(
        self, layer: int, ids: npt.NDArray[np.int64], pulse: Pulse | None = None
    ) -> Generator[tuple[int, Weight], None, None]:
        """As the store's own."""
        with self._timeline.phase(STORE):
            begun = self._store.plan(layer, ids, pulse)
        return self._each(begun)

    def _each(self, begun: Generator[tuple[int, Weight], None, None]) -> Generator[tuple[int, Weight], None, None]:
        with closing(begun):
            while True:
                with self._timeline.phase(STORE):
                    found = next(begun, None)
                if found is None:
                    return
                with self._timeline.phase(EXPERT, found[0]):
                    yield found


class TimedK3(K3):
    """The model, keeping a timeline. Its answers are the same."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        trunk: Trunk,
        experts: Experts,
        prefetch: Prefetch | None,
        timeline: Timeline,
    ) -> None:
        super().__init__(config, ops, trunk, TimedExperts(experts, timeline), prefetch)
        self.timeline = timeline

    def forward(
        self,
        ids: npt.NDArray[np.int64],
        state: State,
        *,
        logits: Literal["none", "last", "all"] = "last",
        tap: Tap | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Array | None:
        last = self.config.num_hidden_layers - 1

        def left(layer: int, h: Array) -> None:
            self.timeline.enter(layer + 1 if layer < last else -1)
            if tap is not None:
                tap(layer, h)

        with self.timeline.a_pass(state.length, len(ids)):
            return super().forward(ids, state, logits=logits, tap=left, cancelled=cancelled)

    def attention(self, layer: int, x: Array, w: LayerWeights, state: LayerState) -> tuple[Array, LayerState]:
        with self.timeline.phase(ATTENTION):
            return super().attention(layer, x, w, state)

    def route(self, x: Array, w: LayerWeights) -> tuple[npt.NDArray[np.int64], Array]:
        with self.timeline.phase(ROUTING):
            return super().route(x, w)

    def look_ahead(self, layer: int, sources: Sequence[Array]) -> npt.NDArray[np.int64] | None:
        with self.timeline.phase(LOOK_AHEAD):
            return super().look_ahead(layer, sources)

    def mlp(self, x: Array, w: LayerWeights, prefix: str) -> Array:
        with self.timeline.phase(DENSE if prefix == "mlp" else SHARED):
            return super().mlp(x, w, prefix)

    def latent_moe(self, layer: int, x: Array, w: LayerWeights, sources: Sequence[Array], pulse: Pulse) -> Array:
        with self.timeline.phase(LATENT):
            return super().latent_moe(layer, x, w, sources, pulse)

    def head(self, sources: Sequence[Array], last_only: bool) -> Array:
        with self.timeline.phase(HEAD):
            out = super().head(sources, last_only)
            self.ops.numpy(out)  # what was put off until now is done here, and not behind the pass
            return out
