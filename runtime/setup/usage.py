"""Which experts are used most: by what people bring, or by what runs have learned; and the order to copy them in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint
from runtime.config import no_file
from runtime.errors import UsageError
from runtime.forecast.routes import read_routes, uses

Uses = npt.NDArray[np.float64]
"""[MoE layers, experts]"""

FORMS = "lines `layer,expert,count`, JSON lines with these keys, or .npy of expert ids [positions, MoE layers, k]"


def hottest_first(counts: Uses) -> list[tuple[int, int]]:
    """All (row, expert), the most used first; equally used ones layer by layer in turn, by id.

    So experts of which nothing is known are taken evenly from all layers: each layer waits for its own slowest read.
    """
    by_use = np.argsort(-counts, axis=1, kind="stable")
    rank = np.empty_like(by_use)
    np.put_along_axis(rank, by_use, np.arange(counts.shape[1])[None], axis=1)
    rows, experts = np.indices(counts.shape)
    order = np.lexsort((rows.ravel(), rank.ravel(), -counts.ravel()))
    return list(zip(rows.ravel()[order].tolist(), experts.ravel()[order].tolist(), strict=True))


def read_usage(path: Path, checkpoint: Checkpoint) -> Uses:
    """Counts from a file. Raises UsageError naming the line for what is not understood, or no expert of the model."""
    if path.suffix == ".npy":
        layers, experts = checkpoint.experts_here.shape
        return uses(read_routes(path, "--usage", layers, experts), experts)
    try:
        if other := no_file(path):
            raise UsageError(f"--usage: cannot read {path}: it is not a regular file but {other}")
        counts = _from_lines(path, checkpoint)
    except OSError as error:
        raise UsageError(f"--usage: cannot read {path}: {error.strerror or error}") from None
    if not counts.any():
        raise UsageError(f"--usage: {path} says of no expert that it is used; give {FORMS}")
    return counts


def _from_lines(path: Path, checkpoint: Checkpoint) -> Uses:
    counts: Uses = np.zeros(checkpoint.experts_here.shape)
    rows = {layer: row for row, layer in enumerate(checkpoint.config.moe_layers)}
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"--usage: {path} is not UTF-8 text; give {FORMS}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.replace(" ", "") == "layer,expert,count"):
            continue
        found = _numbers(line)
        if found is None:
            raise UsageError(f"--usage: {path} line {number}, {line[:60]!r}, is not understood; give {FORMS}")
        layer, expert, count = found
        if layer not in rows or not 0 <= expert < counts.shape[1]:
            raise UsageError(f"--usage: {path} line {number}: the model has no expert {expert} in layer {layer}")
        counts[rows[layer], expert] += count
    return counts


def _numbers(line: str) -> tuple[int, int, float] | None:
    """(layer, expert, count), when that is what the line says."""
    try:
        if line.lstrip().startswith("{"):
            entry: dict[str, Any] = json.loads(line)
            layer, expert, count = (entry[name] for name in ("layer", "expert", "count"))
            if not type(layer) is type(expert) is int or type(count) not in (int, float):
                return None
        else:
            layer, expert, count = line.split(",")
        found = int(layer), int(expert), float(count)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return found if np.isfinite(found[2]) and found[2] >= 0 else None
