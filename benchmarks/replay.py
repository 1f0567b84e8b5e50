"""The expert store alone, no model and no arithmetic: does it read as fast as the drives can?

    python -m benchmarks.replay --model DIR [--drive NAME=PATH] [--simulate-drive NAME=400MB/s] [--routes FILE.npy]

Replays routes, recorded or drawn, with no expert kept between tokens (`--expert-cache off`): a layer's experts are
asked for, each is given back as soon as it lands, and only when all of them have been is the next layer's barrier
asked for, as in a model that computes in no time. With `--ahead N` the next N barriers are asked for already, which
no model could do, to show what the pause between barriers costs.

By turns with it the ceiling is measured as `drives probe` does: readers that do nothing else, no barrier, at the depth
that is best here, on the same experts, as often as the routes ask for them, since what is asked for often may be in
the memory of a drive. What counts is the median of the ratios of neighbours: the disk is shared with others. Beside it
stands what others do not change: the part of the time in which something was being read from each drive.

Recorded routes are [positions, MoE layers, k]. Where the checkpoint has fewer layers or experts than the recording, its
rows (position, layer) are replayed in their order against the layers there are, ids are taken modulo the number of
experts, and those that coincide in a row are read once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle, pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.cli.ending import end
from runtime.commands.drives import parse_drives
from runtime.drives.crew import ReadRecord
from runtime.drives.device import Device, DeviceError
from runtime.drives.probe import BLOCK_BYTES, DEPTHS, measure
from runtime.drives.trace import TraceLog
from runtime.errors import ExpertstreamError, StorageError, UsageError
from runtime.forecast import Usage
from runtime.weights.experts import ExpertStore, staging_floor
from runtime.weights.layout import PLAIN_BYTES, Drives, Layout
from runtime.weights.placement import Holder

SCHEMA = "expertstream.replay/1"
SECONDS, TURN_S = (0.0, 86400.0), (0.01, 600.0)
"""The least and the most that may be asked for."""
DEPTH_ROUNDS = 5

Row = tuple[int, npt.NDArray[np.int64]]
"""A layer and the distinct experts a token asks it for."""


class Routes:
    """What tokens ask for, from a file or drawn. Raises UsageError for a file that holds no routes."""

    def __init__(self, checkpoint: Checkpoint, path: Path | None) -> None:
        config = checkpoint.config
        self.layers, self.experts = config.moe_layers, config.num_experts
        self.usage = Usage(len(self.layers), self.experts, config.num_experts_per_token)
        self.recorded = None if path is None else self._load(path)

    def _load(self, path: Path) -> npt.NDArray[np.int64]:
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UsageError(f"--routes: {path} cannot be read: {error}") from None
        if found.ndim != 3 or not found.size or found.dtype.kind not in "iu" or found.min() < 0:
            raise UsageError(
                f"--routes: {path} is {found.dtype} {list(found.shape)}: wanted ids [positions, MoE layers, k]"
            )
        return np.asarray(found.reshape(-1, found.shape[-1]).astype(np.int64) % self.experts)

    def rows(self, stream: int) -> Iterator[Row]:
        """Barriers without end. Each stream of drawn ones is a text of its own, over the same popular experts."""
        if self.recorded is None:
            for token in self.usage.tokens(stream):
                yield from zip(self.layers, token, strict=True)
        else:
            for layer, ids in zip(cycle(self.layers), cycle(self.recorded), strict=False):
                yield layer, np.unique(ids)


class Routed:
    """Where a drive is read to find its ceiling, a probe's `Room`: the experts it holds of those that rows name."""

    def __init__(self, device: Device, holder: Holder, layers: Sequence[int], rows: Iterator[Row]) -> None:
        self.device = device
        expert_bytes = holder.span(*self._first(holder, layers)).length
        if expert_bytes < PLAIN_BYTES:
            raise UsageError(
                f"experts of {expert_bytes:,} bytes are too small to measure a drive with: name a larger model"
            )
        self.block_bytes = min(BLOCK_BYTES, expert_bytes - device.alignment)
        here = dict(zip(layers, holder.here, strict=True))
        self._spans = (holder.span(layer, e) for layer, ids in rows for e in ids.tolist() if here[layer][e])
        self._blocks = self._cut()
        self._lock = threading.Lock()

    @staticmethod
    def _first(holder: Holder, layers: Sequence[int]) -> tuple[int, int]:
        row, expert = np.argwhere(holder.here)[0].tolist()
        return layers[row], expert

    def _cut(self) -> Iterator[tuple[str, int]]:
        grain = self.device.alignment
        for span in self._spans:
            begin, end = -(-span.offset // grain) * grain, span.offset + span.length
            for at in range(begin, end - self.block_bytes + 1, self.block_bytes):
                yield span.file, at

    def take(self) -> tuple[str, int]:
        """(file, offset) of the next block."""
        with self._lock:
            return next(self._blocks)


class NoOps:
    """Arithmetic that does nothing: an expert is its bytes."""

    name = "none"

    def expert(self, packed: PackedExpert) -> PackedExpert:
        """As it came."""
        return packed

    def busy(self, expert: PackedExpert) -> bool:
        """Nothing is computed."""
        return False


class Watch(TraceLog):
    """Of each read only when it began and when it ended, by drive."""

    def __init__(self) -> None:
        super().__init__(limit=1)
        self.reads: dict[str, list[tuple[float, float]]] = {}

    def slice(self, trace: ReadRecord) -> None:
        """A read has ended."""
        self.reads.setdefault(trace.slice.drive, []).append((trace.started, trace.landed))

    def busy_s(self) -> dict[str, float]:
        """Seconds in which something was being read, by drive."""
        return {drive: covered(reads) for drive, reads in self.reads.items()}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of these stretches of time."""
    total, end = 0.0, -inf
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


@dataclass(frozen=True)
class Stretch:
    """A stretch of replay; of each barrier its bytes and seconds, from when it was asked for with none ahead.

    busy: the part of the time in which something was being read, the mean over the drives.
    """

    nbytes: int
    seconds: float
    busy: float
    barriers: tuple[tuple[int, float], ...]

    @property
    def rate(self) -> float:
        """Bytes/s, the pauses between barriers included."""
        return self.nbytes / self.seconds


class Replay:
    """The store over drives, and the ceiling of these drives."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, routes: Routes, ahead: int = 0) -> None:
        self.checkpoint, self.ahead, self._rows = checkpoint, ahead, routes.rows(0)
        self._watch = Watch()
        self.drives = Drives(checkpoint, layout, self._watch)
        try:
            self._rooms = [
                Routed(device, holder, routes.layers, routes.rows(stream))
                for stream, (device, holder) in enumerate(self.drives.opened, 1)
            ]
        except BaseException:
            self.drives.close()
            raise
        budget = (1 + ahead) * staging_floor(checkpoint, self.drives.unit_bytes)
        self._reads = self.drives.start(budget)
        self._store = ExpertStore(checkpoint, NoOps(), budget, reuse=False, reads=self._reads)  # type: ignore[arg-type]

    def close(self) -> None:
        """Stop reading."""
        self.drives.close()

    # --- the ceiling ---

    def find_depths(self, depths: Sequence[int], seconds: float) -> dict[str, int]:
        """The depth at which each drive does best alone, by the median of a few measurements of each."""
        best = {}
        for room in self._rooms:
            rates: dict[int, list[float]] = {depth: [] for depth in depths}
            for depth in [*depths] * DEPTH_ROUNDS:
                rates[depth].append(self._rate([room], {room.device.name: depth}, seconds))
            best[room.device.name] = max(depths, key=lambda depth: statistics.median(rates[depth]))
        return best

    def ceiling(self, depths: Mapping[str, int], seconds: float) -> float:
        """Bytes/s of all drives together."""
        return self._rate(self._rooms, depths, seconds)

    @staticmethod
    def _rate(rooms: Sequence[Routed], depths: Mapping[str, int], seconds: float) -> float:
        try:
            found = measure(rooms, depths, inf, seconds)
        except DeviceError as error:
            raise StorageError(f"the ceiling cannot be measured: {error}") from None
        if found[0].refused:
            raise UsageError(f"there is no ceiling to compare with: {found[0].refused}")
        return sum(ceiling.rate or 0.0 for ceiling in found)

    # --- the store ---

    def stretch(self, seconds: float) -> Stretch:
        """Replay for about so long, whole barriers."""
        turn: Callable[[float], Iterator[int]] = self._look_ahead if self.ahead else self._one_by_one
        barriers: list[tuple[int, float]] = []
        self._watch.reads.clear()
        began = last = time.monotonic()
        for width in turn(began + seconds):
            now = time.monotonic()
            barriers.append((width * self.checkpoint.expert_nbytes, now - last))
            last = now
        busy = sum(self._watch.busy_s().values()) / len(self._rooms) / (last - began)
        return Stretch(sum(nbytes for nbytes, _ in barriers), last - began, busy, tuple(barriers))

    def _one_by_one(self, until: float) -> Iterator[int]:
        """As the model does it; yields the width of each barrier when it is done."""
        while time.monotonic() < until:
            layer, ids = next(self._rows)
            for expert, _ in self._store.plan(layer, ids[None]):
                self._store.release(layer, expert)
            yield len(ids)

    def _look_ahead(self, until: float) -> Iterator[int]:
        """The same reads, each barrier asked for before the ones ahead of it have landed."""
        waiting: deque[Row] = deque()
        while waiting or time.monotonic() < until:
            while len(waiting) <= self.ahead and time.monotonic() < until:
                row = next(row for row in self._rows if all(row[0] != layer for layer, _ in waiting))
                self._reads.submit(row[0], row[1].tolist())
                waiting.append(row)
            layer, ids = waiting.popleft()
            for _, _, give_back in self._reads.landed(layer, ids.tolist()):
                give_back()
            yield len(ids)


def compare(replay: Replay, seconds: float, turn_s: float, depths: Sequence[int] = DEPTHS) -> dict[str, Any]:
    """Ceiling and store by turns for about `seconds`; the record, schema `expertstream.replay/1`."""
    best = replay.find_depths(depths, turn_s)
    replay.stretch(turn_s)  # buffers are mapped, threads made, rates learned
    stores: list[Stretch] = []
    until = time.monotonic() + seconds
    ceilings = [replay.ceiling(best, turn_s)]
    while not stores or time.monotonic() < until:
        stores.append(replay.stretch(turn_s))
        ceilings.append(replay.ceiling(best, turn_s))
    barriers = [barrier for store in stores for barrier in store.barriers]
    rates = sorted(nbytes / s for nbytes, s in barriers)
    beside = [(before + after) / 2 for before, after in pairwise(ceilings)]
    ratios = [store.rate / ceiling for store, ceiling in zip(stores, beside, strict=True)]
    return {
        "schema": SCHEMA,
        "model": str(replay.checkpoint.path),
        "drives": replay.drives.settings,
        "modes": replay.drives.counts()[2],
        "ahead": replay.ahead,
        "turn_s": turn_s,
        "ceiling_depths": best,
        "ceiling_bytes_per_s": statistics.median(ceilings),
        "store_bytes_per_s": statistics.median(store.rate for store in stores),
        "ratio": statistics.median(ratios),
        "busy": statistics.median(store.busy for store in stores),
        "turns": [
            {"store_bytes_per_s": store.rate, "ceiling_bytes_per_s": ceiling, "bytes": store.nbytes}
            for store, ceiling in zip(stores, beside, strict=True)
        ],
        "barriers": len(barriers),
        "barrier_bytes": statistics.median(nbytes for nbytes, _ in barriers),
        "barrier_bytes_per_s": {f"p{q}": rates[(len(rates) - 1) * q // 100] for q in (10, 50, 90)},
    }


def tell(record: Mapping[str, Any]) -> str:
    """The record for people."""
    from tabulate import tabulate

    ratios = sorted(turn["store_bytes_per_s"] / turn["ceiling_bytes_per_s"] for turn in record["turns"])
    depths = ", ".join(f"{name} {depth}" for name, depth in record["ceiling_depths"].items())
    used = ", ".join(f"{name} {drive['depth']}" for name, drive in record["drives"].items())
    spread = ", ".join(f"{q} {rate / 1e9:.3f}" for q, rate in record["barrier_bytes_per_s"].items())
    rows = [
        ("store", f"{record['store_bytes_per_s'] / 1e9:.3f} GB/s at depth {used}"),
        ("ceiling", f"{record['ceiling_bytes_per_s'] / 1e9:.3f} GB/s at depth {depths}"),
        ("ratio", f"{record['ratio']:.3f}, of {len(ratios)} turns from {ratios[0]:.3f} to {ratios[-1]:.3f}"),
        ("busy", f"{record['busy']:.1%} of the time something is being read"),
        ("barriers", f"{record['barriers']:,} of {record['barrier_bytes'] / 1e6:.0f} MB, {record['ahead']} ahead"),
        ("each", f"{spread} GB/s"),
    ]
    return str(tabulate(rows, tablefmt="plain", disable_numparse=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, or the exit status of what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--drive", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--simulate-drive", action="append", default=[], metavar="NAME=400MB/s")
    parser.add_argument("--routes", type=Path, metavar="FILE.npy", help="recorded routes; default: drawn ones")
    parser.add_argument("--ahead", type=int, default=0, metavar="N", help="barriers asked for early; default: 0")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of turns, in all; default: 60")
    parser.add_argument("--turn", type=float, default=1.0, metavar="S", help="of one turn; default: 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        for name, value, (least, most) in (("seconds", options.seconds, SECONDS), ("turn", options.turn, TURN_S)):
            if not least <= value <= most:  # nan is not
                raise UsageError(f"--{name} {value:g}: {least:g} to {most:g} seconds")
        layout = parse_drives(options.drive, options.simulate_drive)
        with Checkpoint.open(options.model, experts_elsewhere=bool(layout.directories)) as checkpoint:
            routes = Routes(checkpoint, options.routes)
            if not 0 <= options.ahead < len(routes.layers):
                raise UsageError(f"--ahead {options.ahead}: 0 to {len(routes.layers) - 1}, fewer than MoE layers")
            with closing(Replay(checkpoint, layout, routes, options.ahead)) as replay:
                record = compare(replay, options.seconds, options.turn)
    except ExpertstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(record) if options.json else tell(record))
    return 0


if __name__ == "__main__":
    sys.exit(end(main))
