"""The invariance matrix: an answer, computed in a cell of settings, must be the one computed plainly, bit for bit.

*Baseline*: the model directory alone, read plainly, one thread, the prompt in one chunk, everything cached, nothing
guessed. A *cell* has one value of each factor. In every cell the same ids and the same digest of the logits at each
step come out, and the books of reads and memory balance. `FACTORS` says what is varied; which cells are run is the
caller's choice.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
from copies import every, rewrite, write_experts
from covering import Cell, Factors, Pair, pairs, whole
from tabulate import tabulate
from trouble import Doings, by_drive, delayed, lost, trouble

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import Manifest, digest, manifest_path
from runtime.config import ModelConfig
from runtime.drives.crew import ReadCounts
from runtime.drives.trace import TraceLog
from runtime.generate import Engine, Session
from runtime.generate.plan import LONGEST_CHUNK
from runtime.home import home
from runtime.ops import cpu
from runtime.weights.division import EMBEDDING, LEAST_BLOCKS, Divider, Division
from runtime.weights.experts import ExpertStore
from runtime.weights.layout import Drives, Layout
from runtime.weights.placement import MODEL
from runtime.weights.prefetch import Prefetch

FACTORS: dict[str, tuple[str | int, ...]] = {
    "drives": (1, 2, 4),
    "placement": ("complete", "partial", "split"),
    "lost": ("none", "one, mid-answer"),
    "delays": ("none", "random"),
    "trunk": ("resident", "streamed"),
    "cache": ("one top-k", "a quarter", "all"),
    "prefetch": ("off", "on", "random guesses"),
    "chunk": (1, 7, 64, "whole"),
    "threads": (1, 2),
    "verify": ("off", "first"),
    "trace": ("off", "on"),
}
"""complete: each drive has every expert; partial: the model directory does, the others have half of them each; split:
the model directory has none, and no two drives have the same.
streamed: a part of the trunk is read in every pass."""

DELAY_S = 0.001
"""No read waits longer in a cell with delays."""

STREAMED = 16
"""Of so many matrices one is streamed."""

PART_BYTES = 1 << 14
"""What is worth a thread here: small models, too, are divided between two."""

Answer = list[tuple[int, str | None]]
"""(id, digest of the logits) of each step."""


def allowed(cell: Cell) -> bool:
    """There is such a thing: half of the experts take a second drive; a drive is lost only where others have all."""
    if cell["drives"] == 1 and cell["placement"] == "partial":
        return False
    return cell["lost"] == "none" or (cell["drives"] != 1 and cell["placement"] != "split")


def name_of(cell: Cell) -> str:
    """As a test's name."""
    return ", ".join(f"{name} {value}" for name, value in cell.items())


# -- where the experts are -----------------------------------------------------------------------------------------


class Place(Protocol):
    """Where a cell is run."""

    def place(self, cell: Cell) -> tuple[Path, Layout]:
        """(model directory, drives beside it) of a cell."""

    def victims(self, cell: Cell, layout: Layout) -> Sequence[str]:
        """The drives that others can do without."""

    def cache_bytes(self, size: str | int) -> int:
        """The budget of a cache."""

    def prepare(self, cell: Cell) -> AbstractContextManager[object]:
        """What has to be so while an engine is loaded and used."""


class Site:
    """A checkpoint and copies of its experts below a folder of its own; a file that is at several places is linked.

    Small experts are read by drive, too, no read is ever late, and little work is worth a thread.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self._files = write_experts(model, folder / "experts", every)
        self._bare = rewrite(model, folder / "bare", lambda name: ".experts." not in name)
        self._folder = folder / "drives"
        with Checkpoint.open(model) as checkpoint:
            config = checkpoint.config
            self.keys = [(layer, e) for layer in config.moe_layers for e in range(config.num_experts)]
            self._manifest = Manifest(checkpoint, "the tests")
            for layer, expert in self.keys:
                self._manifest.put(layer, expert, digest(memoryview(self._file(layer, expert).read_bytes())))
            drives = Drives(checkpoint, Layout())
            self.unit_bytes = drives.unit_bytes
            drives.close()
        self.top_k = config.num_experts_per_token

    def place(self, cell: Cell) -> tuple[Path, Layout]:
        count, placement = int(cell["drives"]), str(cell["placement"])
        names = [f"d{number}" for number in range(count if placement == "split" else count - 1)]
        paths = tuple((name, self._folder / f"{placement}-{count}" / name) for name in names)
        for number, (_, path) in enumerate(paths):
            if not path.exists():
                path.mkdir(parents=True)
                chance = random.Random(number)
                for index, (layer, expert) in enumerate(self.keys):
                    mine = {"complete": True, "partial": chance.random() < 0.5, "split": index % count == number}
                    if mine[placement]:
                        os.link(self._file(layer, expert), path / f"L{layer}-E{expert}.bin")
        return (self._bare if placement == "split" else self.model), Layout(paths)

    def victims(self, cell: Cell, layout: Layout) -> Sequence[str]:
        names = [name for name, _ in layout.directories]
        return names if cell["placement"] == "partial" or cell["trunk"] == "streamed" else [MODEL, *names]

    @contextmanager
    def prepare(self, cell: Cell) -> Iterator[None]:
        if cell["verify"] == "first":
            self.write_manifest(self.place(cell)[0])
        with by_drive(), mock.patch.object(cpu, "WORTH_A_THREAD", PART_BYTES), ExitStack() as stack:
            if cell["trunk"] == "streamed":
                stack.enter_context(mock.patch.object(Divider, "divide", _a_part))
            yield

    def cache_bytes(self, size: str | int) -> int:
        experts = {"one top-k": self.top_k, "a quarter": max(self.top_k, len(self.keys) // 4), "all": len(self.keys)}
        return experts[str(size)] * self.unit_bytes

    def write_manifest(self, model: Path) -> None:
        """Have the program's home know what the experts of this directory should be."""
        with Checkpoint.open(model, experts_elsewhere=True) as checkpoint:
            manifest = Manifest(checkpoint, self._manifest.made_from)
            manifest.take(self._manifest, self._manifest.known)
            manifest.save(manifest_path(checkpoint))

    def _file(self, layer: int, expert: int) -> Path:
        return self._files / f"L{layer}-E{expert}.bin"


def _a_part(divider: Divider, room_bytes: int) -> Division:
    """Whatever there is room for, some matrices are streamed."""
    return divider.streaming([EMBEDDING, *divider.order[::STREAMED]], LEAST_BLOCKS)


class Wild(Prefetch):
    """Guesses anything, for any layer."""

    def __init__(self, config: ModelConfig, store: ExpertStore, seed: int = 0) -> None:
        super().__init__(config, store)
        self._chance, self._experts = random.Random(seed), config.num_experts

    def guess(self, layer: int, ahead: Any) -> None:
        experts = self._chance.sample(range(self._experts), min(12, self._experts))
        self._store.hint(self._chance.choice(self._layers), experts, self._chance.random())


class Noting(Prefetch):
    """Guesses nothing, and notes what each layer of each pass wants: (layer, experts)."""

    def __init__(self, config: ModelConfig, store: ExpertStore) -> None:
        super().__init__(config, store)
        self.routes: list[tuple[int, list[int]]] = []

    def routed(self, layer: int, ids: Any) -> None:
        self.routes.append((layer, np.unique(ids).tolist()))

    def guess(self, layer: int, ahead: Any) -> None:
        pass


class Foreseeing(Noting):
    """Knows what will be wanted next, and is sure of it."""

    def __init__(self, config: ModelConfig, store: ExpertStore, routes: list[tuple[int, list[int]]]) -> None:
        super().__init__(config, store)
        self._foreseen = routes

    def guess(self, layer: int, ahead: Any) -> None:
        assert self.routes[-1] == self._foreseen[len(self.routes) - 1]
        for after, experts in self._foreseen[len(self.routes) : len(self.routes) + 1]:
            self._store.hint(after, experts, 1.0)


# -- a run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """Ids, and how many tokens follow them. Nothing stops an answer early."""

    ids: tuple[int, ...]
    new: int


def answer(session: Session, prompt: Prompt, after_first: Callable[[], None] = lambda: None) -> Answer:
    """What follows a prompt; `after_first` is called between the first token and the second."""
    said: Answer = []
    for step in session.generate(prompt.ids, prompt.new, logits_hash=True, stop_ids=()):
        said.append((step.token_id, step.logits_sha256))
        if len(said) == 1:
            after_first()
    return said


def baseline(model: Path, prompts: Sequence[Prompt], backend: str = "cpu") -> list[Answer]:
    """The answers that all others must equal."""
    with Engine.load(model, backend=backend, threads=1, prefetch=False) as engine:
        return [answer(engine.session(), prompt) for prompt in prompts]


@contextmanager
def opened(there: Place, cell: Cell, backend: str = "cpu", seed: int = 0) -> Iterator[tuple[Engine, Doings, str]]:
    """(an engine as the cell says, what its drives do, the drive to be lost or "")."""
    model, layout = there.place(cell)
    chunk, tracing = cell["chunk"], cell["trace"] == "on"
    with ExitStack() as stack:
        stack.enter_context(there.prepare(cell))
        doings = stack.enter_context(trouble())
        engine = stack.enter_context(
            Engine.load(
                model,
                backend=backend,
                threads=int(cell["threads"]) if backend == "cpu" else None,
                chunk=LONGEST_CHUNK if chunk == "whole" else int(chunk),
                expert_cache=there.cache_bytes(cell["cache"]),
                layout=layout,
                trace=TraceLog() if tracing else None,
                verify_reads="first" if cell["verify"] == "first" else "off",
                prefetch=cell["prefetch"] != "off",
            )
        )
        if cell["prefetch"] == "random guesses" and engine.model.prefetch is not None:
            engine.model.prefetch = Wild(engine.config, engine.experts, seed)
        if cell["delays"] == "random":
            doings |= {name: delayed(seed + n, DELAY_S) for n, name in enumerate([MODEL, *dict(layout.directories)])}
        victims = [] if cell["lost"] == "none" else there.victims(cell, layout)
        yield engine, doings, random.Random(seed).choice(victims) if victims else ""


def run(
    there: Place, cell: Cell, prompts: Sequence[Prompt], wanted: Sequence[Answer], backend: str = "cpu", seed: int = 0
) -> dict[str, ReadCounts]:
    """Run prompts in a cell, one after the other on one engine; AssertionError says what does not hold.

    Returns what was read, by drive.
    """
    with opened(there, cell, backend, seed) as (engine, doings, victim):

        def lose() -> None:
            doings[victim] = lost

        for number, (prompt, plain) in enumerate(zip(prompts, wanted, strict=True)):
            session = engine.session()
            said = answer(session, prompt, lose if victim and number == 0 else lambda: None)
            check_same(said, plain, f"prompt {number} of {len(prompt.ids)} tokens")
            assert session.prefill.rows == len(prompt.ids)
            assert session.prefill.expert_reads <= session.prefill.distinct_experts, "the prefill reads some twice"
        check_settings(engine, cell)
        check_books(engine, victim)
        assert engine.drives is not None
        return engine.drives.counts()[0]


def run_foreseen(site: Site, prompt: Prompt, backend: str = "cpu") -> None:
    """With guesses that are all right and a cache that holds everything, each expert is read once, guessed or not."""
    cell: Cell = {name: values[0] for name, values in FACTORS.items()}
    cell |= {"drives": 2, "delays": "random", "cache": "all", "prefetch": "on"}
    routes: list[tuple[int, list[int]]] = []
    for foresight in (False, True):
        with opened(site, cell, backend) as (engine, doings, _):
            doings |= {name: delayed(n, 5 * DELAY_S) for n, name in enumerate(doings)}  # for some to be under way
            known = Foreseeing(engine.config, engine.experts, routes)
            engine.model.prefetch = noted = known if foresight else Noting(engine.config, engine.experts)
            answer(engine.session(), prompt)
            routes = noted.routes
            check_books(engine)
            assert engine.drives is not None
            kinds = engine.drives.counts()[1]
            read = sum(kinds[kind].requested_bytes for kind in ("demand", "prefetch") if kind in kinds)
            distinct = {(layer, e) for layer, experts in routes for e in experts}
            assert read == len(distinct) * engine.checkpoint.expert_nbytes, "some were read twice"
            assert (engine.experts.stats.guesses.issued > 0) == foresight


# -- what must hold ------------------------------------------------------------------------------------------------


def check_same(said: Answer, plain: Answer, where: str) -> None:
    """The same ids and digests."""
    for step, (got, want) in enumerate(zip(said, plain, strict=True)):
        assert got[0] == want[0], f"{where}: token {step} is {got[0]}, in the baseline {want[0]}"
        assert got[1] == want[1], f"{where}: token {step} is the same, the bits of its logits are not"


def check_settings(engine: Engine, cell: Cell) -> None:
    """What the engine says of itself is what the cell asks for."""
    assert engine.checks.mode == cell["verify"]
    if "trunk" in cell:  # else it is as the plan has it
        assert (engine.model.trunk.streamed_bytes > 0) == (cell["trunk"] == "streamed")
    guesses = cell["prefetch"] != "off" and cell["cache"] != "one top-k"
    assert (engine.prefetch == "on") == guesses or engine.experts.guess_limit < 1, engine.prefetch
    assert engine.chunk == min(engine.context, LONGEST_CHUNK if cell["chunk"] == "whole" else int(cell["chunk"]))


def check_books(engine: Engine, victim: str = "") -> None:
    """At rest: every byte that was read is in one account, every buffer is somebody's, nothing failed but what was
    made to, and without a failure or a late read nothing was read twice. `victim`: the drive that was lost, if any."""
    drives, stats, guesses = engine.drives, engine.experts.stats, engine.experts.stats.guesses
    assert drives is not None
    reader = drives.reader
    assert reader is not None
    if engine.model.trunk.stream is not None:
        engine.model.trunk.stream.close()
    for _ in range(4000):
        if reader.idle:
            break
        time.sleep(0.005)
    reader.audit()
    assert stats.peak_bytes <= engine.experts.budget_bytes
    held = reader.pool.in_use
    assert held <= stats.bytes_held if victim else held == stats.bytes_held, "a buffer is nobody's"
    assert stats.hits + stats.misses == stats.wanted
    assert all(nbytes >= 0 for nbytes in (*asdict(guesses).values(), guesses.open))
    counts, kinds, _ = drives.counts()
    read = sum(kinds[kind].requested_bytes for kind in ("demand", "prefetch") if kind in kinds)
    for count in counts.values():
        blocks = 2 * drives.alignment * count.reads
        assert count.requested_bytes <= count.device_bytes <= count.requested_bytes + blocks
    assert read >= stats.bytes_read + guesses.wasted
    if not victim and not any(count.hedges or count.retries for count in counts.values()):
        assert read <= stats.bytes_read + guesses.cancelled + guesses.wasted + guesses.open, "some were read twice"
    for name, count in counts.items():
        assert name == victim or count.errors == 0, f"reads from {name} failed"
    if drives.trace is not None:
        slices = sum(count.reads + count.errors for kind, count in kinds.items() if kind != "check")
        assert drives.trace.write(home() / "trace.csv", {}) == (slices, 0)


# -- what was covered ----------------------------------------------------------------------------------------------


@dataclass
class Coverage:
    """What was run, by checkpoint and backend, for the table."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def add(self, checkpoint: str, backend: str, cell: Cell, prompts: Sequence[Prompt]) -> None:
        """A cell has been run, and everything in it was equal."""
        row = self.rows.setdefault((checkpoint, backend), Row())
        row.cells.append(cell)
        row.prompts += len(prompts)
        row.digests += sum(prompt.new for prompt in prompts)

    def told(self) -> list[dict[str, Any]]:
        """As plain values, for `hear` in another process."""
        return [{"of": of, **asdict(row)} for of, row in self.rows.items()]

    def hear(self, told: list[dict[str, Any]]) -> None:
        """Count what another process has run, too."""
        for row in told:
            mine = self.rows.setdefault(tuple(row["of"]), Row())
            mine.cells += row["cells"]
            mine.prompts += row["prompts"]
            mine.digests += row["digests"]

    def table(self) -> str:
        """For people, or "" where nothing was run: each row, then how often each value occurred."""
        if not self.rows:
            return ""
        about = self.record(FACTORS, allowed)
        head = ("checkpoint", "backend", "cells", "pairs of values", "prompts", "tokens and digests equal")
        lines = [
            (*names, len(row.cells), f"{len(row.pairs)} of {about['possible_pairs']}", row.prompts, row.digests)
            for names, row in self.rows.items()
        ]
        lines.append(("all", "", about["cells"], "", about["prompts"], about["digests"]))
        used = [
            (factor, ", ".join(f"{value}: {count}" for value, count in values.items()))
            for factor, values in about["factors"].items()
        ]
        return f"{tabulate(lines, head)}\n\n{tabulate(used, ('factor', 'value: cells'))}"

    def record(self, factors: Factors, allowed: Callable[[Cell], bool]) -> dict[str, Any]:
        """In numbers, over all checkpoints; the pairs of the one with the most."""
        possible = whole(factors, allowed)
        cells = [cell for row in self.rows.values() for cell in row.cells]
        return {
            "cells": len(cells),
            "possible_cells": len(possible),
            "pairs": max((len(row.pairs) for row in self.rows.values()), default=0),
            "possible_pairs": len({pair for cell in possible for pair in pairs(cell)}),
            "prompts": sum(row.prompts for row in self.rows.values()),
            "digests": self.digests,
            "factors": {
                factor: {str(value): sum(cell[factor] == value for cell in cells) for value in values}
                for factor, values in factors.items()
            },
        }

    @property
    def digests(self) -> int:
        """Steps compared in all."""
        return sum(row.digests for row in self.rows.values())


@dataclass
class Row:
    """Of one checkpoint and backend: the cells, the prompts run in them, the steps compared."""

    cells: list[Cell] = field(default_factory=list)
    prompts: int = 0
    digests: int = 0

    @property
    def pairs(self) -> set[Pair]:
        """Those that occur in the cells."""
        return {pair for cell in self.cells for pair in pairs(cell)}
