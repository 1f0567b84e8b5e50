"""How much may be read on a guess at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import pairwise

from benchmarks.rejected.trial import LAYERS, REST_S, TOKENS, Outcome, Trial, machine
from runtime.drives.jobs import Job, Priority
from runtime.forecast.ladder import Reading


def unbounded_prefetch(trial: Trial) -> Outcome:
    """Guesses are read as what is wanted for sure is: by every reader a drive has, in slices of any length."""
    bounded, unbounded = waited_s(trial, Priority.PREFETCH), waited_s(trial, Priority.DEMAND)
    return Outcome("virtual s/token waited: guesses bounded | on every reader", bounded, unbounded)


@cache
def waited_s(trial: Trial, guesses: Priority | None) -> float:
    """Virtual seconds a token waits for its experts. While one layer is read and computed, the next one's experts of
    the token before are guessed and read with this priority; None: not at all."""
    world, rung = Reading(machine(), LAYERS).world, machine()
    tokens = trial.routes[: TOKENS + 1].tolist()
    waited, barrier, guessed = 0.0, 0, set[int]()

    def jobs(row: int, experts: Iterable[int], priority: Priority) -> list[Job]:
        return [Job((row, e), rung.spans(row, LAYERS[row], e), priority, barrier) for e in sorted(experts)]

    for before, token in pairwise(tokens):
        for row, experts in enumerate(token):
            wanted, open_ = set(experts), {e for e in guessed if world.scheduler.is_live((row, e))}
            world.cancel((row, e) for e in sorted(open_ - wanted))
            world.promote([(row, e) for e in sorted(open_ & wanted)], barrier)
            world.submit(jobs(row, wanted - guessed, Priority.DEMAND))
            barrier += 1
            guessed = set(before[row + 1]) if guesses is not None and row + 1 < len(token) else set()
            if guesses is not None:
                world.submit(jobs(row + 1, guessed, guesses))
            began = world.now
            waited += world.run(waiting_for=[(row, e) for e in experts]) - began
            world.run(until=world.now + REST_S)
    return waited / (len(tokens) - 1)
