"""`trace report`: what a trace tells, as tables, as JSON, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runtime.commands.arguments import output_file
from runtime.commands.picture import draw
from runtime.commands.tables import table
from runtime.commands.terminal import say, write
from runtime.drives.report import FATES, Analysis, report
from runtime.drives.trace import load
from runtime.errors import NotKept, UsageError
from runtime.home import write_whole
from runtime.units import per_second, size


def trace_report(file: Path, *, as_json: bool, layer: int | None, top: int, svg: Path | None) -> None:
    """Read the trace, print what it tells, draw it if asked. Raises UsageError for a file that is no whole trace."""
    if top < 1:
        raise UsageError(f"--top {top}: at least one row must be shown")
    target = None if svg is None else output_file(svg, "--svg", {}, {"the trace": file})
    trace = load(file)
    if not len(trace.slices):
        raise UsageError(f"{file}: nothing was read in this run")
    analysis = Analysis(trace, layer)
    if not len(analysis.slices):
        layers = sorted({int(n) for n in trace.slices["layer"]})
        raise UsageError(f"--layer {layer}: nothing was read for it; this trace has layers {layers[0]} to {layers[-1]}")
    found = report(analysis, top)
    write(json.dumps(found) + "\n" if as_json else "\n\n".join(_sections(found, layer, top)) + "\n")
    if target is not None:
        try:
            write_whole(target, draw(analysis, top).encode())
        except OSError as error:
            raise NotKept(f"--svg {target} could not be written: {error.strerror or error}") from None
        say(f"picture  {target}")


def _sections(found: dict[str, Any], layer: int | None, top: int) -> Iterable[str]:
    yield _head(found, layer)
    yield _drives(found)
    yield _barriers(found)
    landed = [*found["last_by_drive"], *({"last": f"({row['kind']})", **row} for row in found["last_by_kind"])]
    yield _table(
        "Who landed last, and how far behind the next drive",
        ["", "barriers", "share", "gap in all", "p50", "p90"],
        [
            [row["last"], f"{row['barriers']:,}", f"{row['share']:.0%}", *_of(row["gap_s"])]
            for row in landed
            if row["barriers"] or not row["last"].startswith("(")
        ],
    )
    yield _table(
        "By the width of a barrier, in experts",
        ["", "barriers", "time p50", "p90", "× bound", "gap in all", "p50", "p90"],
        [[row["jobs"], f"{row['barriers']:,}", *_times(row), *_of(row["gap_s"])] for row in found["by_width"]],
    )
    rows = found["by_layer"]
    if layer is None:
        yield _table(
            f"Layers with the largest gaps, {min(top, len(rows))} of {len(rows)}",
            ["layer", "barriers", "time p50", "p90", "× bound", "gap in all", "p50", "p90", "last most often"],
            [
                [row["layer"], f"{row['barriers']:,}", *_times(row), *_of(row["gap_s"]), row["last"]]
                for row in rows[:top]
            ],
        )
    yield _table(
        "Barriers with the largest gaps",
        ["barrier", "token", "layer", "experts", "time", "gap", "last", "was", "waited to be begun", "was read"],
        [
            [
                *(b[name] for name in ("number", "token", "layer", "jobs")),
                *(_ms(b[name]) for name in ("seconds", "gap_s")),
                *(b[name] for name in ("last", "kind")),
                *(_ms(b[name]) for name in ("queue_s", "service_s")),
            ]
            for b in found["worst_barriers"]
        ],
    )
    yield _table(
        "What waits were made of",
        ["", "reads", "to be begun, in all", "p50", "p90", "to be read, in all", "p50", "p90"],
        [
            [row["of"], f"{row['reads']:,}", *_of(row["queue_s"]), *_of(row["service_s"])]
            for row in found["waits"]
            if row["reads"]
        ],
    )
    yield from _guesses(found)
    yield from _troubles(found)
    yield _accounts(found, layer)


def _head(found: dict[str, Any], layer: int | None) -> str:
    model = found["model"] or {}
    lines = [
        f"{found['slices']:,} reads from {found['wall_clock']}, model {str(model.get('fingerprint'))[:16]}"
        + ("" if layer is None else f"; only what was read for layer {layer}")
    ]
    if found["ended"] != "done":
        lines.append(f"The run did not end by itself: {found['ended']}")
    if found["dropped"]:
        lines.append(f"{found['dropped']:,} later reads are missing: there was no room for them")
    return "\n".join(lines)


def _drives(found: dict[str, Any]) -> str:
    return _table(
        "Drives",
        ["", "bytes", "share", "reads", "a read", "busy", "rate", "in flight", "latency p50", "p90", "p99"],
        [
            [
                name,
                size(d["bytes"]),
                f"{d['share']:.1%}",
                f"{d['reads']:,}",
                size(d["bytes"] // d["reads"]) if d["reads"] else "-",
                f"{d['busy_s']:.3f} s",
                per_second(d["bytes_per_s"]) if d["bytes_per_s"] else "-",
                f"{d['in_flight']:.2f}",
                *(_ms(d["latency_s"][q]) for q in ("p50", "p90", "p99")),
            ]
            for name, d in found["drives"].items()
        ],
    )


def _barriers(found: dict[str, Any]) -> str:
    times = found["barriers"]
    rows = [["they took", *_of(times["seconds"]), "", "", ""]]
    for name, what in (("split_s", "at the drives' rates, split as it was"), ("fluid_s", "shared by all drives")):
        bound = times[name]
        rows.append([what, _ms(bound["sum"]), "", "", *(_ratio(bound[q]) for q in ("ratio", "p50", "p90"))])
    title = f"{times['barriers']:,} barriers, {times['ready']:,} of them with everything there when they began"
    return _table(title, ["", "in all", "p50", "p90", "× in all", "p50", "p90"], rows)


def _guesses(found: dict[str, Any]) -> Iterable[str]:
    drives = found["prefetch_by_drive"]
    if not any(sum(fates.values()) for fates in drives.values()):
        return
    total = {fate: sum(fates[fate] for fates in drives.values()) for fate in FATES}
    rows = [
        [name, size(sum(fates.values())), *(_part(fates[fate], sum(fates.values())) for fate in FATES)]
        for name, fates in ({**drives, "all": total} if len(drives) > 1 else drives).items()
    ]
    yield _table("Prefetched bytes", ["", "read", "in time", "late", "cancelled", "wasted", "open"], rows)


def _troubles(found: dict[str, Any]) -> Iterable[str]:
    rows = [
        [
            name,
            ", ".join(f"{n:,} × {fault}" for fault, n in t["failed"].items()) or "none",
            f"{t['retries']:,}",
            f"{t['hedges']:,}",
            size(t["unpublished_bytes"]),
        ]
        for name, t in found["troubles"].items()
        if any(t.values())
    ]
    if rows:
        yield _table("Troubles", ["", "failed", "retries", "for late reads", "read and not used"], rows)


def _accounts(found: dict[str, Any], layer: int | None) -> str:
    accounts, lines = found["accounts"], []
    if layer is None:
        for name, counted in accounts["counted_bytes"].items():
            traced = found["drives"][name]["bytes"]
            if traced == counted:
                said = "as the reader counted"
            else:
                said = f"the reader counted {counted:,}: reads are missing here"
            lines.append(f"{name}: {traced:,} bytes in this trace, {said}")
            if checks := accounts["failed_checks"][name]:
                lines.append(
                    f"{name}: {checks:,} times it was looked whether it answers, in vain: no reads of this trace"
                )
    if accounts["process_read_bytes"] is not None:
        lines.append(f"the system fetched {size(accounts['process_read_bytes'])} from storage for this process")
    for disk, d in accounts["disks"].items():
        of = f", below {' and '.join(d['drives'])}" if d["drives"] else ""
        lines.append(f"disk {disk}{of}: {size(d['read_bytes'])} read, {size(d['written_bytes'])} written, by all")
    if accounts["foreign_bytes"] is not None:
        lines.append(f"foreign traffic: {size(accounts['foreign_bytes'])} were read by others")
    return "\n".join(["Accounts", *(f"  {line}" for line in lines or ["nothing is known of them"])])


# --- numbers for people ---


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return f"{title}\n{table(headers, rows)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _of(values: dict[str, float | None]) -> list[str]:
    return [_ms(values[name]) for name in ("sum", "p50", "p90")]


def _times(row: dict[str, Any]) -> list[str]:
    return [_ms(row["seconds"]["p50"]), _ms(row["seconds"]["p90"]), _ratio(row["fluid_s"]["ratio"])]


def _part(nbytes: int, of: int) -> str:
    return f"{size(nbytes)} ({nbytes / of:.0%})" if nbytes else "-"
