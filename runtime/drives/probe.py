"""What the drives can do: the ceiling of each alone and of all together, at several depths, past every cache.

A measurement reads blocks at places that no measurement has read before, as long as there are such places, with
`depth` readers at once, and divides the bytes by the time from the first request to the last byte. What the kernel
itself counts as fetched from devices decides whether the number is a drive's: when it counts less than was read,
the rest came from memory, and no rate is given, only the reason.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

from runtime.drives.buffers import aligned
from runtime.drives.device import Device, DeviceError
from runtime.drives.identity import Identity, same_device
from runtime.drives.jobs import MIB, DriveSpec, Fault, Span
from runtime.drives.kernel import device_bytes_read

DEPTHS = (1, 2, 4, 8)
BLOCK_BYTES = 8 * MIB
NEAR_BEST = 0.98
"""The depth of a drive is the smallest that reaches this part of its best rate."""
SHARED = 0.9
"""Drives that together reach less than this part of what they do alone share something."""
PATIENCE_S = 30.0
"""A read that takes longer than this ends the probe."""
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

    alone: every drive at every depth. latency_s: the shortest read of one block of the drive's. together: all drives,
    and, when these share something, every pair. one_device: names that are one device, not measured together.
    """

    alone: Mapping[str, tuple[Ceiling, ...]]
    modes: Mapping[str, str]
    latency_s: Mapping[str, float]
    together: tuple[Together, ...]
    one_device: tuple[tuple[str, ...], ...]

    def best(self, drive: str) -> Ceiling | None:
        """The measurement with the smallest depth that is as good as the best; None when all were refused."""
        good = [c for c in self.alone[drive] if c.rate is not None]
        top = max((c.rate or 0.0 for c in good), default=0.0)
        return next((c for c in good if (c.rate or 0.0) >= NEAR_BEST * top), None)

    def spec(self, device: Device, group: str | None = None) -> DriveSpec:
        """The drive as the scheduler should know it. With no rate found it has to be checked first."""
        best = self.best(device.name)
        latency = self.latency_s.get(device.name, 0.0)
        if best is None:
            return DriveSpec(device.name, latency_s=latency, alignment=device.alignment, group=group)
        return DriveSpec(device.name, best.depth, best.rate, latency, device.alignment, group)


def probe(
    drives: Sequence[tuple[Device, Sequence[Span]]],
    *,
    depths: Sequence[int] = DEPTHS,
    block_bytes: int = BLOCK_BYTES,
    budget_bytes: int = 512 * MIB,
    limit_s: float = 2.0,
    identities: Mapping[str, Identity] | None = None,
    seed: int = 0,
    progress: Callable[[Ceiling], None] | None = None,
) -> Findings:
    """Measure. Spans: what may be read on each drive; the more, the better: what was read once is not read again
    before everything was. A measurement ends after `budget_bytes` or `limit_s`. Raises DeviceError; ValueError when
    a drive has nothing to read.
    """
    rooms = {device.name: _Places(device, spans, block_bytes, seed) for device, spans in drives}
    alone: dict[str, tuple[Ceiling, ...]] = {}
    for name, room in rooms.items():
        ceilings: list[Ceiling] = []
        for depth in depths:
            ceilings += _measure([room], {name: depth}, budget_bytes, limit_s)
            if progress is not None:
                progress(ceilings[-1])
        alone[name] = tuple(ceilings)
    latency = {name: _latency(room) for name, room in rooms.items()}
    modes = {name: room.device.mode for name, room in rooms.items()}
    one_device = tuple(same_device(identities or {}))
    findings = Findings(alone, modes, latency, (), one_device)
    best = {name: found for name in rooms if (found := findings.best(name)) is not None}
    for names in one_device:
        for extra in names[1:]:
            best.pop(extra, None)
    if len(best) < 2:
        return findings
    everything = _together([rooms[n] for n in best], best, budget_bytes, limit_s)
    measured = [everything]
    if everything.share_an_uplink and len(best) > 2:
        measured += [_together([rooms[a], rooms[b]], best, budget_bytes, limit_s) for a, b in combinations(best, 2)]
    return Findings(alone, modes, latency, tuple(measured), one_device)


class _Places:
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


def _measure(rooms: Sequence[_Places], depths: Mapping[str, int], budget_bytes: float, limit_s: float) -> list[Ceiling]:
    """Read all these drives at once, each at its depth, until its budget or the time is over; a ceiling for each."""
    moved = {room.device.name: 0 for room in rooms}
    asked = dict.fromkeys(moved, 0)
    ended = dict.fromkeys(moved, 0.0)
    errors: list[Exception] = []
    lock, go = threading.Lock(), threading.Event()
    begun = 0.0

    def work(room: _Places) -> None:
        name = room.device.name
        into = aligned(room.block_bytes, room.device.alignment)
        into[:] = bytes(len(into))  # touched, so that no page fault is measured
        go.wait()
        try:
            while True:
                with lock:
                    if (
                        budget_bytes is not None and asked[name] >= budget_bytes
                    ) or time.monotonic() - begun >= limit_s:
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
    for thread in threads:
        thread.join(max(0.0, begun + limit_s + PATIENCE_S - time.monotonic()))
        if thread.is_alive():
            names = ", ".join(moved)
            raise DeviceError(Fault.LATE, f"probe of {names}: a read does not end, after {PATIENCE_S:.0f} s")
    after = device_bytes_read()
    if errors:
        raise errors[0]
    kernel = None if before is None or after is None else after - before
    refused = _why_not(rooms, sum(moved.values()), kernel)
    return [Ceiling((name,), depths[name], moved[name], ended[name] - begun, kernel, refused) for name in moved]


def _why_not(rooms: Sequence[_Places], moved: int, kernel: int | None) -> str:
    """Why this is no drive's speed, or nothing."""
    if kernel is not None:
        if kernel < FROM_DEVICE * moved:
            return f"of {moved} bytes only {kernel} came from a device, the rest from memory"
        return ""
    cached = [f"{room.device.name} is {room.device.mode}" for room in rooms if room.device.mode.startswith("buffered")]
    return f"reads may come from memory: {', '.join(cached)}" if cached else ""


def _together(rooms: Sequence[_Places], best: Mapping[str, Ceiling], budget_bytes: int, limit_s: float) -> Together:
    """All at once, each at its best depth, until the fastest has read its budget."""
    names = [room.device.name for room in rooms]
    alone = {name: best[name].rate or 0.0 for name in names}
    seconds = min(limit_s, budget_bytes / max(alone.values()))
    found = _measure(rooms, {n: best[n].depth for n in names}, inf, seconds)
    rates = {c.drives[0]: c.nbytes / c.seconds for c in found if c.seconds}
    return Together(tuple(names), rates, sum(rates.values()), sum(alone.values()), found[0].refused)


def _latency(room: _Places, reads: int = 5) -> float:
    """The shortest of a few reads of one smallest block: from the request to its byte."""
    into = aligned(max(room.device.alignment, 4096), room.device.alignment)
    best = inf
    for _ in range(reads):
        begun = time.monotonic()
        room.device.read(*room.take(), into)
        best = min(best, time.monotonic() - begun)
    return best
