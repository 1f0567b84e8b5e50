"""The next token: greedy, or drawn by a seed, the same on every machine."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from runtime.generate import Engine, Sampler, greedy
from runtime.generate.sampling import uniform

LOGITS = np.array([0.5, 2.0, -1.0, 2.0, 1.5, -np.inf], np.float32)


def test_greedy_is_the_lowest_of_the_largest() -> None:
    assert greedy(LOGITS, 0) == 1


def test_the_numbers_that_decide_are_what_they_always_were() -> None:
    """Philox 4×64-10, whose published answer to counter 0 and key 0 begins 16554d9eca36314c."""
    before_zero = np.full(4, (1 << 64) - 1, np.uint64)
    assert int(np.random.Philox(key=np.zeros(2, np.uint64), counter=before_zero).random_raw()) == 0x16554D9ECA36314C
    assert uniform(0, 0).hex() == "0x1.7a5d3204726c0p-7"
    assert uniform(7, 1).hex() == "0x1.5352da77ecee8p-4"
    assert uniform((1 << 64) - 1, 1 << 40).hex() == "0x1.a0d73dcc74cb4p-3"
    assert uniform((1 << 64) - 1, 0) != uniform((1 << 64) - 2, 0)


def test_draws_follow_the_probabilities() -> None:
    sampler, n = Sampler(1.0, 1.0, 1), 4_000
    counts = np.bincount([sampler(LOGITS, place) for place in range(n)], minlength=len(LOGITS))
    weights = np.exp(LOGITS.astype(np.float64))
    assert np.abs(counts / n - weights / weights.sum()).max() < 0.02
    assert counts[5] == 0


def test_a_draw_depends_on_its_place_and_not_on_those_before() -> None:
    sampler = Sampler(0.7, 0.9, 99)
    forward = [sampler(LOGITS, place) for place in range(50)]
    backward = [sampler(LOGITS, place) for place in reversed(range(50))]
    assert forward == backward[::-1]
    assert forward != [Sampler(0.7, 0.9, 100)(LOGITS, place) for place in range(50)]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, {1}), (0.3, {1}), (0.4, {1, 3}), (0.8, {1, 3, 4}), (1.0, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    """Probabilities: tokens 1 and 3 have 0.347 each, 4 has 0.210, 0 has 0.077, 2 has 0.017."""
    assert {Sampler(1.0, top_p, 5)(LOGITS, place) for place in range(400)} == kept


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_a_temperature_near_zero_is_all_but_greedy(temperature: float) -> None:
    assert {Sampler(temperature, 1.0, 3)(LOGITS, place) for place in range(60)} == {1, 3}


def test_every_edge_of_the_vocabulary_can_be_drawn_and_nothing_beyond() -> None:
    flat = np.zeros(3)
    drawn = {Sampler(2.0, 1.0, seed)(flat, 0) for seed in range(100)}
    assert drawn == {0, 1, 2}
    assert all(0 <= Fraction(uniform(seed, 0)) < 1 for seed in ((1 << 64) - 1, 0))


def test_a_session_draws_the_same_tokens_in_one_go_or_resumed(embedded_engine: Engine) -> None:
    """The place counts from the beginning of the conversation, so a snapshot changes no draw."""
    engine, choose = embedded_engine, Sampler(1.5, 1.0, 4)
    prompt = [5, 6, 7, 8]
    session = engine.session()
    steps = []
    for step in session.generate(prompt, 12, choose=choose, stop_ids=[]):
        steps.append(step.token_id)
        if len(steps) == 6:
            snapshot = session.snapshot()
    assert snapshot is not None
    resumed = engine.resume(snapshot).generate(prompt + steps[:6], 6, choose=choose, stop_ids=[])
    assert [step.token_id for step in resumed] == steps[6:]
    cold = engine.session().generate(prompt + steps[:6], 6, choose=choose, stop_ids=[])
    assert [step.token_id for step in cold] == steps[6:]
    assert steps != [step.token_id for step in engine.session().generate(prompt, 12, stop_ids=[])]
