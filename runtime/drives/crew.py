"""The threads that read from one drive, and what they count.

A crew does errands: a slice to be read to its place in memory, or a check of whether the drive answers. It has a
thread for every errand under way and makes one when it needs one; a thread that hangs in a read is simply not there
for the next errand. Threads are daemons: nothing waits for one that hangs.

`send`, `check`, `note`, `credit`, `waiting` and the counts belong to the reader's lock; reading happens without it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from queue import SimpleQueue

from runtime.drives.buffers import aligned
from runtime.drives.device import Device, DeviceError
from runtime.drives.jobs import Completed, DriveChecked, DriveSpec, Failed, Fault, Kind, Slice, Span
from runtime.drives.wakeup import answer_at_once

CHECK = "check"
"""The kind under which reads are counted that only look whether a drive answers."""
SAMPLES = 4
"""Files remembered of each drive for checks: of the first asked for, and of the last read well. A single bad file
condemns no drive."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """One read as it went, times by `time.monotonic`. queued: when its job was submitted."""

    slice: Slice
    queued: float
    started: float
    landed: float
    device_bytes: int
    fault: Fault | None
    detail: str


@dataclass(slots=True)
class ReadCounts:
    """Reads of one drive or of one kind.

    reads and errors: those that ended well, and that did not; checks and failed_checks: those of them that only looked
    whether the drive answers. Bytes are those of the former; device_bytes is what the
    drive moved for them: requested_bytes ≤ device_bytes ≤ requested_bytes + two blocks for each read. checked_bytes:
    the part of requested_bytes that checks read. spoiled_bytes: moved, but not what they should be. retries, hedges:
    reads started because another failed, is late. landed_last, of a drive: how often it brought the last slice of all
    that was wanted together.
    """

    requested_bytes: int = 0
    device_bytes: int = 0
    reads: int = 0
    errors: int = 0
    checks: int = 0
    failed_checks: int = 0
    retries: int = 0
    hedges: int = 0
    checked_bytes: int = 0
    spoiled_bytes: int = 0
    landed_last: int = 0
    busy_s: float = 0.0

    def add(self, errand: Errand, report: Report) -> None:
        if errand.slice is not None:
            self.retries += errand.slice.kind is Kind.RETRY
            self.hedges += errand.slice.kind is Kind.HEDGE
        self.busy_s += report.seconds
        if report.fault is not None:
            self.errors += 1
            self.failed_checks += errand.slice is None
            self.spoiled_bytes += report.moved
        elif report.requested:
            self.reads += 1
            self.checks += errand.slice is None
            self.requested_bytes += report.requested
            self.checked_bytes += report.requested if errand.slice is None else 0
            self.device_bytes += report.moved

    def merge(self, other: ReadCounts) -> None:
        """Count also what the other has counted."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class Errand:
    """A slice to be read to its place in memory, or, with no slice, a check of `span`, if there is anything to read."""

    slice: Slice | None
    view: memoryview | None
    span: Span | None
    kind: str
    queued: float

    def failure(self, fault: Fault, detail: str) -> str:
        """What was to be read, and why it failed, on one line: for people."""
        what, part = "", self.slice or self.span
        if self.slice is not None:
            match self.slice.key:
                case (int(layer), int(expert)):
                    what = f"layer {layer} expert {expert}: "
                case key:
                    what = f"{key}: "
        file = "" if part is None or part.file in detail else f"{part.file}: "
        return " ".join(f"{what}{fault.value}: {file}{detail}".split())


@dataclass(frozen=True, slots=True)
class Report:
    """How an errand went."""

    event: Completed | Failed | DriveChecked
    requested: int = 0
    moved: int = 0
    seconds: float = 0.0
    fault: Fault | None = None


Verify = Callable[[Slice, memoryview], str]


class Crew:
    """A drive and its threads. waiting: threads that will take an errand at once. checking: checks under way."""

    def __init__(
        self,
        device: Device,
        spec: DriveSpec,
        report: Callable[[Crew, Errand, Report], None],
        verify: Verify | None = None,
        trace: Callable[[ReadRecord], None] | None = None,
    ) -> None:
        """`report` is called on the thread that did the errand, when it has really ended."""
        self.device, self.spec, self.counts = device, spec, ReadCounts()
        self.last_failure = ""
        self.threads: list[threading.Thread] = []
        self.waiting = self.checking = 0
        self._report, self._verify, self._trace = report, verify, trace
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._seen: list[Span] = []
        self._read_well: deque[Span] = deque(maxlen=SAMPLES)
        self._checks = 0
        # On a busy machine a new thread is tens of milliseconds away, and a read's deadline would not wait for it.
        for _ in range(spec.depth):
            self._hire()
            self.waiting += 1

    def _hire(self) -> None:
        name = f"drives-{self.spec.name}-{len(self.threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        thread.start()
        self.threads.append(thread)

    # --- with the reader's lock held ---

    def note(self, span: Span) -> None:
        """The drive should have this span."""
        if len(self._seen) < SAMPLES and all(span.file != s.file for s in self._seen):
            self._seen.append(span)

    def credit(self, part: Slice) -> None:
        """The drive has read this well."""
        if all(part.file != s.file for s in self._read_well):
            self._read_well.append(Span(part.drive, part.file, part.offset, part.length))

    def send(self, errand: Errand) -> None:
        """To a thread that waits, or to a new one."""
        self._errands.put(errand)
        if self.waiting:
            self.waiting -= 1
        else:
            self._hire()

    def check(self, nbytes: int) -> None:
        """Every check reads another file, as far as some are known, and then another part of it."""
        span, samples = None, [*self._read_well, *self._seen]
        if samples:
            whole = samples[self._checks % len(samples)]
            size = min(nbytes, whole.length)
            part = self._checks // len(samples) % (whole.length // size)
            span = Span(whole.drive, whole.file, whole.offset + part * size, size)
        self._checks += 1
        self.checking += 1
        self.send(Errand(None, None, span, CHECK, time.monotonic()))

    def dismiss(self) -> None:
        """Each thread ends when it has done what it was sent for."""
        for _ in self.threads:
            self._errands.put(None)

    # --- the threads ---

    def _work(self) -> None:
        answer_at_once()
        while (errand := self._errands.get()) is not None:
            report = self._look(errand.span) if errand.slice is None else self._read(errand, errand.slice)
            self._report(self, errand, report)
            del errand, report  # they hold the buffer

    def _read(self, errand: Errand, part: Slice) -> Report:
        view = errand.view
        assert view is not None
        fault, detail, moved = None, "", 0
        started = time.monotonic()
        try:
            moved = self.device.read(part.file, part.offset, view)
            if self._verify is not None and (detail := self._verify(part, view)):
                fault = Fault.WRONG
        except DeviceError as error:
            fault, detail = error.fault, str(error)
        except Exception as error:  # whatever went wrong, the scheduler must hear that the read has ended
            fault, detail = Fault.IO, f"{part.file} at {part.offset}: {error!r}"
        landed = time.monotonic()
        if self._trace is not None:
            self._trace(ReadRecord(part, errand.queued, started, landed, moved, fault, detail))
        event = Completed(part.id) if fault is None else Failed(part.id, fault, detail)
        return Report(event, part.length, moved, landed - started, fault)

    def _look(self, span: Span | None) -> Report:
        name = self.spec.name
        if span is None:
            return Report(DriveChecked(name, ok=True))
        try:
            into = aligned(span.length, self.device.alignment, span.offset)
            started = time.monotonic()
            moved = self.device.read(span.file, span.offset, into)
            seconds = time.monotonic() - started
        except DeviceError as error:
            return Report(DriveChecked(name, ok=False, detail=str(error)), span.length, fault=error.fault)
        except Exception as error:
            return Report(DriveChecked(name, ok=False, detail=repr(error)), span.length, fault=Fault.IO)
        return Report(DriveChecked(name, True, span.length, seconds), span.length, moved, seconds)
