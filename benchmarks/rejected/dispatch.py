"""Who reads what: dispatchers that lose against the production scheduler on the same barriers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any
from unittest import mock

from benchmarks.rejected.trial import EXPERT_BYTES, Outcome, Trial, token_s
from runtime.drives import ledger, scheduler
from runtime.drives.jobs import MIB, Job, Key, Policy, Span
from runtime.drives.ledger import DriveLedger, InFlight
from runtime.drives.rates import LearnedRate
from runtime.drives.virtual import VirtualDrive, World

TRUNK_BYTES = 58_600_000_000
"""Of the int8 trunk, which lies on the model's own drive alone."""
SLOWED, SLOWED_TO = "green", 0.3
"""The drive that has become slow since it was probed, and what is left of its rate."""


def whole_reads(trial: Trial) -> Outcome:
    """Each expert is read whole by one holder, chosen when the read starts."""
    return Outcome("virtual s/token: cut over all holders | whole from one", token_s(trial), token_s(trial, Uncut))


def equal_stripes(trial: Trial) -> Outcome:
    """Each expert is cut into equal parts, one for each holder, as in a RAID-0."""
    return Outcome("virtual s/token: shares by rate | equal shares", token_s(trial), token_s(trial, EqualStripes))


def first_holder(trial: Trial) -> Outcome:
    """Each expert is read from the first drive that holds it, the fastest being asked first."""
    return Outcome("virtual s/token: any holder | the first one", token_s(trial), token_s(trial, FirstHolder))


def cumulative_clocks(trial: Trial) -> Outcome:
    """What a drive was ever given counts against it, though it has long been read."""
    counted = "virtual s/token after a trunk: what is in flight counts | all there was"
    return Outcome(counted, token_s(trial, AfterTrunk), token_s(trial, Cumulative))


def rates_of_a_probe(trial: Trial) -> Outcome:
    """Drives are believed to be as fast as they once were."""
    counted = f"virtual s/token, a drive at {SLOWED_TO:.0%} of its probe: learned | believed"
    return Outcome(counted, token_s(trial, Slowed), token_s(trial, Unlearned))


def one_read_at_a_time(trial: Trial) -> Outcome:
    """A drive is asked for the next slice when it has delivered the last."""
    return Outcome("virtual s/token: 4 reads in flight a drive | 1", token_s(trial), token_s(trial, OneReader))


class Uncut(World):
    """The smallest slice is an expert."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        whole = -(-EXPERT_BYTES // MIB) * MIB
        super().__init__(drives, policy=Policy(min_slice_bytes=whole, prefetch_slice_bytes=2 * whole + MIB), **facts)


class Bound(World):
    """Bytes are bound to drives before the scheduler sees them: it gets jobs of one holder each."""

    def bind(self, job: Job) -> Iterable[Span]:
        """Which drive reads what of the job."""
        raise NotImplementedError

    def submit(self, jobs: Iterable[Job]) -> None:
        super().submit(replace(job, key=(job.key, s.drive), spans=(s,)) for job in jobs for s in self.bind(job))

    def run(self, until: float = inf, waiting_for: Iterable[Key] = ()) -> float:
        return super().run(until, [(key, drive) for key in waiting_for for drive in self.devices])


class EqualStripes(Bound):
    """Parts of one length, but for the grain of the cuts."""

    def bind(self, job: Job) -> Iterable[Span]:
        cuts = [job.length * n // len(job.spans) // MIB * MIB for n in range(len(job.spans))] + [job.length]
        for span, start, stop in zip(job.spans, cuts, cuts[1:], strict=False):
            yield replace(span, offset=span.offset + start, length=stop - start)


class FirstHolder(Bound):
    """Holders in the order in which drives were named."""

    def bind(self, job: Job) -> Iterable[Span]:
        return job.spans[:1]


class AfterTrunk(World):
    """Where a trunk has just been loaded from the first drive, the only one that has it."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        super().__init__(drives, **facts)
        block = Policy().max_slice_bytes
        self.submit(Job(n, (Span(drives[0].name, "trunk", 0, block),)) for n in range(TRUNK_BYTES // block))
        self.run()


class Undrained(DriveLedger):
    """Is free once all that it was ever given would have been read."""

    given_s = 0.0

    def free_in(self, now: float) -> float:
        return self.given_s

    def begin(self, read: InFlight, now: float, rate: float) -> None:
        super().begin(read, now, rate)
        self.given_s += read.slice.length / rate


class Cumulative(AfterTrunk):
    """The scheduler keeps such books of its drives."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        with mock.patch.object(scheduler, "DriveLedger", Undrained):
            super().__init__(drives, **facts)


class Slowed(World):
    """One drive is slower than the scheduler was told."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        slowed = [replace(d, rate=d.rate * SLOWED_TO, believed=d.rate) if d.name == SLOWED else d for d in drives]
        super().__init__(slowed, **facts)


class OneReader(World):
    """No drive has a second read in flight."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        super().__init__([replace(drive, depth=1) for drive in drives], **facts)


class Unlearning(LearnedRate):
    """Stays what it was told."""

    def _learn(self, pace: float, weight: float) -> None:
        pass


class Unlearned(Slowed):
    """The scheduler learns nothing of it."""

    def __init__(self, drives: Sequence[VirtualDrive], **facts: Any) -> None:
        with mock.patch.object(ledger, "LearnedRate", Unlearning):
            super().__init__(drives, **facts)
