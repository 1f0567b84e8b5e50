"""The promises on a checkpoint and drives of one's own: `nox -s conformance -- --model DIR --drive NAME=PATH …`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import matrix
import numpy as np
import pytest
from covering import Cell, pairwise, whole
from own import Own
from report import Report

from runtime.checkpoint import Checkpoint
from runtime.drives.device import Device
from runtime.drives.real import RealDevice
from runtime.weights.placement import MODEL, ExpertFiles, Gathering, Holder, Shards

pytestmark = pytest.mark.own_model

SAMPLE = 24
"""Experts of each drive whose copies are compared."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    report = metafunc.config.stash.get(Report.KEY, None)
    cells: Sequence[Cell] = []
    if report is not None:
        choose = whole if metafunc.config.getoption("--full") else pairwise
        cells = choose(report.own.factors, report.own.allowed)
    metafunc.parametrize(("number", "cell"), list(enumerate(cells)), ids=[matrix.name_of(cell) for cell in cells])


def test_every_expert_is_on_a_drive(own: Own) -> None:
    """Every expert of every layer is on one of the drives"""
    assert all(own.placement.spans(layer, e) for layer in own.config.moe_layers for e in range(own.config.num_experts))


def test_copies_are_equal(own: Own) -> None:
    """Copies of one expert on different drives are the same bytes, in a sample of each drive"""
    if len(own.placement.holders) < 2:
        pytest.skip("one drive holds experts: there are no copies to compare")
    layers, chance, compared = own.config.moe_layers, random.Random(0), 0
    with Checkpoint.open(own.model, experts_elsewhere=True) as checkpoint:
        holders: list[Holder] = [Shards(MODEL, checkpoint)]
        holders += [ExpertFiles(name, path, checkpoint) for name, path in own.layout.directories]
        devices: dict[str, Device] = {name: RealDevice(name, path) for name, path in own.paths.items()}
        devices[MODEL] = Gathering(devices[MODEL], checkpoint)

        def read(holder: Holder, layer: int, expert: int) -> bytes:
            into = bytearray(own.expert_nbytes)
            span = holder.span(layer, expert)
            devices[holder.name].read(span.file, span.offset, memoryview(into))
            return bytes(into)

        for holder in holders[1:]:
            others = [other for other in holders if other is not holder]
            both = np.argwhere(holder.here & np.logical_or.reduce([other.here for other in others])).tolist()
            for row, expert in chance.sample(both, min(SAMPLE, len(both))):
                other = next(other for other in others if other.here[row, expert])
                same = read(holder, layers[row], expert) == read(other, layers[row], expert)
                assert same, f"layer {layers[row]} expert {expert} is not the same on {holder.name} and {other.name}"
                compared += 1
        for device in devices.values():
            device.close()
    if not compared:
        pytest.skip("no expert is on two drives")


def test_the_answer_is_the_same(number: int, cell: Cell, own: Own, report: Report, coverage: matrix.Coverage) -> None:
    """The answer is the same, bit for bit, in each cell of the matrix"""
    read = matrix.run(own, cell, own.prompts, own.plain.answers, own.backend, seed=number)
    report.add(read)
    coverage.add(own.model.name, own.backend, cell, own.prompts)


def test_nothing_was_written(own: Own, report: Report) -> None:
    """Nothing was written to the model directory or to a drive"""
    assert report.seen == report.look(), "something has changed there since the session began"
