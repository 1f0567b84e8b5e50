"""Hands what arms have measured to pytest-benchmark, which records and reports it; run by the sessions, not by hand.

    EXPERTSTREAM_BENCH=bench-results/decode.json python -m pytest benchmarks/recorded.py --benchmark-json FILE

Every series of a result is a benchmark, every arm that is not void, or repeat of a kernel, a round of it. Nothing runs
here: the clock is one that the rounds put forward by what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import load

SECONDS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "first_token_s": lambda f: f["first_token_s"],
    "per_token_s_inclusive": lambda f: f["inclusive_tokens_per_s"] and 1 / f["inclusive_tokens_per_s"],
    "per_token_s_steady": lambda f: f["steady_tokens_per_s"] and 1 / f["steady_tokens_per_s"],
}
RECORD = load(Path(os.environ["EXPERTSTREAM_BENCH"]))
NOW = [0.0]


def series() -> list[Any]:
    """(arm, what, its seconds by round) of everything that was measured."""
    found = []
    for name in dict.fromkeys(arm["arm"] for arm in RECORD["arms"]):
        arms = [arm for arm in RECORD["arms"] if arm["arm"] == name and not arm["void"]]
        for what, of in SECONDS.items():
            values = [value for arm in arms if (value := of(arm["figures"])) is not None]
            if values:
                found.append(pytest.param(name, what, values, id=f"{name}-{what}"))
    for kernel in RECORD.get("kernels", {}).get("kernels", ()):
        name, seconds = f"{kernel['name']}, rows {kernel['rows']}", [ms / 1000 for ms in kernel["ms"]]
        found.append(pytest.param(name, "call_s", seconds, id=name))
    return found


@pytest.mark.parametrize(("arm", "what", "values"), series())
@pytest.mark.benchmark(timer=lambda: NOW[0], warmup=False)
def test_recorded(benchmark: Callable[..., Any], arm: str, what: str, values: list[float]) -> None:
    """Seconds of one series."""
    rounds = iter(values)

    def measured() -> None:
        NOW[0] += next(rounds)

    recorder: Any = benchmark
    recorder.group = what
    recorder.extra_info.update(
        {key: RECORD[key] for key in ("session", "kind", "smoke", "started", "source", "versions", "machine")}
        | {
            "arm": arm,
            "definitions": RECORD["definitions"],
            "fingerprint": (RECORD.get("model") or {}).get("fingerprint"),
        }
    )
    recorder.pedantic(measured, rounds=len(values), iterations=1)
