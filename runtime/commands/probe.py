"""`drives probe`: what each drive can do, alone and together with the others, and a note of it for later runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.commands.arguments import check_seconds
from runtime.commands.drives import require_model
from runtime.commands.tables import table
from runtime.commands.terminal import Interrupts, progress, say, write
from runtime.drives.device import Device, DeviceError
from runtime.drives.identity import Identity, identify
from runtime.drives.jobs import MIB, Span
from runtime.drives.material import large_files
from runtime.drives.probe import BLOCK_BYTES, DEPTHS, Ceiling, Findings, Together, probe
from runtime.drives.real import open_drive
from runtime.drives.remembered import MOST_DEPTH, Remembered, key_of
from runtime.drives.throttled import ThrottledDevice
from runtime.errors import StorageError, UsageError
from runtime.generate import embedded_model
from runtime.units import per_second, size
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL

SCHEMA = "expertstream.probe/1"
LEAST_BYTES = 256 * MIB
"""With less to read, a drive's own memory would soon have all of it."""
ADVICE = "put a file of 1 GB or more there"
MOST_ROUNDS = 99
MOST_SECONDS = 600.0


@dataclass(frozen=True)
class Amount:
    """How much is measured: reads in flight, how often all of it, and when one measurement ends."""

    depths: tuple[int, ...] = DEPTHS
    rounds: int = 3
    nbytes: int = 512 * MIB
    seconds: float = 2.0

    def __post_init__(self) -> None:
        if not self.depths or any(not 1 <= depth <= MOST_DEPTH for depth in self.depths):
            raise UsageError(f"--depths: each is from 1 to {MOST_DEPTH}, such as 1,2,4,8")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise UsageError(f"--rounds {self.rounds}: from 1 to {MOST_ROUNDS}")
        check_seconds(self.seconds, MOST_SECONDS)
        if self.nbytes < BLOCK_BYTES:
            raise UsageError(f"--amount: at least a block, {size(BLOCK_BYTES)}")


def parse_depths(text: str) -> tuple[int, ...]:
    """From `1,2,4,8`. Raises UsageError."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() and len(item) < 6 for item in items):
        raise UsageError(f"--depths {text!r} is not understood: write numbers of reads in flight, such as 1,2,4,8")
    return tuple(dict.fromkeys(int(item) for item in items))


def probe_drives(model: Path | None, layout: Layout, amount: Amount, as_json: bool) -> None:
    """Measure and tell. With neither a model nor a drive named, it is the embedded model's drive.

    Raises UsageError, StorageError when a drive cannot be read, Cancelled.
    """
    places = drive_places(model, layout)
    limits = {limit.name: limit for limit in layout.limits}
    refused: dict[str, str] = {}
    with ExitStack() as stack, Interrupts() as stop, progress("measuring") as report:
        drives: list[tuple[Device, Sequence[Span]]] = []
        identities: dict[str, Identity] = {}
        for name, path in places.items():
            device, spans = _open(name, path)
            stack.callback(device.close)
            nbytes = sum(span.length for span in spans)
            if nbytes < LEAST_BYTES:
                found = f"{size(nbytes)} in files of {size(BLOCK_BYTES)} and more" if nbytes else "no large file"
                refused[name] = f"nothing to measure with: {found} in {path}: {ADVICE}"
                continue
            drives.append((device if name not in limits else ThrottledDevice(device, limits[name]), spans))
            if name not in limits:
                identities[name] = identify(path)
        if drives:
            names = ", ".join(device.name for device, _ in drives)
            say(f"probe    {names}: {amount.rounds} rounds at {', '.join(map(str, amount.depths))} reads in flight")

        try:
            findings = probe(
                drives,
                depths=amount.depths,
                rounds=amount.rounds,
                budget_bytes=amount.nbytes,
                limit_s=amount.seconds,
                identities=identities,
                progress=stop.stoppable("measuring", report),
                check=partial(stop.check, "measuring"),
            )
        except DeviceError as error:
            raise StorageError(f"a drive could not be measured: {error}") from None
    remembered = _remember(findings, identities)
    if as_json:
        write(json.dumps(record(findings, identities, places, refused, remembered)) + "\n")
    else:
        write("\n".join(lines(findings, refused)) + "\n")


def drive_places(model: Path | None, layout: Layout) -> dict[str, Path]:
    """The directory of each drive. Raises CheckpointError when the model's is none."""
    require_model(model)
    places = layout.paths(model or embedded_model())
    if model is None and layout.directories:
        places.pop(MODEL, None)
    return places


def _open(name: str, path: Path) -> tuple[Device, list[Span]]:
    try:
        spans = large_files(name, path, BLOCK_BYTES)
    except OSError as error:
        raise StorageError(f"drive {name}: {path} cannot be read: {error.strerror or error}") from None
    return open_drive(name, path, probe=path / spans[0].file if spans else None), spans


def _remember(findings: Findings, identities: Mapping[str, Identity]) -> list[str]:
    """Keep what was found of real drives; the names of those that are remembered."""
    known = Remembered.load()
    if known.note:
        say(f"note     {known.note}")
    names = known.learn(findings, identities)
    if names:
        try:
            known.save()
        except OSError as error:
            say(f"note     not remembered: {known.path()} cannot be written: {error.strerror or error}")
            return []
        say(f"note     remembered for later runs in {known.path()}: {', '.join(names)}")
    for name in identities.keys() - set(names):
        if findings.best(name) is not None and key_of(identities[name], findings.modes[name]) is None:
            say(f"note     drive {name} says nothing of itself, no serial number and no UUID: not remembered")
    return names


def lines(findings: Findings, refused: Mapping[str, str]) -> list[str]:
    """The result for people: a table, a row for each drive that was measured, then what else was found."""
    depths = list(dict.fromkeys(level.depth for name in findings.alone for level in findings.levels(name)))
    rows, said = [], []
    for name in findings.alone:
        best = findings.best(name)
        by_depth = {level.depth: per_second(level.rate) for level in findings.levels(name)}
        if best is not None:
            low, high = _spread(findings.alone[name], best.depth)
            spread = f" ({per_second(low)} to {per_second(high)})" if low < high else ""
            ceiling = f"{per_second(best.rate)} at {best.depth}{spread}"
        else:
            ceiling = "no rate"
            said.append(f"{name}: no rate: {findings.alone[name][0].refused}")
        latency = f"{findings.latency_s[name] * 1e3:.2f} ms"
        rows.append([name, findings.modes[name].partition(":")[0], *map(by_depth.get, depths), latency, ceiling])
    head = ["drive", "reads", *map(str, depths), "latency", "ceiling"]
    out = table(head, rows, "left").splitlines() if rows else []
    out += [f"{name}: {reason}" for name, reason in refused.items()] + said
    out += [f"{name}: {mode}" for name, mode in findings.modes.items() if ":" in mode]
    out += [f"{_and(names)} are one device: not measured together" for names in findings.one_device]
    return out + [_together_line(together) for together in findings.together]


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _spread(rounds: Sequence[Ceiling], depth: int) -> tuple[float, float]:
    rates = [c.rate for c in rounds if c.depth == depth and c.rate is not None]
    return min(rates), max(rates)


def _together_line(together: Together) -> str:
    names = _and(together.drives)
    if together.refused:
        return f"{names} together: no rate: {together.refused}"
    shares = ", ".join(f"{name} {per_second(rate)}" for name, rate in together.rates.items())
    verdict = "they share an uplink" if together.share_an_uplink else "they do not hold each other up"
    return f"{names} together: {per_second(together.rate)} of {per_second(together.alone)} ({shares}): {verdict}"


def record(
    findings: Findings,
    identities: Mapping[str, Identity],
    places: Mapping[str, Path],
    refused: Mapping[str, str],
    remembered: Sequence[str],
) -> dict[str, Any]:
    """The result as one JSON object, schema `expertstream.probe/1`. Rates are bytes/s, null where none was found."""
    drives: dict[str, Any] = {name: {"path": str(places[name]), "refused": refused[name]} for name in refused}
    for name, measured in findings.alone.items():
        best, levels = findings.best(name), findings.levels(name)
        drives[name] = {
            "path": str(places[name]),
            "simulated": name not in identities,
            "mode": findings.modes[name],
            "depth": best and best.depth,
            "bytes_per_s": best and best.rate,
            "run_depth": findings.run_depth(name),
            "latency_s": findings.latency_s[name],
            "levels": [{"depth": level.depth, "bytes_per_s": level.rate} for level in levels],
            "measurements": [
                {
                    "depth": c.depth,
                    "bytes": c.nbytes,
                    "seconds": c.seconds,
                    "kernel_bytes": c.kernel_bytes,
                    "refused": c.refused or None,
                }
                for c in measured
            ],
            "refused": None if best is not None else measured[0].refused,
            "remembered": name in remembered,
        }
    together = [
        {
            "drives": t.drives,
            "bytes_per_s": None if t.refused else t.rate,
            "alone_bytes_per_s": t.alone,
            "by_drive": t.rates,
            "share_an_uplink": t.share_an_uplink,
            "refused": t.refused or None,
        }
        for t in findings.together
    ]
    return {"schema": SCHEMA, "drives": drives, "together": together, "one_device": findings.one_device}
