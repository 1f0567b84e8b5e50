"""Which drives may be given work: rule 5 of the scheduler.

           blamed: STRIKES_OUT          back-off over              check says no, again and again
    READY ----------------------> SUSPECT ----------> (check) ----------------------------------> LOST
      ^  <--------------------------------- check ok ----------------------------------------------|
    NEW --- check ok ---> READY

SUSPECT and LOST drives are checked, one check at a time, after a back-off that doubles with every failure. Nobody
waits for a LOST drive. A check that does not end makes a drive LOST at once, and none follows until it does end.
A READY drive that has read nothing for a while is checked when work comes and passes it by: a drive that was slow
gets no work, and would otherwise never show that it is fast again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from runtime.drives.jobs import Action, CheckDrive, DriveBack, DriveChecked, DriveSuspect, Fault, Policy
from runtime.drives.ledger import DriveLedger, Health

STRIKES_OUT = 3


class Blame(NamedTuple):
    """What a fault says about the copy (is it given up for this job at once?) and about the drive."""

    give_up_copy: bool
    strikes: int


BLAME = {
    Fault.IO: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.GONE: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.LATE: Blame(give_up_copy=False, strikes=STRIKES_OUT),
    Fault.SHORT: Blame(give_up_copy=True, strikes=1),
    Fault.WRONG: Blame(give_up_copy=True, strikes=1),
}
"""A bad copy is not yet a bad drive: three are, with fewer than STRIKES_FORGIVEN good reads in a row between them."""
STRIKES_FORGIVEN = 8
CHECK_WEIGHT = 0.75
"""What one timed check counts in the learned rate of a drive that was READY, SUSPECT or LOST."""


class Roll:
    """The roll of drives by health. `changed` is set when other drives than before may be given work."""

    def __init__(self, drives: Sequence[DriveLedger], policy: Policy) -> None:
        self._drives, self._policy = drives, policy
        self.due = inf
        self.changed = False
        self._call()

    def _call(self) -> None:
        """Bit sets of the drives, and those that may be given work, fastest first."""
        self.ready = sum(d.bit for d in self._drives if d.health is Health.READY)
        self.lost = sum(d.bit for d in self._drives if d.health is Health.LOST)
        self.usable = sorted((d for d in self._drives if d.bit & self.ready), key=lambda d: -d.rate.value)

    def _set(self, drive: DriveLedger, health: Health) -> None:
        drive.health = health
        self._call()
        self.changed = True

    def praise(self, drive: DriveLedger) -> None:
        """A read has ended well."""
        drive.good_reads += 1
        if drive.good_reads == STRIKES_FORGIVEN:
            drive.strikes = 0
        if drive.good_reads == self._policy.forgive_reads:
            drive.back_off_s = self._policy.back_off_s

    def blame(self, drive: DriveLedger, fault: Fault, detail: str, now: float, out: list[Action]) -> None:
        drive.totals.faults += 1
        drive.good_reads = 0
        drive.strikes += BLAME[fault].strikes
        if drive.strikes >= STRIKES_OUT:
            self._suspect(drive, fault, detail, now, out)

    def _suspect(self, drive: DriveLedger, fault: Fault, detail: str, now: float, out: list[Action]) -> None:
        if drive.health in (Health.SUSPECT, Health.LOST):
            return
        drive.trouble = detail
        self._set(drive, Health.SUSPECT)
        self._back_off(drive, now)
        out.append(DriveSuspect(drive.name, fault, detail, drive.retry_at - now))

    def _back_off(self, drive: DriveLedger, now: float) -> None:
        drive.retry_at = now + drive.back_off_s
        drive.back_off_s = min(2 * drive.back_off_s, self._policy.back_off_max_s)
        self.due = min(self.due, drive.retry_at)

    # --- checks ---

    def _check(self, drive: DriveLedger, now: float, out: list[Action]) -> None:
        drive.check_due = now + self._policy.check_timeout_s
        self.due = min(self.due, drive.check_due)
        out.append(CheckDrive(drive.name, self._policy.check_bytes))

    def check_unknown(self, now: float, out: list[Action], stale: bool) -> None:
        """Measure drives of which nothing is known, and, with `stale`, those that new work has passed by."""
        for drive in self._drives:
            if drive.last_used is None:
                drive.last_used = now
            old = stale and drive.health is Health.READY and now - drive.last_used >= self._policy.check_after_s
            if drive.check_due is None and (old or drive.health is Health.NEW):
                self._check(drive, now, out)

    def checked(self, drive: DriveLedger, answer: DriveChecked, now: float, out: list[Action]) -> None:
        """The answer to a check has come, perhaps long after anyone waited for it."""
        too_late = drive.check_due == inf
        drive.check_due = None
        if answer.ok and too_late:
            self._check(drive, now, out)  # reads end again, but this one says nothing about how fast
            return
        if not answer.ok or drive.hung > self._policy.max_hung_reads:
            detail = answer.detail if not answer.ok else f"{drive.hung} reads do not end"
            self._check_failed(drive, detail, now, out)
            return
        if not drive.live:  # beside other reads it took longer than it should
            weight = 1.0 if drive.health is Health.NEW else CHECK_WEIGHT
            drive.rate.measured(answer.nbytes, answer.seconds, weight)
        drive.failed_checks = drive.strikes = drive.good_reads = 0
        drive.last_used = now
        if drive.health in (Health.SUSPECT, Health.LOST):
            out.append(DriveBack(drive.name))
        if drive.health is not Health.READY:
            self._set(drive, Health.READY)

    def _check_failed(self, drive: DriveLedger, detail: str, now: float, out: list[Action]) -> None:
        drive.failed_checks += 1
        drive.trouble = detail
        if drive.health in (Health.READY, Health.NEW):
            self._suspect(drive, Fault.GONE, detail, now, out)
        else:
            self._back_off(drive, now)
        no_answer = drive.check_due == inf
        if (no_answer or drive.failed_checks >= self._policy.lost_after_checks) and drive.health is not Health.LOST:
            self._set(drive, Health.LOST)
            out.append(DriveSuspect(drive.name, Fault.GONE, detail, drive.retry_at - now, lost=True))

    def look_at_what_is_due(self, now: float, out: list[Action]) -> None:
        """Start the checks whose time has come, and stop waiting for those that do not end."""
        for drive in self._drives:
            if drive.check_due is not None:
                if now >= drive.check_due:
                    drive.check_due = inf
                    self._check_failed(drive, "a check does not end", now, out)
            elif drive.health in (Health.SUSPECT, Health.LOST) and now >= drive.retry_at:
                self._check(drive, now, out)
        self.due = inf
        for drive in self._drives:
            if drive.check_due is not None:
                self.due = min(self.due, drive.check_due)
            elif drive.health in (Health.SUSPECT, Health.LOST):
                self.due = min(self.due, drive.retry_at)
