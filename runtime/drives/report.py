"""What a trace tells: what each drive did, who landed last and how far behind, what waits were made of, and what became
of every prefetched byte. Numbers only, from the file alone; units are in the names.

A job has landed when one of its leases is whole, the first that is; its slices in that lease are the *winning* ones.
A barrier is what a layer must have before it can go on; it begins when the first of these jobs is needed for sure, and
ends with the last winning slice. The *gap* is from
the last slice of the next-to-last drive, or from the beginning of the barrier if that is later, to its end: the time
that would have been saved if the last drive had been as quick as the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.drives.trace import TraceFile

SCHEMA = "expertstream.report/1"
WIDTHS = (16, 48, 96)
"""Upper ends of the classes of barriers, in jobs; the last class is open."""
FATES = ("in_time", "late", "cancelled", "wasted", "open")
"""Of prefetched bytes: there when they were needed; needed before they were there; given up while they were read; read
for nothing; and what the trace does not know of, such as what is in the cache and has not been needed so far."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Barrier:
    """What a layer had to wait for. slices: numbers of the winning ones in the trace, as they landed.

    jobs: experts; waited: those that were not there when it began. gap_s: nan when one drive read all.
    split_s, fluid_s: what was left to read when it began, at the rates of the trace, as it was split over the drives,
    and when all drives had shared it. queue_s, service_s: of the last slice.
    """

    number: int
    layer: int
    token: int
    jobs: int
    bytes: int
    begin_s: float
    end_s: float
    last: str
    kind: str
    gap_s: float
    split_s: float
    fluid_s: float
    queue_s: float
    service_s: float
    slices: npt.NDArray[np.int64]

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Analysis:
    """A trace, taken apart. `layer`: only what was read for this one."""

    def __init__(self, trace: TraceFile, layer: int | None = None) -> None:
        self.trace = trace
        self.slices = trace.slices if layer is None else trace.slices[trace.slices["layer"] == layer]
        s = self.slices
        self.ok = s["fault"] == _code(trace, "fault", "")
        self.guess = s["priority"] == _code(trace, "priority", "prefetch")
        self.drives = list(dict.fromkeys([*trace.about.get("drives", {}), *trace.names["drive"]]))
        names = trace.names["drive"]
        self.drive_of = np.array([self.drives.index(name) for name in names], np.int64)[s["drive"]]
        self.queue = s["started"] - np.where(s["needed"] <= s["started"], s["needed"], s["queued"])
        self.service = s["landed"] - s["started"]
        self.kind = np.where(self.guess, "prefetch", "demand").astype(object)
        for kind in ("retry", "hedge"):
            self.kind[s["kind"] == _code(trace, "kind", kind)] = kind
        self.job, self.winning = _winners(s, self.ok)
        self.rates = np.array([d["bytes_per_s"] or nan for d in self.by_drive().values()])
        self.barriers = list(self._barriers())

    # --- drives ---

    def by_drive(self) -> dict[str, dict[str, Any]]:
        """What each did. busy_s: time with anything in flight; in_flight: reads, on average over the trace (Little)."""
        s, found = self.slices, {}
        span = float(s["landed"].max() - s["started"].min()) if len(s) else 0.0
        total = int(s["length"][self.ok].sum())
        for number, name in enumerate(self.drives):
            mine = self.drive_of == number
            well = mine & self.ok
            nbytes, busy = int(s["length"][well].sum()), _busy(s[mine])
            found[name] = {
                "bytes": nbytes,
                "share": nbytes / total if total else 0.0,
                "device_bytes": int(s["device_bytes"][well].sum()),
                "reads": int(well.sum()),
                "busy_s": busy,
                "bytes_per_s": nbytes / busy if busy else None,
                "in_flight": float(self.service[mine].sum()) / span if span else 0.0,
                "latency_s": _quantiles(self.service[well], (50, 90, 99)),
            }
        return found

    def troubles(self) -> dict[str, dict[str, Any]]:
        """By drive: reads that failed, by reason; reads begun for another that failed, or is late; and the bytes that
        were read well and that nobody got, because another copy was quicker or the expert was given up."""
        faults, found = self.trace.names["fault"], {}
        for number, name in enumerate(self.drives):
            mine = self.drive_of == number
            codes = self.slices["fault"][mine & ~self.ok]
            found[name] = {
                "failed": {faults[code]: int((codes == code).sum()) for code in np.unique(codes)},
                "retries": int((self.kind[mine] == "retry").sum()),
                "hedges": int((self.kind[mine] == "hedge").sum()),
                "unpublished_bytes": int(self.slices["length"][mine & self.ok & ~self.winning].sum()),
            }
        return found

    # --- barriers ---

    def _barriers(self) -> Iterable[Barrier]:
        s, names = self.slices, self.trace.names["drive"]
        held = np.flatnonzero(self.winning & ~np.isnan(s["needed"]) & (s["layer"] >= 0))  # experts
        known = s["token"][held] >= 0
        held = held[np.lexsort((s["barrier"][held], np.where(known, s["needed"][held], -1.0)))]
        total_rate = float(np.nansum(self.rates))
        for mine in np.split(held, _ends(s[held])) if len(held) else ():
            mine = mine[np.argsort(s["landed"][mine], kind="stable")]
            rows, drives = s[mine], self.drive_of[mine]
            last, begin = mine[-1], float(rows["needed"].min())
            others = rows["landed"][drives != drives[-1]]
            left = rows["landed"] > begin
            moved = np.bincount(drives[left], rows["length"][left], len(self.drives))
            yield Barrier(
                number=int(rows["barrier"].max()),
                layer=int(rows["layer"][-1]),
                token=int(rows["token"][-1]),
                jobs=len(np.unique(self.job[mine])),
                bytes=int(rows["length"].sum()),
                begin_s=begin,
                end_s=max(begin, float(rows["landed"][-1])),
                last=names[s["drive"][last]],
                kind=str(self.kind[last]),
                gap_s=max(0.0, float(rows["landed"][-1]) - max(begin, float(others.max()))) if len(others) else nan,
                split_s=float(np.nanmax(np.where(moved > 0, moved / self.rates, 0.0), initial=0.0)),
                fluid_s=float(moved.sum()) / total_rate if total_rate else 0.0,
                queue_s=float(self.queue[last]),
                service_s=float(self.service[last]),
                slices=mine,
            )

    @property
    def waited(self) -> list[Barrier]:
        """Barriers at which anything was missing when they began."""
        return [b for b in self.barriers if b.seconds > 0]

    def last_by(self, what: str, values: Sequence[object]) -> list[dict[str, Any]]:
        """Barriers that had to wait, by what came last: its `last` drive or its `kind`."""
        return [{what: v, **_gaps([b for b in self.waited if getattr(b, what) == v], len(self.waited))} for v in values]

    def by_layer(self) -> list[dict[str, Any]]:
        """The layers whose gaps sum up to most come first."""
        layers: dict[int, list[Barrier]] = {}
        for barrier in self.waited:
            layers.setdefault(barrier.layer, []).append(barrier)
        rows = [
            {"layer": layer, **_gaps(held, len(self.waited)), **_times(held), "last": _most(b.last for b in held)}
            for layer, held in layers.items()
        ]
        return sorted(rows, key=lambda row: (-row["gap_s"]["sum"], -row["seconds"]["sum"]))

    def by_width(self) -> list[dict[str, Any]]:
        """By the number of experts of a barrier."""
        ends, rows = (0, *WIDTHS, 1 << 62), []
        for low, high in pairwise(ends):
            name = f"≤{high}" if not low else f">{low}" if high == ends[-1] else f"{low + 1}–{high}"
            held = [b for b in self.waited if low < b.jobs <= high]
            rows.append({"jobs": name, **_gaps(held, len(self.waited)), **_times(held)})
        return rows

    def worst(self, top: int) -> list[Barrier]:
        """The barriers with the largest gaps, then those that took longest."""
        return sorted(self.waited, key=lambda b: (b.gap_s if b.gap_s == b.gap_s else 0.0, b.seconds), reverse=True)[
            :top
        ]

    def times(self) -> dict[str, Any]:
        """All barriers, against what the drives' own rates allow."""
        return {"barriers": len(self.barriers), "ready": len(self.barriers) - len(self.waited), **_times(self.waited)}

    def waits(self) -> list[dict[str, Any]]:
        """Of slices, and of the last ones of barriers: from being wanted to being begun, and from there to landing."""
        rows = []
        for kind in ("demand", "prefetch", "retry", "hedge"):
            mine = self.kind == kind
            rows.append({"of": kind, **_spans(self.queue[mine], self.service[mine])})
        last = self.waited
        queue, service = np.array([b.queue_s for b in last]), np.array([b.service_s for b in last])
        return [*rows, {"of": "last of a barrier", **_spans(queue, service)}]

    # --- guesses ---

    def prefetched(self) -> dict[str, npt.NDArray[np.bool_]]:
        """Which slices are prefetched bytes that arrived, by what became of them; each is of one kind."""
        s, fates = self.slices, self.trace.names["fate"]
        fate = np.array([*fates, ""], object)[s["fate"]]
        arrived = self.ok & self.guess
        needed, used = fate == "needed", self.winning
        kinds = {
            "in_time": needed & used & (s["landed"] <= s["needed"]),
            "late": needed & used & (s["landed"] > s["needed"]),
            "cancelled": fate == "dropped",
            "wasted": (fate == "unused") | (needed & ~used),
        }
        kinds["open"] = ~np.any(list(kinds.values()), axis=0)
        return {name: mask & arrived for name, mask in kinds.items()}

    def prefetch(self, by: npt.NDArray[Any], values: Iterable[Any]) -> dict[str, dict[str, int]]:
        """Bytes of each fate, by something that each slice has."""
        masks, lengths = self.prefetched(), self.slices["length"]
        return {
            str(v): {name: int(lengths[mask & (by == v)].sum()) for name, mask in masks.items()} for v in list(values)
        }

    # --- witnesses ---

    def accounts(self) -> dict[str, Any]:
        """The trace beside the reader's own counts and those of the system. None: the trace does not say.

        foreign_bytes: what the disks read that this process did not ask for; an image on one of them is no disk more.
        """
        about = self.trace.about
        drives = about.get("drives", {})
        counted = {name: d["requested_bytes"] - d["checked_bytes"] for name, d in drives.items()}
        disks, process = about.get("disks", {}), about.get("process_read_bytes")
        read = sum(d["read_bytes"] for d in disks.values() if not disks.keys() & set(d.get("on", ())))
        return {
            "counted_bytes": counted,
            "failed_checks": {name: d.get("failed_checks", 0) for name, d in drives.items()},
            "dropped": about.get("dropped", 0),
            "process_read_bytes": process,
            "disks": disks,
            "foreign_bytes": max(0, read - process) if disks and process is not None else None,
            "written_bytes": sum(d["written_bytes"] for d in disks.values()) if disks else None,
        }


def report(analysis: Analysis, top: int = 10) -> dict[str, Any]:
    """Everything, as JSON (docs/trace.md), with the `top` worst barriers."""
    trace, kinds = analysis.trace, ("demand", "prefetch", "retry", "hedge")
    layers = [layer for layer in np.unique(analysis.slices["layer"]).tolist() if layer >= 0]
    prefetch = analysis.prefetch(analysis.drive_of, range(len(analysis.drives)))
    return {
        "schema": SCHEMA,
        **{key: trace.about.get(key) for key in ("ended", "wall_clock", "model", "slices", "dropped")},
        "drives": analysis.by_drive(),
        "troubles": analysis.troubles(),
        "barriers": analysis.times(),
        "last_by_drive": analysis.last_by("last", analysis.drives),
        "last_by_kind": analysis.last_by("kind", kinds),
        "by_layer": analysis.by_layer(),
        "by_width": analysis.by_width(),
        "worst_barriers": [_facts(barrier) for barrier in analysis.worst(top)],
        "waits": analysis.waits(),
        "prefetch_by_drive": dict(zip(analysis.drives, prefetch.values(), strict=True)),
        "prefetch_by_layer": analysis.prefetch(analysis.slices["layer"], layers),
        "accounts": analysis.accounts(),
    }


# --- arithmetic ---


def _code(trace: TraceFile, column: str, name: str) -> int:
    """The number of a name, or one that no record has."""
    names = trace.names[column]
    return names.index(name) if name in names else -1


def _ends(s: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where, in the order in which they were needed, one barrier ends: with the layer's turn, where passes are known,
    else with its number. A layer whose experts do not fit into memory together asks for them several times; of what was
    in the cache on a guess the reader does not know for which barrier it is used."""
    turn = (np.diff(s["token"]) != 0) | (np.diff(s["layer"]) != 0)
    return np.flatnonzero(np.where(s["token"][1:] >= 0, turn, np.diff(s["barrier"]) != 0)) + 1


def _winners(s: npt.NDArray[Any], ok: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(the job of each slice, numbered; whether it is a part of what its job was given)."""
    if not len(s):
        return np.empty(0, np.int64), np.empty(0, np.bool_)
    _, job = np.unique(s[["layer", "expert", "queued"]], return_inverse=True)
    _, first, lease = np.unique(s["lease"], return_index=True, return_inverse=True)
    landed = np.zeros(len(first), np.int64)
    np.add.at(landed, lease[ok], s["length"][ok])
    end = np.full(len(first), -np.inf)
    np.maximum.at(end, lease[ok], s["landed"][ok])
    end[landed != s["job_bytes"][first]] = np.inf
    best = np.full(job.max() + 1, np.inf)
    np.minimum.at(best, job[first], end)
    won = np.isfinite(end) & (end == best[job[first]])
    return job, ok & won[lease]


def _busy(s: npt.NDArray[Any]) -> float:
    """Seconds in which at least one of these reads was under way."""
    if not len(s):
        return 0.0
    s = s[np.argsort(s["started"], kind="stable")]
    reach = np.maximum.accumulate(s["landed"])
    begun = np.maximum(s["started"][1:], reach[:-1])
    return float(s["landed"][0] - s["started"][0] + np.maximum(0.0, s["landed"][1:] - begun).sum())


def _quantiles(values: Floats, of: Sequence[int] = (50, 90)) -> dict[str, float | None]:
    if not len(values):
        return {f"p{q}": None for q in of}
    return {f"p{q}": float(np.percentile(values, q)) for q in of}


def _gaps(barriers: Sequence[Barrier], of: int) -> dict[str, Any]:
    gaps = np.array([b.gap_s for b in barriers if b.gap_s == b.gap_s])
    return {
        "barriers": len(barriers),
        "share": len(barriers) / of if of else 0.0,
        "gap_s": {"sum": float(gaps.sum()), **_quantiles(gaps)},
    }


def _times(barriers: Sequence[Barrier]) -> dict[str, Any]:
    """Times of barriers, and those over the bounds: over the sums, and over each barrier's own."""
    seconds = np.array([b.seconds for b in barriers])
    found: dict[str, Any] = {"seconds": {"sum": float(seconds.sum()), **_quantiles(seconds)}}
    for name in ("split_s", "fluid_s"):
        bound = np.array([getattr(b, name) for b in barriers])
        some = bound > 0
        over = float(seconds.sum() / bound.sum()) if bound.sum() > 0 else None
        found[name] = {"sum": float(bound.sum()), "ratio": over, **_quantiles(seconds[some] / bound[some])}
    return found


def _spans(queue: Floats, service: Floats) -> dict[str, Any]:
    return {
        "reads": len(queue),
        "queue_s": {"sum": float(queue.sum()), **_quantiles(queue)},
        "service_s": {"sum": float(service.sum()), **_quantiles(service)},
    }


def _facts(barrier: Barrier) -> dict[str, Any]:
    facts = {f.name: getattr(barrier, f.name) for f in fields(barrier) if f.name != "slices"}
    return {**facts, "gap_s": None if barrier.gap_s != barrier.gap_s else barrier.gap_s, "seconds": barrier.seconds}


def _most(values: Iterable[str]) -> str:
    found = list(values)
    return max(dict.fromkeys(found), key=found.count)
