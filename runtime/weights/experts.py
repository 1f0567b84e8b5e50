"""The expert store: what the model asks for routed experts.

`plan` names what a layer needs and yields each expert as it is at hand; the model calls `release` when it has
computed with it. Between tokens experts stay in a cache of a fixed number of bytes; what is being read counts in it,
guesses included. The answer never depends on what is cached or guessed.

What goes first when room is needed is what is least likely to be wanted when its layer comes next (`worth.py`);
an expert that is in use is never dropped. What is dropped while the backend is still busy with it keeps its room until
more is wanted, and some are waited for together: a device that was waited for after each expert would stand still.

A guess (`hint`) is read when the drives have nothing better to do. It has a place of its own only as far as the
budget goes beyond one layer's top-k, takes the place of nothing that is more likely to be wanted, and gives its own
up to whatever is wanted for sure. When its layer comes, each one is settled: it has landed in time, is under way and
becomes demand, or is not wanted and is cancelled. Every guessed byte is in exactly one account of `Guesses`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from runtime.checkpoint import Checkpoint, PackedExpert
from runtime.errors import DoesNotFitError
from runtime.ops import Ops, Weight
from runtime.progress import Pulse
from runtime.weights.heat import Heat
from runtime.weights.reads import Arrival, PlainReads, Reads, Release
from runtime.weights.worth import CHANCE, Key, Worth

WAITED_SHARE = 4
"""The room is divided by this: so many experts are waited for at once, while the rest is read into."""

SPARE_GUESSES = 2
"""Guesses at once beyond as many as landed in time for the layer before."""


@dataclass
class Guesses:
    """Bytes of guessed experts, each in whole: issued = in time + late + cancelled + wasted + open, always.

    issued: the reads that were asked for. in_time: landed before they were wanted. late: under way when they were
    wanted, and not read again. cancelled: not landed when nobody wanted them, or their room was needed; some of it
    may have been read. wasted: landed and dropped, never wanted.
    """

    issued: int = 0
    in_time: int = 0
    late: int = 0
    cancelled: int = 0
    wasted: int = 0

    @property
    def open(self) -> int:
        """Under way or landed, and not wanted yet."""
        return self.issued - self.in_time - self.late - self.cancelled - self.wasted


@dataclass
class CacheStats:
    """Counts since the store was opened.

    `wanted` counts each distinct expert of each plan, `hits` those that were held, guesses that had landed among them,
    and `reads` those that were read to be used, ahead of time or then; `bytes_read` are their packed bytes.
    `bytes_held` is memory, of experts that are being read too.
    """

    wanted: int = 0
    hits: int = 0
    reads: int = 0
    evictions: int = 0
    bytes_read: int = 0
    bytes_held: int = 0
    peak_bytes: int = 0
    guesses: Guesses = field(default_factory=Guesses)

    @property
    def misses(self) -> int:
        """Experts that were wanted and not held."""
        return self.wanted - self.hits


def staging_floor(checkpoint: Checkpoint, unit_bytes: int | None = None) -> int:
    """The smallest legal budget in bytes: one layer's top-k experts, of `unit_bytes` each where buffers are larger."""
    return checkpoint.config.num_experts_per_token * (unit_bytes or checkpoint.expert_nbytes)


def check_budget(budget_bytes: int, top_k: int, floor: int) -> None:
    """Raise DoesNotFitError when the budget is below what one layer's top-k experts take."""
    if budget_bytes < floor:
        raise DoesNotFitError(
            f"an expert cache of {budget_bytes:,} bytes was asked for, but one layer's top-{top_k} experts take "
            f"{floor:,}: give --expert-cache at least that"
        )


@dataclass(slots=True)
class _Held:
    """An expert in memory: as it was read, then in the backend's form. guess: it was guessed and never wanted."""

    packed: PackedExpert | None
    release: Release
    weight: Weight = None
    guess: bool = False

    def use(self, ops: Ops) -> Weight:
        """The weights, in the backend's form."""
        if self.packed is not None:
            self.weight = ops.expert(self.packed)
            self.packed = None
        return self.weight

    def busy(self, ops: Ops) -> bool:
        """Whether the backend may still look at the memory."""
        return self.packed is None and ops.busy(self.weight)


class ExpertStore:
    """Has experts read and keeps up to `budget_bytes` of them, those that are being read included.

    With `reuse` off, nothing is kept to be used again (`--expert-cache off`), and nothing guessed. `reads`: where
    they come from; the model directory, plainly, when nothing is given. `heat`: what is known of the experts, and
    learned here. Raises DoesNotFitError when the budget is below one layer's top-k.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        budget_bytes: int,
        reuse: bool = True,
        reads: Reads | None = None,
        heat: Heat | None = None,
    ) -> None:
        self._reads = reads or PlainReads(checkpoint)
        floor = staging_floor(checkpoint, self._reads.unit_bytes)
        check_budget(budget_bytes, checkpoint.config.num_experts_per_token, floor)
        self.budget_bytes = budget_bytes
        self.reuse = reuse
        self.stats = CacheStats()
        spare = budget_bytes // self._reads.unit_bytes - checkpoint.config.num_experts_per_token
        self.guess_limit = min(spare, self._reads.guesses) if reuse else 0
        """How many guessed experts may be under way, or landed and unsettled, at once."""
        self._pace = self.guess_limit
        self.waits = self._reads.waits
        self.heat = heat
        self._checkpoint = checkpoint
        self._ops = ops
        self._worth = Worth(checkpoint.config.moe_layers, checkpoint.config.num_experts, heat)
        self._held: dict[Key, _Held] = {}
        self._in_use: set[Key] = set()
        self._leaving: list[_Held] = []
        """Dropped, and the backend was busy with them."""
        self._waited = max(1, budget_bytes // self._reads.unit_bytes // WAITED_SHARE)
        self._under_way: set[Key] = set()
        self._missing: deque[int] = deque()
        self._guessed: dict[Key, None] = {}
        self._wishes: deque[Key] = deque()
        self._wish_worth = 0.0

    # --- for the model ---

    def plan(
        self, layer: int, ids: npt.NDArray[np.int64], pulse: Pulse | None = None
    ) -> Generator[tuple[int, Weight], None, None]:
        """Yield each distinct expert of ids [T, k] once, with its weights: those at hand first, then as they land.

        What is missing is asked for here and now, in disk order, as far as the budget goes; the rest follows as
        experts are released. Close it when not all are taken: what is not released by then is. One plan at a time.
        Raises StorageError when an expert cannot be read, CheckpointError when its bytes cannot be weights, and what
        `pulse` raises.
        """
        begun = self._plan(layer, ids, pulse)
        next(begun)
        return begun

    def release(self, layer: int, expert: int) -> None:
        """The model has computed with the expert: it may be dropped."""
        self._in_use.discard((layer, expert))
        if not self.reuse:
            self._drop((layer, expert))

    def hint(self, layer: int, experts: Iterable[int], chance: float) -> None:
        """`layer` may come to want these, the likeliest first, each with this chance. Replaces the last hint."""
        self._wish_worth = chance / CHANCE
        self._wishes = deque((layer, expert) for expert in experts)
        self._guess()

    def end_of_token(self) -> None:
        """A pass through all layers is complete."""
        if self.heat is not None:
            self.heat.end_of_pass()

    # --- a plan ---

    def _plan(
        self, layer: int, ids: npt.NDArray[np.int64], pulse: Pulse | None
    ) -> Generator[tuple[int, Weight], None, None]:
        """`plan`, with a first stop where everything is under way and nothing is taken."""
        self._finish()  # the model has waited for the device to have ids
        chosen = np.unique(ids)
        wanted = {(layer, int(e)) for e in chosen}
        late = self._settle(layer, wanted)
        cached = sorted(key for key in wanted if key in self._held)
        self._missing = deque(self._checkpoint.disk_order(layer, [e for _, e in wanted.difference(cached, late)]))
        self._in_use.update(cached)  # so that no read below evicts one of them
        self._count(wanted, cached)
        self._worth.visit(layer, chosen)
        try:
            wave = self._submit(layer, [e for _, e in late])
            yield -1, None
            for key in cached:
                if pulse is not None:
                    pulse()
                yield key[1], self._held[key].use(self._ops)
                wave += self._submit(layer)
            while wave or self._missing:
                if not wave:
                    raise AssertionError("the expert store is full of experts in use: release each one before the next")
                with closing(self._reads.landed(layer, wave, pulse)) as landing:  # type: ignore[type-var]
                    wave = []
                    for arrival in landing:
                        yield arrival.expert, self._take(layer, arrival)
                        if pulse is not None:
                            pulse()
                        wave += self._submit(layer)
        finally:  # also when the model stopped in the middle and released nothing
            self._missing.clear()
            if self._under_way:
                self._reads.cancel(layer, [e for _, e in self._under_way])
                self.stats.bytes_held -= len(self._under_way) * self._reads.unit_bytes
                self._under_way.clear()
            for key in wanted & self._in_use:
                self.release(*key)

    def _count(self, wanted: set[Key], cached: list[Key]) -> None:
        self.stats.wanted += len(wanted)
        self.stats.hits += len(cached)
        for key in cached:
            if (held := self._held[key]).guess:
                held.guess = False
                self.stats.guesses.in_time += self._checkpoint.expert_nbytes
                self._reads.judge(*key, needed=True)
                self._count_read()

    def _count_read(self) -> None:
        self.stats.reads += 1
        self.stats.bytes_read += self._checkpoint.expert_nbytes

    def _submit(self, layer: int, late: list[int] | None = None) -> list[int]:
        """Have as many of what is missing read as may be under way and there is room for; then guesses.

        late: of what was guessed, what is wanted and has not landed. It has its room.
        """
        wave = late or []
        self._under_way.update((layer, e) for e in wave)
        while self._missing and len(self._under_way) < self._reads.ahead and self._make_room():
            wave.append(self._missing.popleft())
            self._under_way.add((layer, wave[-1]))
        if wave:
            self._reads.submit(layer, wave)
        if self._wishes and not self._missing:
            self._guess()
        return wave

    def _take(self, layer: int, arrival: Arrival) -> Weight:
        """An expert has landed."""
        key, held = (layer, arrival.expert), _Held(arrival.packed, arrival.release)
        try:
            weight = held.use(self._ops)
        except BaseException:
            held.release()
            raise
        self._under_way.remove(key)
        self._hold(key, held)
        self._in_use.add(key)
        self._count_read()
        return weight

    # --- guesses ---

    def _settle(self, layer: int, wanted: set[Key]) -> list[Key]:
        """The layer is there: what was guessed for it is held, cancelled, or wanted and under way. Returns the last."""
        self._wishes.clear()
        guessed = [key for key in self._guessed if key[0] == layer]
        if not guessed:
            return []
        self._collect(layer, guessed)
        self._set_pace(len(guessed), sum(key in self._held for key in guessed))
        late = [key for key in guessed if key in self._guessed and key in wanted]
        for key in late:
            del self._guessed[key]
        self.stats.guesses.late += len(late) * self._checkpoint.expert_nbytes
        self._give_up([key for key in guessed if key in self._guessed])
        return late

    def _set_pace(self, guessed: int, landed: int) -> None:
        """Guess no more than drives have had time for of late: what waits to be read holds memory for nothing."""
        if landed < guessed:
            self._pace = landed + SPARE_GUESSES
        elif guessed == self._pace:
            self._pace *= 2

    def _collect(self, layer: int, guessed: list[Key]) -> None:
        """Hold what has landed of these; what will not come makes room."""
        arrivals, gone = self._reads.settle(layer, [e for _, e in guessed])
        for arrival in arrivals:
            del self._guessed[layer, arrival.expert]
            self._hold((layer, arrival.expert), _Held(arrival.packed, arrival.release, guess=True))
        self._give_up([(layer, e) for e in gone])

    def _give_up(self, keys: list[Key]) -> None:
        """These guesses are not read any more, or never were."""
        for key in keys:
            del self._guessed[key]
            self._reads.cancel(key[0], [key[1]])
            self.stats.bytes_held -= self._reads.unit_bytes
            self.stats.guesses.cancelled += self._checkpoint.expert_nbytes

    def _guess(self) -> None:
        """Have wishes read, as far as there is room for them and every read that is wanted for sure has begun."""
        begun: list[int] = []
        while self._wishes and not self._missing and len(self._guessed) < min(self._pace, self.guess_limit):
            key = self._wishes[0]
            if key not in self._held and key not in self._guessed and key not in self._under_way:
                if not self._make_room(self._wish_worth):
                    break
                self._guessed[key] = None
                begun.append(key[1])
            self._wishes.popleft()
        if begun:
            self.stats.guesses.issued += len(begun) * self._checkpoint.expert_nbytes
            self._reads.guess(key[0], begun)

    # --- room ---

    def _make_room(self, worth: float | None = None) -> bool:
        """Room for one more: take it, after dropping what is worth least. False when all is in use.

        For a guess, only what is worth less than it goes; for demand, guesses go too. What is leaving is waited for
        when there is enough of it, or nothing to read meanwhile.
        """
        while self.stats.bytes_held + self._reads.unit_bytes > self.budget_bytes:
            enough = len(self._leaving) >= min(self._waited, len(self._missing)) or not self._under_way
            if self._leaving and enough:
                self._finish()
                continue
            idle = self._worth.least(self._in_use, worth)
            if idle is not None:
                self._drop(idle)
                self.stats.evictions += 1
            elif self._guessed and worth is None:
                self._give_up([next(reversed(self._guessed))])
            else:
                return False
        self.stats.bytes_held += self._reads.unit_bytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.stats.bytes_held)
        return True

    def _hold(self, key: Key, held: _Held) -> None:
        self._held[key] = held
        self._worth.enter(key)

    def _drop(self, key: Key) -> None:
        held = self._held.pop(key)
        self._worth.leave(key)
        if held.guess:
            self.stats.guesses.wasted += self._checkpoint.expert_nbytes
            self._reads.judge(*key, needed=False)
        if held.busy(self._ops):
            self._leaving.append(held)
        else:
            self._free(held)

    def _finish(self) -> None:
        """What is leaving gives its memory back."""
        if self._leaving:
            self._ops.finish([held.weight for held in self._leaving])
            for held in self._leaving:
                self._free(held)
            self._leaving.clear()

    def _free(self, held: _Held) -> None:
        self.stats.bytes_held -= self._reads.unit_bytes
        held.release()
