"""The matrix on somebody's own checkpoint and drives: what can be varied there, and how much of it.

Nothing is copied and nothing is made: cells use the drives as they are. A drive is lost, and reads wait, by the doing
of the tests alone, in front of the real device. What runs learn is kept in a home of the session's own, which begins
with what the user's knows of the model and the drives.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from covering import Cell, Value
from matrix import Answer, Prompt, answer
from trouble import by_drive

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import manifest_path
from runtime.commands.drives import parse_drives
from runtime.generate import Engine
from runtime.generate.engine import default_backend, default_threads
from runtime.generate.record import settings
from runtime.home import home
from runtime.weights.layout import Drives, Layout
from runtime.weights.placement import MODEL, Placement

LIGHT_BYTES = 64_000_000
"""Of experts a token. What needs more gets fewer and shorter prompts."""

RELEASED_BYTES = json.loads((Path(__file__).parent.parent / "golden" / "k3-inventory.json").read_text())["all_nbytes"]
"""Of all tensors of the released checkpoint, as its index says."""

NO_MANIFEST = "no manifest: python -m runtime verify makes one"


@dataclass(frozen=True)
class Plain:
    """The baseline: what it answered, and what it says of itself."""

    answers: list[Answer]
    cache_bytes: int
    unit_bytes: int
    modes: dict[str, str]
    settings: dict[str, Any]


class Own:
    """A checkpoint and drives as they were named. Raises what is wrong with them, before anything is loaded."""

    def __init__(self, model: Path, drives: Sequence[str], backend: str | None, memory: int | None) -> None:
        self.model = model.absolute()
        self.layout = Layout(tuple((n, p.absolute()) for n, p in parse_drives(drives, ()).directories))
        self.backend, self.memory = backend or default_backend(), memory
        self.released = False
        with Checkpoint.open(self.model, experts_elsewhere=bool(self.layout.directories)) as checkpoint:
            self.config, self.fingerprint = checkpoint.config, checkpoint.fingerprint
            self.expert_nbytes = checkpoint.expert_nbytes
            self._manifest = manifest_path(checkpoint)
            self._home, self._probed = home(), home() / "drives.json"
            drives_there = Drives(checkpoint, self.layout)
            self.placement: Placement = drives_there.placement
            drives_there.close()
        index = json.loads((self.model / "model.safetensors.index.json").read_text())
        self.released = index.get("metadata", {}).get("total_size") == RELEASED_BYTES

    # -- what there is --

    @property
    def paths(self) -> dict[str, Path]:
        """Every directory that is read, by the name of its drive."""
        return {MODEL: self.model, **dict(self.layout.directories)}

    @property
    def prompts(self) -> list[Prompt]:
        """Drawn anywhere from the vocabulary, but for its last 256 ids, which are special."""
        chance = random.Random(0)
        token = self.expert_nbytes * len(self.config.moe_layers) * self.config.num_experts_per_token
        sizes = ((70, 8), (9, 8)) if token <= LIGHT_BYTES else ((9, 3),)
        ids = range(max(1, self.config.vocab_size - 256))
        return [Prompt(tuple(chance.choice(ids) for _ in range(rows)), new) for rows, new in sizes]

    def use_home(self, path: Path) -> None:
        """Begin the session's home with what the user's knows."""
        for known in (self._manifest, self._probed):
            if known.is_file():
                place = path / known.relative_to(self._home)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(known, place)

    # -- what can be varied --

    @cached_property
    def choices(self) -> list[tuple[str, Layout]]:
        """Drives that have every expert together: the fewest first, each time one more."""
        found = []
        for count in range(len(self.layout.directories) + 1):
            layout = Layout(self.layout.directories[:count])
            if self._held(list({MODEL, *dict(layout.directories)})).all():
                found.append((" + ".join([MODEL, *dict(layout.directories)]), layout))
        return found

    @cached_property
    def factors(self) -> dict[str, tuple[Value, ...]]:
        """Those that there are here, in the words of `matrix.FACTORS`; see `left_out`."""
        exact = self.backend in ("cpu", "reference")
        spare = any(self.expendable(layout) for _, layout in self.choices)
        checked = self._manifest.is_file()
        threads = (1, default_threads()) if self.backend == "cpu" and default_threads() > 1 else (1,)
        return {
            "drives": tuple(name for name, _ in self.choices),
            "lost": ("none", "one, mid-answer") if spare else ("none",),
            "delays": ("none", "random"),
            "cache": ("one top-k", "a quarter", "as planned"),
            "prefetch": ("off", "on", "random guesses"),
            "chunk": (1, 7, "whole") if exact else ("whole",),
            "threads": threads,
            "verify": ("off", "first") if checked else ("off",),
            "trace": ("off", "on"),
        }

    def left_out(self) -> dict[str, str]:
        """What is not varied here, and why."""
        said = {"the trunk, resident or streamed": "it is as the memory plan has it"}
        if len(self.choices) < 2:
            said["drives: other ones than these together"] = "no other choice of the drives has every expert"
        if len(self.factors["lost"]) < 2:
            said["a drive lost in the middle of an answer"] = "no drive whose experts others have, too"
        if len(self.factors["verify"]) < 2:
            said["reads compared with the manifest"] = NO_MANIFEST
        if len(self.factors["chunk"]) < 2:
            said["the prefill chunk"] = f"on {self.backend} a chunk may round otherwise"
        if len(self.factors["threads"]) < 2:
            said["the number of threads"] = (
                "one processor" if self.backend == "cpu" else f"{self.backend} has none of ours"
            )
        return said

    def allowed(self, cell: Cell) -> bool:
        """A drive is lost only where others have all it has."""
        return cell["lost"] == "none" or bool(self.expendable(dict(self.choices)[str(cell["drives"])]))

    def expendable(self, layout: Layout) -> list[str]:
        """Drives of these that hold something, and nothing alone: not the model's directory, which has the trunk."""
        names = [MODEL, *dict(layout.directories)]
        holders = {holder.name: holder for holder in self.placement.holders if holder.name in names}
        return [name for name in holders if name != MODEL and self._held([n for n in names if n != name]).all()]

    def _held(self, names: Sequence[str]) -> Any:
        """[MoE layers, experts] that one of these drives has."""
        here = [holder.here for holder in self.placement.holders if holder.name in names]
        return np.logical_or.reduce(here) if here else np.zeros(1, np.bool_)

    # -- as `matrix.Place` --

    def place(self, cell: Cell) -> tuple[Path, Layout]:
        return self.model, dict(self.choices)[str(cell["drives"])]

    def victims(self, cell: Cell, layout: Layout) -> Sequence[str]:
        return self.expendable(layout)

    def cache_bytes(self, size: str | int) -> int:
        plain, top_k = self.plain, self.config.num_experts_per_token * self.plain.unit_bytes
        return {"one top-k": top_k, "a quarter": max(top_k, plain.cache_bytes // 4), "as planned": plain.cache_bytes}[
            str(size)
        ]

    @contextmanager
    def prepare(self, cell: Cell) -> Iterator[None]:
        with by_drive(patient=False):
            yield

    # -- the baseline --

    @cached_property
    def plain(self) -> Plain:
        """All drives, the prompt in one chunk, the cache that fits, no guesses."""
        with (
            by_drive(patient=False),
            Engine.load(
                self.model, backend=self.backend, layout=self.layout, memory=self.memory, prefetch=False
            ) as engine,
        ):
            answers = [answer(engine.session(), prompt) for prompt in self.prompts]
            drives = engine.drives
            assert drives is not None
            return Plain(answers, engine.plan["expert_cache"], drives.unit_bytes, drives.counts()[2], settings(engine))
