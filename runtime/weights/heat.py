"""How often each expert is wanted, learned over all runs of a model: advice for the cache and for copies.

An expert counts once for a pass that wants it, however many rows do. Counts fade with a half-life, so that what is
learned follows what is asked. They are kept in `heat/FINGERPRINT.safetensors` of the program's home, written whole
when an engine closes, and from time to time, by a thread of its own, so that no token waits for it. Runs at the same
time add up: what a run has counted is added to what is in the file by then; of two that write in the same moment, the
later one's counts are kept. A pass that is cancelled counts for nothing.

Nothing here is ever needed: what cannot be read is as good as nothing learned, what cannot be written is lost, and
`note` says so, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.arrays import read_arrays, write_arrays
from runtime.errors import CheckpointError
from runtime.home import home

HALF_LIFE = 8192
"""Passes after which a count is worth half."""

DOUBT = 32
"""Passes that want nothing, added to those there were: a few passes say little."""

SAVE_AFTER_S = 60.0
"""A long run saves what it has learned so often."""

FORMAT = "expertstream.heat/1"

_FADE = 0.5 ** (1 / HALF_LIFE)

Table = npt.NDArray[np.float64]


class Heat:
    """What is known of a model's experts.

    `counts` [MoE layers, experts]: passes that wanted each expert, and `passes`: all of them, both faded. `note`: what
    was wrong with the file, for a person, or "".
    """

    def __init__(self, path: Path, fingerprint: str, layers: Sequence[int], experts: int) -> None:
        self.path, self.note = path, ""
        self.counts: Table = np.zeros((len(layers), experts))
        self.passes = 0.0
        self._words = {"format": FORMAT, "fingerprint": fingerprint}
        self._rows = {layer: row for row, layer in enumerate(layers)}
        self._pass: dict[int, npt.NDArray[np.int64]] = {}
        self._own: Table = np.zeros_like(self.counts)
        self._own_passes, self._unsaved, self._saved_at = 0.0, 0, time.monotonic()
        self._writer: threading.Thread | None = None
        self._wrote: tuple[Table, float, int] = self._own, 0.0, 0
        """Of the last writer: what is in the file, or what it could not add to it; (counts, passes, unsaved)."""

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Heat:
        """What is known of the checkpoint's experts: nothing where there is no file, or none that makes sense."""
        config, fingerprint = checkpoint.config, checkpoint.fingerprint
        path = home() / "heat" / f"{fingerprint}.safetensors"
        heat = cls(path, fingerprint, config.moe_layers, config.num_experts)
        heat.counts, heat.passes = heat._read()
        return heat

    def want(self, layer: int, chosen: npt.NDArray[np.int64]) -> None:
        """This pass wants these distinct experts of a layer. Layers come in their order: else it is another pass, and
        the last one was not completed."""
        row = self._rows[layer]
        if row <= max(self._pass, default=-1):
            self._pass.clear()
        self._pass[row] = chosen

    def end_of_pass(self) -> None:
        """A pass through all layers is complete."""
        for row, chosen in self._pass.items():
            self.counts[row, chosen] += 1
            self._own[row, chosen] += 1
        self._pass.clear()
        self.counts *= _FADE
        self._own *= _FADE
        self.passes = (self.passes + 1) * _FADE
        self._own_passes = (self._own_passes + 1) * _FADE
        self._unsaved += 1
        if time.monotonic() - self._saved_at > SAVE_AFTER_S and (self._writer is None or not self._writer.is_alive()):
            self._settle()
            self._begin()

    def shares(self, rows: Any, experts: Any) -> Table:
        """The share of passes that want these experts, cautiously; `rows` of `counts`."""
        share: Table = self.counts[rows, experts] / (self.passes + DOUBT)
        return share

    def save(self) -> None:
        """Add what this run has counted to the file, and wait for it. Never raises for one that cannot be written."""
        self._settle()
        if self._unsaved:
            self._begin()
            self._settle()

    def _begin(self) -> None:
        """Have a thread add what was counted to the file."""
        self._saved_at = time.monotonic()
        self._wrote = self._own, self._own_passes, self._unsaved
        self._own, self._own_passes, self._unsaved = np.zeros_like(self._own), 0.0, 0
        writer = threading.Thread(target=self._write, args=self._wrote, name="heat")
        try:
            writer.start()
        except RuntimeError:  # the system has no thread more
            self._write(*self._wrote)
        self._writer = writer

    def _settle(self) -> None:
        """Wait for the thread. What it has written, this run goes on from; what it could not, it still has to add."""
        if self._writer is None:
            return
        if self._writer.ident is not None:  # it was begun
            self._writer.join()
        self._writer = None
        counts, passes, unsaved = self._wrote
        fade = _FADE**self._unsaved
        counts, passes = counts * fade + self._own, passes * fade + self._own_passes
        if unsaved:
            self._own, self._own_passes, self._unsaved = counts, passes, unsaved + self._unsaved
        else:
            self.counts, self.passes = counts, passes

    def _write(self, own: Table, own_passes: float, unsaved: int) -> None:
        """On the thread: add to the file, and say so in `_wrote`."""
        before, passes = self._read()
        fade = _FADE**unsaved
        counts, passes = before * fade + own, passes * fade + own_passes
        try:
            write_arrays(self.path, {"counts": counts, "passes": np.array([passes])}, self._words)
            self._wrote = counts, passes, 0
        except OSError as error:
            why = error.strerror or error
            self.note = self.note or f"how often experts are used cannot be kept: {self.path}: {why}"

    def _read(self) -> tuple[Table, float]:
        """(counts, passes) of the file; zeros where it cannot be read, and a note where there is one."""
        nothing = np.zeros_like(self.counts), 0.0
        try:
            if not self.path.exists():
                return nothing
            arrays, words = read_arrays(self.path)
            counts, passes = arrays["counts"], arrays["passes"]
        except (OSError, CheckpointError, KeyError) as error:
            return self._unusable(str(error), nothing)
        if not self._words.items() <= words.items():
            return self._unusable("it is of another format or model", nothing)
        right = counts.dtype == passes.dtype == np.float64 and counts.shape == self.counts.shape and passes.size == 1
        if not right or not all((np.isfinite(a) & (a >= 0)).all() for a in (counts, passes)):
            return self._unusable("its numbers make no sense", nothing)
        return counts, float(passes.sum())

    def _unusable(self, why: str, nothing: tuple[Table, float]) -> tuple[Table, float]:
        why = why if str(self.path) in why else f"{self.path}: {why}"
        self.note = self.note or f"what is known of the experts cannot be used, and is learned anew: {why}"
        return nothing
