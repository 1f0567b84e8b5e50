"""Promises broken on purpose, in the program and in the copies: the checks of the matrix must see each of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matrix
import pytest
import shapes
from copies import flip, large_experts
from covering import Cell, Value
from matrix import FACTORS, Prompt, Site
from mutation import Edit, mutated
from trouble import Turns

from benchmarks.rejected.sums import in_order_of_arrival
from runtime.drives.crew import Crew
from runtime.model.k3 import K3
from runtime.ops.cpu import CpuOps
from runtime.ops.reference import ReferenceOps
from runtime.weights.experts import ExpertStore

SHAPE = "released-proportions"
OTHER_BITS = r"token \d+ is"
"""`check_same`: other ids, or the same with other logits."""
READ_TWICE = "some were read twice"
"""`run_foreseen`."""


def cell_with(**settings: Value) -> Cell:
    """One drive, everything cached, and whatever else is said."""
    return {name: values[0] for name, values in FACTORS.items()} | {"cache": "all", "chunk": "whole"} | settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Site]:
    @cache
    def made(name: str) -> Site:
        folder = tmp_path_factory.mktemp("promises")
        if name == "large":
            return Site(large_experts(folder / "model"), folder)
        shapes.write_checkpoint(name, shapes.SEEDS[name], folder / "model")
        return Site(folder / "model", folder)

    return made


def prompt(rows: int = 30, new: int = 8) -> Prompt:
    chance = random.Random(rows)
    return Prompt(tuple(chance.randrange(256) for _ in range(rows)), new)


@dataclass(frozen=True)
class Broken:
    """Edits that break a promise, a check of the matrix on a checkpoint, and what it says of it."""

    edits: tuple[Edit, ...]
    check: Callable[[Site], None]
    says: str
    model: str = SHAPE


def in_cell(backend: str = "cpu", **settings: Value) -> Callable[[Site], None]:
    """Baseline and cell, both by the program as it then is."""

    def check(site: Site) -> None:
        prompts = [prompt() if backend == "cpu" else prompt(12, 4)]
        plain = matrix.baseline(site.model, prompts, backend)
        matrix.run(site, cell_with(**settings), prompts, plain, backend)

    return check


IN_ORDER_OF_ARRIVAL = f"""\
from {in_order_of_arrival.__module__} import in_order_of_arrival
    ids, weights = in_order_of_arrival(outputs, ids, weights)
    """
ARRIVAL: dict[str, Value] = {"drives": 2, "delays": "random", "cache": "one top-k"}

BROKEN = {
    "sums in the order of arrival, cpu": Broken(
        (Edit(CpuOps, "combine", (("next_row = {", f"{IN_ORDER_OF_ARRIVAL}next_row = {{"),)),),
        in_cell(**ARRIVAL),
        OTHER_BITS,
    ),
    "sums in the order of arrival, reference": Broken(
        (Edit(ReferenceOps, "combine", (("seen = ", f"{IN_ORDER_OF_ARRIVAL}seen = "),)),),
        in_cell("reference", **ARRIVAL),
        OTHER_BITS,
    ),
    "rows that depend on the batch, cpu": Broken(
        (
            Edit(
                CpuOps,
                "linear",
                (
                    (
                        "return out",
                        'return out if len(x) == 1 else np.einsum("ti,oi->to", x, self.vector(weight.array))',
                    ),
                ),
            ),
        ),
        in_cell(chunk=1),
        OTHER_BITS,
    ),
    "rows that depend on the batch, reference": Broken(
        (
            Edit(
                ReferenceOps,
                "linear",
                (
                    (
                        "return np.stack([matvec(weight, row) for row in x])",
                        "step = 1 if len(x) == 1 else -1\n"
                        "    return np.stack([matvec(weight[:, ::step], row[::step]) for row in x])",
                    ),
                ),
            ),
        ),
        in_cell("reference", chunk=1),
        OTHER_BITS,
    ),
    "history of the convolutions lost between chunks": Broken(
        (
            Edit(
                K3,
                "kda",
                (('_conv1d"], history)', '_conv1d"], ops.zeros(*history.shape))'),),
            ),
        ),
        in_cell(chunk=7),
        OTHER_BITS,
    ),
    "state of the delta rule kept from before the chunk": Broken(
        (Edit(K3, "kda", (("KdaState(s, ", "KdaState(s if len(x) == 1 else state.s, "),)),),
        in_cell(chunk=7),
        OTHER_BITS,
    ),
    "the last position before a chunk is not attended to": Broken(
        (
            Edit(
                CpuOps,
                "latent_attention",
                (("cache.entries, cache.length", "cache.entries, max(0, cache.length - 1)"),),
            ),
        ),
        in_cell(chunk=7),
        OTHER_BITS,
    ),
    "what is guessed and under way is read again": Broken(
        (Edit(ExpertStore, "_settle", (("if key in self._guessed and key in wanted]", "if False]"),)),),
        lambda site: matrix.run_foreseen(site, prompt(3, 24)),
        READ_TWICE,
    ),
    "the last byte before a slice's border is lost": Broken(
        (
            Edit(
                Crew,
                "_read",
                (
                    (
                        "self.device.read(part.file, part.offset, view)",
                        "self.device.read(part.file, part.offset, view[: part.length - "
                        "(part.start + part.length < part.job_bytes)])",
                    ),
                ),
            ),
        ),
        in_cell(drives=2),
        OTHER_BITS,
        "large",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("broken", [False, True], ids=["kept", "broken"])
def test_a_broken_promise_is_seen(name: str, broken: bool, site: Callable[[str], Site]) -> None:
    case = BROKEN[name]
    there = site(case.model)
    if not broken:
        case.check(there)
        return
    with mutated(*case.edits), pytest.raises(AssertionError, match=case.says):
        case.check(there)


# -- copies that are not what they should be -----------------------------------------------------------------------


@pytest.fixture
def replica(site: Callable[[str], Site], tmp_path: Path) -> Site:
    """A place of its own, so that copies can be spoiled."""
    shutil.copytree(site(SHAPE).model, tmp_path / "model")
    return Site(tmp_path / "model", tmp_path)


def spoil(site: Site, cell: Cell) -> None:
    """One bit of every copy on drive d0 is another one."""
    _, layout = site.place(cell)
    for file in dict(layout.directories)["d0"].iterdir():
        data = file.read_bytes()
        file.unlink()  # it is a link to what others have
        file.write_bytes(data)
        flip(file, len(data) // 3, 1)


def test_a_flipped_bit_in_a_replica_is_seen_by_the_answer(replica: Site) -> None:
    prompts = [prompt()]
    plain = matrix.baseline(replica.model, prompts)
    cell = cell_with(drives=2, placement="split")
    matrix.run(replica, cell, prompts, plain)
    spoil(replica, cell)
    with pytest.raises(AssertionError, match=OTHER_BITS):
        matrix.run(replica, cell, prompts, plain)


def test_with_a_manifest_it_costs_a_read_and_no_bit(replica: Site) -> None:
    plain = matrix.baseline(replica.model, [prompt()])[0]
    cell = cell_with(drives=2)
    spoil(replica, cell)
    for verify in ("first", "off"):
        with matrix.opened(replica, cell | {"verify": verify}) as (engine, doings, _):
            Turns(doings, "d0", "model")
            said = matrix.answer(engine.session(), prompt())
            if verify == "first":
                matrix.check_same(said, plain, "with a manifest")
                with pytest.raises(AssertionError, match="reads from d0 failed"):
                    matrix.check_books(engine)
            else:
                with pytest.raises(AssertionError, match=OTHER_BITS):
                    matrix.check_same(said, plain, "without")
