"""The expert store: what is read, what is kept, what goes first, and what a stop in the middle leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.errors import DoesNotFitError
from runtime.ops.reference import ReferenceOps
from runtime.weights.experts import ExpertStore, staging_floor
from runtime.weights.reads import PlainReads

LAYER = 1


@pytest.fixture
def checkpoint(tiny: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(tiny) as checkpoint:
        yield checkpoint


def store(checkpoint: Checkpoint, experts: int, reuse: bool = True) -> ExpertStore:
    return ExpertStore(checkpoint, ReferenceOps(), experts * checkpoint.expert_nbytes, reuse)


def take(experts: ExpertStore, *ids: int, layer: int = LAYER) -> list[int]:
    """Ask for experts as the model does; their order of arrival."""
    arrived = []
    for expert, _ in experts.plan(layer, np.array([ids])):
        arrived.append(expert)
        experts.release(layer, expert)
    return arrived


def test_each_distinct_expert_comes_once_with_its_own_bytes(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 8)
    ids = np.array([[3, 7, 1, 5], [7, 3, 9, 0]])
    arrived = {}
    for expert, packed in experts.plan(LAYER, ids):
        assert expert not in arrived
        arrived[expert] = packed
        experts.release(LAYER, expert)
    assert set(arrived) == {0, 1, 3, 5, 7, 9}
    for expert, packed in arrived.items():
        for got, wanted in zip(packed, checkpoint.read_expert(LAYER, expert), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_misses_are_read_in_disk_order_after_the_hits(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 16)
    everything = list(range(16))
    order = take(experts, *everything)
    offsets = [checkpoint.expert_spans(LAYER, expert)[0].offset for expert in order]
    assert offsets == sorted(offsets)
    assert order != everything, "this checkpoint has its experts in id order and shows nothing"
    fresh = store(checkpoint, 16)
    take(fresh, order[-1])
    assert take(fresh, *everything)[0] == order[-1]


def test_what_was_used_least_recently_goes_first(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 4)
    for expert in (0, 1, 2, 3):
        take(experts, expert)
    take(experts, 0)  # now 1 is the oldest
    take(experts, 4)
    assert (experts.stats.evictions, experts.stats.reads) == (1, 5)
    take(experts, 0, 2, 3, 4)
    assert experts.stats.reads == 5
    take(experts, 1)
    assert experts.stats.reads == 6


def test_an_expert_in_use_is_never_dropped(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 4)
    take(experts, 0, 1, 2, 3)
    plan = experts.plan(LAYER, np.array([[0, 9]]))
    assert next(plan)[0] == 0  # held, the oldest, and not released
    assert next(plan)[0] == 9
    reads = experts.stats.reads
    plan.close()
    take(experts, 0)
    assert experts.stats.reads == reads


def test_a_caller_that_releases_nothing_is_told(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 4)
    with pytest.raises(AssertionError, match="release each one"):
        list(experts.plan(LAYER, np.arange(5)[None]))
    assert len(take(experts, 0, 1, 2, 3, 4)) == 5


@pytest.mark.parametrize("budget", [4, 5, 16])
def test_the_budget_holds_at_every_moment(checkpoint: Checkpoint, budget: int) -> None:
    experts = store(checkpoint, budget)
    choose = np.random.default_rng(3)
    for _ in range(50):
        take(experts, *choose.choice(16, 4, replace=False).tolist(), layer=int(choose.integers(1, 9)))
        assert experts.stats.bytes_held <= experts.budget_bytes
    stats = experts.stats
    assert stats.peak_bytes <= experts.budget_bytes
    assert stats.hits + stats.misses == stats.wanted == 200
    assert stats.reads == stats.misses
    assert stats.bytes_read == stats.reads * checkpoint.expert_nbytes
    assert checkpoint.bytes_read >= stats.bytes_read


class Late(ReferenceOps):
    """Computes late: it is busy with every expert it was given until that has been waited for."""

    def __init__(self) -> None:
        self.idle: list[PackedExpert] = []
        self.waits: list[int] = []

    def busy(self, expert: PackedExpert) -> bool:
        return not any(expert is other for other in self.idle)

    def finish(self, experts: Sequence[PackedExpert]) -> None:
        self.idle += experts
        self.waits.append(len(experts))


class Lending(PlainReads):
    """Wants every expert's bytes back, and has several under way at once."""

    def __init__(self, checkpoint: Checkpoint, ops: Late, ahead: int) -> None:
        super().__init__(checkpoint)
        self.ops, self.ahead = ops, ahead
        self.out = 0

    def landed(self, layer: int, experts: Collection[int], pulse: Callable[[], None] | None = None) -> Any:
        for arrival in super().landed(layer, experts, pulse):
            self.out += 1
            yield arrival._replace(release=lambda packed=arrival.packed: self.give_back(packed))

    def give_back(self, packed: PackedExpert) -> None:
        assert not self.ops.busy(packed)
        self.out -= 1


def late_store(checkpoint: Checkpoint, experts: int, reuse: bool, ahead: int) -> tuple[ExpertStore, Late, Lending]:
    ops = Late()
    reads = Lending(checkpoint, ops, ahead)
    return ExpertStore(checkpoint, ops, experts * checkpoint.expert_nbytes, reuse, reads), ops, reads


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("reuse", [True, False])
def test_bytes_are_given_back_when_the_backend_has_finished_with_them(
    checkpoint: Checkpoint, reuse: bool, ahead: int
) -> None:
    experts, _, reads = late_store(checkpoint, 4, reuse, ahead)
    for expert, _ in experts.plan(LAYER, np.arange(9)[None]):
        experts.release(LAYER, expert)
        assert reads.out * checkpoint.expert_nbytes <= experts.stats.bytes_held <= experts.budget_bytes
    assert reads.out <= 4


@pytest.mark.parametrize("reuse", [True, False])
def test_the_backend_is_waited_for_once_for_several_experts_and_only_for_room(
    checkpoint: Checkpoint, reuse: bool
) -> None:
    experts, ops, reads = late_store(checkpoint, 8, reuse, 8)
    take(experts, *range(8))
    assert ops.waits == []
    experts, ops, reads = late_store(checkpoint, 8, reuse, 8)
    take(experts, *range(11))
    assert ops.waits == [2, 1]
    assert experts.stats.evictions == (3 if reuse else 0)
    take(experts, 15, layer=LAYER + 1)
    assert ops.waits == [2, 1, 1 if reuse else 8]
    assert experts.stats.hits == 0
    assert reads.out == (8 if reuse else 1)


def test_without_reuse_nothing_is_kept_even_after_a_stop_in_the_middle(checkpoint: Checkpoint) -> None:
    experts = store(checkpoint, 4, reuse=False)
    plan = experts.plan(LAYER, np.array([[0, 1, 2, 3]]))
    next(plan)
    plan.close()
    assert experts.stats.bytes_held == 0
    take(experts, 0, 1, 2, 3)
    take(experts, 0, 1, 2, 3)
    assert experts.stats.hits == 0
    assert experts.stats.bytes_held == 0


def test_less_than_one_layer_needs_is_refused_with_the_floor(checkpoint: Checkpoint) -> None:
    floor = staging_floor(checkpoint)
    assert floor == 4 * checkpoint.expert_nbytes
    with pytest.raises(DoesNotFitError, match=f"{floor:,}"):
        ExpertStore(checkpoint, ReferenceOps(), floor - 1)
