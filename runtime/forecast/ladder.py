"""The ladder: each rung's drives read token after token under the production scheduler, on a virtual clock.

A token's time is the sum over its layers of the time in which the layer's slowest read lands, and a fixed time
beside the reads, in which the drives rest: it is spread evenly over the layers. A prompt is read expert-major: layer
by layer, the distinct experts of all its rows in one go. The rate of each drive is known to the scheduler from the
start, as it is where drives were probed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.checkpoint.manifest import Table
from runtime.drives.jobs import Job, Span
from runtime.drives.plan import fluid_bound, joint_rate
from runtime.drives.virtual import VirtualDrive, World
from runtime.forecast.supply import Supply

PREFILL_JOBS = 1000
"""Experts read to learn how far a prompt's reads stay behind their bound; the other layers are computed from that."""
ALIGNMENT = 4096

Reads = Sequence[Sequence[int]]
"""By MoE layer, the experts to read."""


@dataclass(frozen=True)
class Rung:
    """Drives that read together. uplinks: what each group of them can move, bytes/s."""

    drives: tuple[Supply, ...]
    uplinks: Mapping[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.drives)

    def spans(self, row: int, layer: int, expert: int) -> tuple[Span, ...]:
        """Every copy of an expert; `layer` is the model's number of its MoE layer, `row` counts these."""
        return tuple(d.copies.span(layer, expert) for d in self.drives if d.copies.here[row, expert])

    @property
    def held(self) -> Table:
        """Which experts have a holder at all."""
        return np.asarray(np.logical_or.reduce([d.copies.here for d in self.drives]))

    @property
    def shared(self) -> list[tuple[frozenset[int], float]]:
        """The groups as positions of their drives, and what they can move."""
        return [
            (frozenset(i for i, d in enumerate(self.drives) if d.figures.group == group), rate)
            for group, rate in self.uplinks.items()
        ]

    @property
    def rate(self) -> float:
        """Bytes/s of all drives together."""
        return joint_rate(frozenset(range(len(self.drives))), [d.figures.rate for d in self.drives], self.shared)


@dataclass(frozen=True)
class Decode:
    """Tokens one by one. Seconds are of reads alone; `token_s` by token, `bound_s` for all of them together."""

    token_s: tuple[float, ...]
    bound_s: float
    landed_last: Counter[str]
    """In how many barriers each drive's read was the last."""
    read_bytes: Counter[str]

    @property
    def reads_s(self) -> float:
        """Mean seconds a token."""
        return sum(self.token_s) / len(self.token_s)


@dataclass(frozen=True)
class Prefill:
    """The reads of a prompt. `simulated`: how many experts of them were read under the scheduler."""

    reads: int
    simulated: int
    reads_s: float
    bound_s: float


@dataclass(frozen=True)
class RungForecast:
    """What came out for a rung; nothing where some experts have no holder."""

    rung: Rung
    homeless: int
    decode: Decode | None = None
    prefill: Prefill | None = None


class Reading:
    """One rung's world, in which barriers are read."""

    def __init__(self, rung: Rung, layers: Sequence[int]) -> None:
        self._rung, self._layers = rung, layers
        self._rates = [d.figures.rate for d in rung.drives]
        self._shared = rung.shared
        self._barriers = 0
        self.read_bytes: Counter[str] = Counter()
        self.world = World(
            [
                VirtualDrive(f.name, f.rate, f.latency_s, f.depth, ALIGNMENT, f.group)
                for f in (d.figures for d in rung.drives)
            ],
            uplinks=rung.uplinks,
        )

    def barrier(self, row: int, experts: Sequence[int]) -> tuple[float, str]:
        """Read these experts of a layer; (seconds, the drive whose read landed last)."""
        world, layer = self.world, self._layers[row]
        began, self._barriers = world.now, self._barriers + 1
        world.log.clear()
        jobs = [Job((layer, e), self._rung.spans(row, layer, e), barrier=self._barriers) for e in experts]
        world.submit(jobs)
        world.run(waiting_for=[job.key for job in jobs])
        for landing in world.log:
            self.read_bytes[landing.slice.drive] += landing.slice.length
        return world.now - began, world.log[-1].slice.drive

    def bound(self, row: int, experts: Sequence[int], nbytes: int) -> float:
        """Seconds in which the drives could read them at best, latency aside."""
        here = [d.copies.here[row] for d in self._rung.drives]
        held = Counter(frozenset(i for i, table in enumerate(here) if table[e]) for e in experts)
        return fluid_bound({holders: n * nbytes for holders, n in held.items()}, self._rates, self._shared)

    def rest(self, seconds: float) -> None:
        """Let time pass in which nothing is wanted."""
        self.world.run(until=self.world.now + seconds)


Advanced = Callable[[], None]
"""Called after every barrier; may raise to stop."""


def climb(
    rungs: Sequence[Rung],
    layers: Sequence[int],
    nbytes: int,
    tokens: Sequence[Reads],
    passes: Sequence[tuple[int, Reads]],
    *,
    fixed_s: float,
    advanced: Advanced,
) -> list[RungForecast]:
    """Every rung over the same reads.

    layers: the model's numbers of its MoE layers; nbytes of one expert; tokens: what each has to read; passes: (how
    often, what is read) of a prompt; fixed_s: seconds a token beside the reads.
    """
    forecasts = []
    for rung in rungs:
        homeless = int(np.count_nonzero(~rung.held))
        if homeless:
            forecasts.append(RungForecast(rung, homeless))
            continue
        decode = _decode(Reading(rung, layers), nbytes, tokens, fixed_s / len(layers), advanced)
        prefill = _prefill(Reading(rung, layers), nbytes, passes, advanced) if passes else None
        forecasts.append(RungForecast(rung, 0, decode, prefill))
    return forecasts


def _decode(reading: Reading, nbytes: int, tokens: Sequence[Reads], rest_s: float, advanced: Advanced) -> Decode:
    token_s, bound_s, last = [], 0.0, Counter[str]()
    for token in tokens:
        reads_s = 0.0
        for row, experts in enumerate(token):
            if experts:
                seconds, drive = reading.barrier(row, experts)
                reads_s += seconds
                bound_s += reading.bound(row, experts, nbytes)
                last[drive] += 1
            reading.rest(rest_s)
            advanced()
        token_s.append(reads_s)
    return Decode(tuple(token_s), bound_s, last, reading.read_bytes)


def sampled(reads: Reads) -> list[int]:
    """Layers spread over the model, as many as have PREFILL_JOBS experts to read between them, or all."""
    mean = sum(map(len, reads)) / len(reads)
    n = min(len(reads), max(1, round(PREFILL_JOBS / mean)))
    return [int((i + 0.5) * len(reads) / n) for i in range(n)]


def _prefill(reading: Reading, nbytes: int, passes: Sequence[tuple[int, Reads]], advanced: Advanced) -> Prefill:
    """Bounds of all layers, each longer by what the simulated ones needed beyond theirs."""
    count = simulated = 0
    reads_s = bound_s = 0.0
    for times, reads in passes:
        bounds = [reading.bound(row, experts, nbytes) for row, experts in enumerate(reads)]
        rows = sampled(reads)
        took = 0.0
        for row in rows:
            took += reading.barrier(row, reads[row])[0]
            advanced()
        count += times * sum(map(len, reads))
        simulated += sum(len(reads[row]) for row in rows)
        bound_s += times * sum(bounds)
        reads_s += times * sum(bounds) * took / sum(bounds[row] for row in rows)
    return Prefill(count, simulated, reads_s, bound_s)
