"""How the server and its drives are, as numbers: what /health and /metrics and the page show."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.generate import Engine
from runtime.generate.record import precision
from runtime.weights.placement import MODEL

if TYPE_CHECKING:
    from runtime.server.worker import Worker

WELL = ("ready", "new")
"""States of a drive that is used."""


@dataclass(frozen=True)
class Drive:
    """`rate_bytes_per_s` is learned, None where nothing is. `landed_last`: how often it brought the last slice of what
    was asked for together."""

    state: str
    mode: str
    rate_bytes_per_s: float | None
    bytes: int
    reads: int
    errors: int
    retries: int
    landed_last: int


def drives(engine: Engine) -> dict[str, Drive]:
    """The drives by name."""
    if engine.drives is None:
        checkpoint = engine.checkpoint
        return {MODEL: Drive("ready", "buffered", None, checkpoint.bytes_read, checkpoint.reads, 0, 0, 0)}
    counts, _, modes = engine.drives.counts()
    reader = engine.drives.reader
    assert reader is not None
    rates = reader.rates()
    return {
        name: Drive(
            reader.health(name).value,
            modes[name],
            rates[name],
            counted.requested_bytes,
            counted.reads,
            counted.errors,
            counted.retries,
            counted.landed_last,
        )
        for name, counted in counts.items()
    }


def bytes_read(engine: Engine) -> dict[tuple[str, str], int]:
    """Bytes read, by drive and kind."""
    if engine.drives is None:
        demand = engine.experts.stats.bytes_read
        return {(MODEL, "demand"): demand, (MODEL, "trunk"): engine.checkpoint.bytes_read - demand}
    assert engine.drives.reader is not None
    return engine.drives.reader.bytes_read()


def kinds(engine: Engine) -> dict[str, int]:
    """Bytes read of each kind."""
    total: Counter[str] = Counter()
    for (_, kind), nbytes in bytes_read(engine).items():
        total[kind] += nbytes
    return dict(total)


def report(worker: Worker, model: str) -> dict[str, Any]:
    """Everything that /health says. Degraded: a drive sits out."""
    state = worker.state
    engine = worker.engine if state == "ready" else None
    running = worker.running
    facts: dict[str, Any] = {
        "status": state,
        "reason": worker.broken if state == "failed" else None,
        "model": model,
        "queue": {"running": int(running is not None), "waiting": worker.waiting, "limit": worker.limit},
        "running": None if running is None else asdict(running),
    }
    if engine is None:
        return facts
    by_drive, cache = drives(engine), engine.experts.stats
    if any(drive.state not in WELL for drive in by_drive.values()):
        facts["status"] = "degraded"
    return facts | {
        "context": engine.context,
        "backend": engine.ops.name,
        "precision": precision(engine),
        "drives": {name: asdict(drive) for name, drive in by_drive.items()},
        "bytes_by_kind": kinds(engine),
        "cache": {
            "hits": cache.hits,
            "misses": cache.misses,
            "evictions": cache.evictions,
            "held_bytes": cache.bytes_held,
            "budget_bytes": engine.experts.budget_bytes,
        },
        "snapshots": {
            "kept": len(worker.snapshots),
            "held_bytes": worker.snapshots.held_bytes,
            "budget_bytes": worker.snapshots.budget_bytes,
        },
    }
