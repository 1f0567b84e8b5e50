"""In which order the outputs of a token's experts are added."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks.rejected.trial import Outcome, Trial
from runtime.checkpoint import Checkpoint
from runtime.generate import Engine, embedded_model
from runtime.ops.reference import F64, ReferenceOps

Ids = npt.NDArray[np.int64]

ORDERS = 3
NEW = 2
PROMPT = "The capital of France is"


def sums_on_arrival(trial: Trial) -> Outcome:
    """Outputs are added as their experts land."""
    counted = f"answers under {ORDERS} orders of landing: added as routed | as landed"
    kept, combine = answers(), ReferenceOps.combine

    def on_arrival(ops: ReferenceOps, outputs: Mapping[int, F64], ids: Ids, weights: F64) -> F64:
        return combine(ops, outputs, *in_order_of_arrival(outputs, ids, weights))

    with mock.patch.object(ReferenceOps, "combine", on_arrival):
        return Outcome(counted, kept, answers())


def in_order_of_arrival(
    outputs: Mapping[int, Any], ids: Ids, weights: npt.NDArray[Any]
) -> tuple[Ids, npt.NDArray[Any]]:
    """ids and weights [T, k], each row in the order in which `outputs` came."""
    place = {expert: n for n, expert in enumerate(outputs)}
    order = np.argsort([[place[expert] for expert in row] for row in ids.tolist()], axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(weights, order, axis=1)


def answers() -> int:
    """How many different answers the embedded model gives when its experts land in ORDERS different orders."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, EXPERTSTREAM_HOME=home):
        return len({answer(random.Random(seed)) for seed in range(ORDERS)})


def answer(chance: random.Random) -> tuple[str | None, ...]:
    """Digests of the logits. Experts read plainly land in the order in which they are asked for."""

    def shuffled(_: Checkpoint, layer: int, experts: Iterable[int]) -> list[int]:
        return sorted(experts, key=lambda _: chance.random())

    with (
        mock.patch.object(Checkpoint, "disk_order", shuffled),
        Engine.load(embedded_model(), backend="reference", reuse=False) as engine,
    ):
        assert engine.tokenizer is not None
        steps = engine.session().generate(engine.tokenizer.encode(PROMPT), NEW, logits_hash=True, stop_ids=())
        return tuple(step.logits_sha256 for step in steps)
