"""What the drives can do: the ceiling of each alone and of all together, at several depths, past every cache.

A measurement reads blocks at places that no measurement has read before, as long as there are such places, with
`depth` readers at once, and divides the bytes by the time from the first request to the last byte. What the kernel
itself counts as fetched from devices decides whether the number is a drive's: when it counts less than was read,
the rest came from memory, and no rate is given, only the reason.

Machines are shared and drives have moods: all drives at all depths are measured once, then all once more, and the
median of these rounds counts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from statistics import median_low
from typing import Protocol

from runtime.drives.buffers import aligned
from runtime.drives.device import Device, DeviceError
from runtime.drives.identity import Identity, same_device
from runtime.drives.jobs import MIB, DriveSpec, Fault, Span
from runtime.drives.kernel import device_bytes_read
from runtime.drives.wakeup import answer_at_once
from runtime.progress import Progress

DEPTHS = (1, 2, 4, 8)
BLOCK_BYTES = 8 * MIB
NEAR_BEST = 0.98
"""The depth of a drive is the smallest that reaches this part of its best rate."""
IN_RUNS = 4
"""Reads in flight that a run wants: a probe's readers go from one read to the next, a run's are told of it first."""
NEAR_ENOUGH = 0.9
"""A run takes a depth it wants unless that costs more than the rest of this."""
SHARED = 0.9
"""Drives that together reach less than this part of what they do alone share something."""
PATIENCE_S = 30.0
"""A read that takes longer than this ends the probe."""
LOOK_S = 0.05
"""How often it is looked whether to stop."""
FROM_DEVICE = 0.99
"""Part of the bytes that the kernel must have fetched from devices for a rate to be a drive's."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measurement. rate: bytes/s, or None, and then `refused` says why. kernel_bytes: None where nobody counts."""

    drives: tuple[str, ...]
    depth: int
    nbytes: int
    seconds: float
    kernel_bytes: int | None
    refused: str = ""

    @property
    def rate(self) -> float | None:
        return None if self.refused or not self.seconds else self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Together:
    """Drives read at the same time, each at its best depth: the rate of each meanwhile, and of all, bytes/s."""

    drives: tuple[str, ...]
    rates: Mapping[str, float]
    rate: float
    alone: float
    refused: str = ""

    @property
    def share_an_uplink(self) -> bool:
        """Less than `SHARED` of what they do alone, added up."""
        return not self.refused and self.rate < SHARED * self.alone


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe found out.

    alone: every drive at every depth, once for every round. latency_s: the shortest read of one block of the drive's.
    together: all drives; when these share something, every pair; and drives that are tied together by pairs which
    share something. one_device: names that are one device, not measured together.
    """

    alone: Mapping[str, tuple[Ceiling, ...]]
    modes: Mapping[str, str]
    latency_s: Mapping[str, float]
    together: tuple[Together, ...]
    one_device: tuple[tuple[str, ...], ...]

    def levels(self, drive: str) -> list[Ceiling]:
        """The measurement of each depth that is the median of its rounds; one without a rate where none has one."""
        levels = []
        for depth in dict.fromkeys(ceiling.depth for ceiling in self.alone[drive]):
            rounds = [ceiling for ceiling in self.alone[drive] if ceiling.depth == depth]
            rates = [ceiling.rate for ceiling in rounds if ceiling.rate is not None]
            middle = median_low(rates) if rates else None
            levels.append(next(ceiling for ceiling in rounds if ceiling.rate == middle))
        return levels

    def best(self, drive: str) -> Ceiling | None:
        """The level with the smallest depth that is as good as the best; None when all were refused."""
        good = [level for level in self.levels(drive) if level.rate is not None]
        top = max((level.rate or 0.0 for level in good), default=0.0)
        return min((c for c in good if (c.rate or 0.0) >= NEAR_BEST * top), key=lambda c: c.depth, default=None)

    def run_depth(self, drive: str) -> int | None:
        """The depth for runs: IN_RUNS or more, or what comes nearest to it, where the drive does not suffer from it."""
        best = self.best(drive)
        if best is None or best.rate is None or best.depth >= IN_RUNS:
            return None if best is None else best.depth
        good = [c.depth for c in self.levels(drive) if (c.rate or 0.0) >= NEAR_ENOUGH * best.rate]
        return min((depth for depth in good if depth >= IN_RUNS), default=max(good))

    def uplinks(self) -> list[Together]:
        """What is shared, each drive in one of them at most: the smallest groups that explain it."""
        shared = [t for t in self.together if t.share_an_uplink]
        tied = _tied([t.drives for t in shared[1:]]) or [t.drives for t in shared]
        return [t for names in tied for t in shared if set(t.drives) == set(names)]

    def spec(self, device: Device, group: str | None = None) -> DriveSpec:
        """The drive as the scheduler should know it. With no rate found it has to be checked first."""
        best, depth = self.best(device.name), self.run_depth(device.name)
        latency = self.latency_s.get(device.name, 0.0)
        if best is None or depth is None:
            return DriveSpec(device.name, latency_s=latency, alignment=device.alignment, group=group)
        return DriveSpec(device.name, depth, best.rate, latency, device.alignment, group)


def probe(
    drives: Sequence[tuple[Device, Sequence[Span]]],
    *,
    depths: Sequence[int] = DEPTHS,
    rounds: int = 1,
    block_bytes: int = BLOCK_BYTES,
    budget_bytes: int = 512 * MIB,
    limit_s: float = 2.0,
    identities: Mapping[str, Identity] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    check: Callable[[], None] | None = None,
) -> Findings:
    """Measure. Spans: what may be read on each drive; the more, the better: what was read once is not read again
    before everything was. A measurement ends after `budget_bytes` or `limit_s`. `progress` hears of every measurement
    of a drive alone; it and `check`, which is called all the time, may raise to end it all. Raises DeviceError;
    ValueError when a drive has nothing to read.
    """
    rooms = {device.name: Places(device, spans, block_bytes, seed) for device, spans in drives}
    alone: dict[str, tuple[Ceiling, ...]] = dict.fromkeys(rooms, ())
    turns = [(depth, name) for _ in range(rounds) for depth in depths for name in rooms]
    for done, (depth, name) in enumerate(turns):
        if progress is not None:
            progress(done, len(turns))
        alone[name] += tuple(measure([rooms[name]], {name: depth}, budget_bytes, limit_s, check))
    if progress is not None:
        progress(len(turns), len(turns))
    latency = {name: _latency(room) for name, room in rooms.items()}
    modes = {name: room.device.mode for name, room in rooms.items()}
    one_device = tuple(same_device(identities or {}))
    findings = Findings(alone, modes, latency, (), one_device)
    best = {name: found for name in rooms if (found := findings.best(name)) is not None}
    for names in one_device:
        for extra in names[1:]:
            best.pop(extra, None)
    return replace(findings, together=tuple(_what_is_shared(rooms, best, budget_bytes, limit_s, check)))


def _what_is_shared(
    rooms: Mapping[str, Places],
    best: Mapping[str, Ceiling],
    budget_bytes: int,
    limit_s: float,
    check: Callable[[], None] | None,
) -> Iterator[Together]:
    """All drives that have a rate together, and, as far as that is less than they should give, who of them shares."""

    def together(names: Sequence[str]) -> Together:
        return _together([rooms[name] for name in names], best, budget_bytes, limit_s, check)

    if len(best) < 2:
        return
    everything = together(list(best))
    yield everything
    if len(best) == 2 or not everything.share_an_uplink:
        return
    pairs = [together(pair) for pair in combinations(best, 2)]
    yield from pairs
    for names in _tied([pair.drives for pair in pairs if pair.share_an_uplink]):
        if 2 < len(names) < len(best):
            yield together(names)


def _tied(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Groups that have a drive in common are one."""
    out: list[tuple[str, ...]] = []
    for group in groups:
        common = [other for other in out if set(other) & set(group)]
        out = [other for other in out if other not in common]
        out.append(tuple(dict.fromkeys(name for names in (*common, group) for name in names)))
    return out


class Room(Protocol):
    """A drive, and where on it to read next: (file, offset) of `block_bytes`, from any thread."""

    device: Device
    block_bytes: int

    def take(self) -> tuple[str, int]: ...


class Places:
    """Blocks of one drive, in an order that no read-ahead guesses."""

    def __init__(self, device: Device, spans: Sequence[Span], block_bytes: int, seed: int) -> None:
        self.device, self.block_bytes = device, block_bytes
        step = max(device.alignment, 1)
        self._places = [
            (span.file, at)
            for span in spans
            for at in range(-(-span.offset // step) * step, span.offset + span.length - block_bytes + 1, block_bytes)
        ]
        if not self._places:
            raise ValueError(f"drive {device.name}: no span of at least {block_bytes} bytes to measure with")
        random.Random(seed).shuffle(self._places)
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[str, int]:
        with self._lock:
            place = self._places[self._next % len(self._places)]
            self._next += 1
            return place


def measure(
    rooms: Sequence[Room],
    depths: Mapping[str, int],
    budget_bytes: float,
    limit_s: float,
    check: Callable[[], None] | None = None,
) -> list[Ceiling]:
    """Read all these drives at once, each at its depth, until its budget or the time is over; a ceiling for each.

    Every drive is read at least once, however short the time. Raises DeviceError, and what `check` raises: nobody
    waits then for reads that are under way.
    """
    moved = {room.device.name: 0 for room in rooms}
    asked = dict.fromkeys(moved, 0)
    ended = dict.fromkeys(moved, 0.0)
    errors: list[Exception] = []
    lock, go, over = threading.Lock(), threading.Event(), threading.Event()
    begun = 0.0

    def work(room: Room) -> None:
        answer_at_once()  # as the readers of a run
        name = room.device.name
        try:
            into = aligned(room.block_bytes, room.device.alignment)
            into[:] = bytes(len(into))  # touched, so that no page fault is measured
            go.wait()
            while True:
                with lock:
                    spent = asked[name] >= budget_bytes or time.monotonic() - begun >= limit_s
                    if over.is_set() or (asked[name] and spent):
                        return
                    asked[name] += room.block_bytes
                room.device.read(*room.take(), into)
                with lock:
                    moved[name] += room.block_bytes
                    ended[name] = time.monotonic()
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(room,), daemon=True)
        for room in rooms
        for _ in range(depths[room.device.name])
    ]
    for thread in threads:
        thread.start()
    before = device_bytes_read()
    begun = time.monotonic()
    go.set()
    try:
        for thread in threads:
            while thread.is_alive():
                if check is not None:
                    check()
                if time.monotonic() > begun + limit_s + PATIENCE_S:
                    names = ", ".join(moved)
                    raise DeviceError(Fault.LATE, f"probe of {names}: a read does not end, after {PATIENCE_S:.0f} s")
                thread.join(LOOK_S)
    finally:
        over.set()
    after = device_bytes_read()
    if errors:
        raise errors[0]
    kernel = None if before is None or after is None else after - before
    refused = _why_not(rooms, sum(moved.values()), kernel)
    return [Ceiling((name,), depths[name], moved[name], ended[name] - begun, kernel, refused) for name in moved]


def _why_not(rooms: Sequence[Room], moved: int, kernel: int | None) -> str:
    """Why this is no drive's speed, or nothing."""
    if kernel is not None:
        if kernel < FROM_DEVICE * moved:
            return f"of {moved} bytes only {kernel} came from a device, the rest from memory"
        return ""
    cached = [f"{room.device.name} is {room.device.mode}" for room in rooms if room.device.mode.startswith("buffered")]
    return f"reads may come from memory: {', '.join(cached)}" if cached else ""


def _together(
    rooms: Sequence[Room],
    best: Mapping[str, Ceiling],
    budget_bytes: int,
    limit_s: float,
    check: Callable[[], None] | None,
) -> Together:
    """All at once, each at its best depth, until the fastest has read its budget."""
    names = [room.device.name for room in rooms]
    alone = {name: best[name].rate or 0.0 for name in names}
    seconds = min(limit_s, budget_bytes / max(alone.values()))
    found = measure(rooms, {n: best[n].depth for n in names}, inf, seconds, check)
    rates = {c.drives[0]: c.nbytes / c.seconds for c in found if c.seconds}
    return Together(tuple(names), rates, sum(rates.values()), sum(alone.values()), found[0].refused)


def _latency(room: Places, reads: int = 5) -> float:
    """The shortest of a few reads of one smallest block: from the request to its byte."""
    into = aligned(max(room.device.alignment, 4096), room.device.alignment)
    best = inf
    for _ in range(reads):
        begun = time.monotonic()
        room.device.read(*room.take(), into)
        best = min(best, time.monotonic() - begun)
    return best
