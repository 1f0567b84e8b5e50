"""The run record: what `run --json` prints, and what made every number in it (docs/run-record.md).

Sizes are bytes, times are seconds. A value that was not measured is null, never a guess.
"""

from __future__ import annotations

import contextlib
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import runtime
from runtime.drives.waits import NOTHING
from runtime.generate.engine import Engine, PrefillStats, Session, Step
from runtime.weights.placement import MODEL

SCHEMA = "expertstream.run/1"

ARITHMETIC = {
    "reference": "float64 arithmetic",
    "cpu": "float32 activations and accumulation",
    "mlx": "float32 activations",
}
"""What each backend computes in."""

WEIGHTS = {
    "bf16": "weight-exact: released weights",
    "int8": "not weight-exact: trunk in int8 per row, but for router, embedding and vectors; released routed experts",
}
"""What the trunk's precision makes of the weights."""

Record = dict[str, Any]


def run_record(
    session: Session,
    steps: Sequence[Step],
    *,
    prompt_ids: Sequence[int],
    text: str | None,
    reasoning: str | None,
    note: str | None,
    asked: Record,
) -> Record:
    """The record of one finished generation.

    `text` is None when the checkpoint has no tokenizer, `reasoning` unless the chat form was asked for; `note`
    says what the model is when its path does not; `asked` are the request's own settings, resolved.
    """
    engine = session.engine
    hashed = [step.logits_sha256 for step in steps]
    return {
        "schema": SCHEMA,
        "model": model(engine, note),
        "backend": engine.ops.name,
        "prompt_ids": list(prompt_ids),
        "token_ids": [step.token_id for step in steps],
        "text": text,
        "reasoning": reasoning,
        "finish_reason": steps[-1].finish_reason,
        "logits_sha256": None if None in hashed else hashed,
        "timing": timing(engine, session.prefill, steps),
        "io": _io(engine),
        "cache": _cache(engine),
        "prefill": _prefill(session.prefill),
        "memory": {
            "budget_bytes": engine.plan.limit.nbytes,
            "plan": engine.plan.as_dict(),
            "peak_rss_bytes": peak_rss_bytes(),
        },
        "settings": {**asked, **settings(engine)},
    }


def precision(engine: Engine) -> str:
    """Which weights and which arithmetic made the numbers."""
    return f"{WEIGHTS[engine.model.trunk.precision]}, {ARITHMETIC[engine.ops.name]}"


def timing(engine: Engine, prefill: PrefillStats, steps: Sequence[Step]) -> dict[str, Any]:
    """Seconds. `ttft_s` is from the start of the prefill to the first token, `decode_s` the passes of the others.

    `waiting`: the part of both in which the model had nothing to do but to wait for reads, and for which.
    """
    decode = sum(step.seconds for step in steps[1:])
    return {
        "load_s": engine.load_seconds,
        "ttft_s": steps[0].seconds,
        "prefill_s": prefill.seconds,
        "decode_s": decode,
        "decode_tokens_per_s": (len(steps) - 1) / decode if decode > 0 else None,
        "waiting": {"first_token": waiting(steps[:1]), "decode": waiting(steps[1:])},
    }


def waiting(steps: Sequence[Step]) -> dict[str, float | None]:
    """How long these waited for reads, for which, and what share of their time that was."""
    waited, seconds = sum((step.waited for step in steps), NOTHING), sum(step.seconds for step in steps)
    return {**asdict(waited), "share": waited.total_s / seconds if seconds else None}


def peak_rss_bytes() -> int:
    """The most memory this process has had resident."""
    with contextlib.suppress(OSError):  # Linux: rusage would tell the parent's peak when that was higher
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def model(engine: Engine, note: str | None) -> Record:
    """Which model it is; `note` when its path does not say."""
    config = engine.config
    return {
        "path": str(engine.checkpoint.path),
        "note": note,
        "fingerprint": engine.checkpoint.fingerprint,
        "layers": config.num_hidden_layers,
        "experts": config.num_experts,
        "trunk": engine.model.trunk.precision,
    }


def _io(engine: Engine) -> Record:
    """What was read, by drive and kind. Without drives, all comes plainly through the page cache."""
    if engine.drives is None:
        checkpoint, demand = engine.checkpoint, engine.experts.stats.bytes_read
        plain = {"bytes": checkpoint.bytes_read, "reads": checkpoint.reads, "retries": 0, "errors": 0, "landed_last": 0}
        return {
            "requested_bytes": checkpoint.bytes_read,
            "device_bytes": None,
            "by_drive": {MODEL: {**plain, "mode": "buffered"}},
            "by_kind": {"demand": demand, "prefetch": 0, "trunk": checkpoint.bytes_read - demand},
            "prefetch": _prefetch(engine),
        }
    counts, kinds, modes = engine.drives.counts()
    drives: dict[str, Record] = {
        name: {"bytes": c.requested_bytes, "reads": c.reads, "retries": c.retries, "errors": c.errors}
        | {"landed_last": c.landed_last, "mode": modes[name]}
        for name, c in counts.items()
    }
    return {
        "requested_bytes": sum(drive["bytes"] for drive in drives.values()),
        "device_bytes": sum(c.device_bytes for c in counts.values()),
        "by_drive": drives,
        "by_kind": {"demand": 0, "prefetch": 0, "trunk": 0, **{kind: c.requested_bytes for kind, c in kinds.items()}},
        "prefetch": _prefetch(engine),
    }


def _prefetch(engine: Engine) -> dict[str, int]:
    """What became of the bytes of experts that were guessed."""
    guesses = engine.experts.stats.guesses
    return {**asdict(guesses), "open": guesses.open}


def _cache(engine: Engine) -> dict[str, int]:
    stats = engine.experts.stats
    return {
        "hits": stats.hits,
        "misses": stats.misses,
        "evictions": stats.evictions,
        "budget_bytes": engine.experts.budget_bytes,
        "peak_bytes": stats.peak_bytes,
    }


def _prefill(stats: PrefillStats) -> Record:
    return {
        "rows": stats.rows,
        "layer_passes": stats.layer_passes,
        "expert_reads": stats.expert_reads,
        "distinct_experts": stats.distinct_experts,
        "amplification": stats.expert_reads / stats.distinct_experts if stats.distinct_experts else None,
    }


def settings(engine: Engine) -> Record:
    """What the numbers of a run depend on, beside the request."""
    return {
        "backend": engine.ops.name,
        "context": engine.context,
        "prefill_chunk": engine.chunk,
        "memory_bytes": engine.plan.limit.nbytes,
        "expert_cache_bytes": engine.plan["expert_cache"],
        "expert_reuse": engine.experts.reuse,
        "prefetch": engine.prefetch,
        "drives": None if engine.drives is None else engine.drives.settings,
        "verify_reads": engine.checks.settings(),
        "trunk": engine.model.trunk.precision,
        "precision": precision(engine),
        **BUILD,
    }


def versions(libraries: Sequence[str] = ("numpy", "numba", "llvmlite", "mlx", "tiktoken")) -> dict[str, str | None]:
    """Of the program, Python and libraries, those that compute if none are named; None for what is not there."""
    own = {"expertstream": runtime.__version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in libraries}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


BUILD = {"versions": versions(), "platform": platform.platform(), "machine": platform.machine()}
"""Found out while files can still be opened: at the end of a run the drives may hold every descriptor."""
