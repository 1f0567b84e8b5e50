"""Watching disks: the system's counters every so many milliseconds, and what they say of each stretch of time.

A thread takes samples at absolute deadlines, so that being late once moves no later sample; whoever looks on takes them
away when it likes. In between there is room for BUFFER of them; more are dropped and counted. Means are over the whole
time; peaks are over windows, and a window that came much too late has no say in them: what piled up meanwhile would
look like speed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from runtime.drives.kernel import DiskCounters, DiskCounts

SCHEMA = "expertstream.monitor/1"
COLUMNS = ("t_s", "disk", "reads", "read_bytes", "read_ms", "in_flight", "writes", "written_bytes", "write_ms")
INTERVAL_S = 0.01
WINDOW_S = 0.1
LATE_S = 0.035
"""A window that is longer than it should be by more than this has no peak."""
BUFFER = 20_000
"""Samples that wait to be taken away."""
HISTORY = 64
"""Windows remembered for what is shown."""
TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters of all disks at one moment, in seconds since the sampler began."""

    t: float
    disks: dict[str, DiskCounts]


class Sampler:
    """Takes samples of `disks` on a thread of its own, from `start` to `stop`.

    missed: deadlines that had passed before their turn came. dropped: samples for which there was no room.
    """

    def __init__(self, disks: Sequence[str], interval_s: float = INTERVAL_S, buffer: int = BUFFER) -> None:
        self.interval_s = interval_s
        self.missed = self.dropped = 0
        self.cpu_s = 0.0
        self._counters = DiskCounters(disks)
        self._samples: deque[Sample] = deque()
        self._buffer = buffer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drives-monitor", daemon=True)

    def start(self) -> Sampler:
        self._thread.start()
        return self

    def stop(self) -> None:
        """The last sample is taken when this returns."""
        self._stop.set()
        self._thread.join()
        self._counters.close()

    def drain(self) -> list[Sample]:
        """The samples since the last call, oldest first."""
        return [self._samples.popleft() for _ in range(len(self._samples))]

    def _run(self) -> None:
        began, tick, last = time.monotonic(), 0, False
        while True:
            now = time.monotonic() - began
            if len(self._samples) < self._buffer:
                self._samples.append(Sample(now, self._counters.read()))
            else:
                self.dropped += 1
            self.cpu_s = time.thread_time()
            if last:
                return
            due = max(tick + 1, ceil((time.monotonic() - began) / self.interval_s))
            self.missed += due - tick - 1
            tick = due
            last = self._stop.wait(began + tick * self.interval_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class Window:
    """What a disk did in a stretch of time. in_flight: requests, on average (Little); now: at its end, -1 unknown."""

    seconds: float
    done: DiskCounts

    @property
    def bytes_per_s(self) -> float:
        return self.done.read_bytes / self.seconds

    @property
    def written_per_s(self) -> float:
        return self.done.written_bytes / self.seconds

    @property
    def reads_per_s(self) -> float:
        return self.done.reads / self.seconds

    @property
    def mean_bytes(self) -> float:
        """Of a read."""
        return self.done.read_bytes / self.done.reads if self.done.reads else 0.0

    @property
    def latency_s(self) -> float:
        """Of a read, on average."""
        return self.done.read_s / self.done.reads if self.done.reads else 0.0

    @property
    def in_flight(self) -> float:
        return self.done.read_s / self.seconds


class Meter:
    """Makes windows of samples. late: windows that had no say in peaks. `total` is all disks together."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.windows: dict[str, deque[Window]] = {}
        self.peaks: dict[str, float] = {}
        self.samples = self.late = 0
        self._first: Sample | None = None
        self._last: Sample | None = None
        self._open: Sample | None = None

    def feed(self, samples: Iterable[Sample]) -> None:
        """Samples in their order."""
        for sample in samples:
            self.samples += 1
            self._last = sample
            if self._first is None or self._open is None:
                self._first = self._open = sample
            elif sample.t - self._open.t >= self.window_s * (1 - 1e-6):
                self._close(self._open, sample)
                self._open = sample

    def _close(self, begin: Sample, end: Sample) -> None:
        late = end.t - begin.t > self.window_s + LATE_S
        self.late += late
        for name, window in _between(begin, end).items():
            self.windows.setdefault(name, deque(maxlen=HISTORY)).append(window)
            if not late:
                self.peaks[name] = max(self.peaks.get(name, 0.0), window.bytes_per_s)

    def recent(self, name: str, seconds: float = 1.0) -> Window | None:
        """The last windows as one."""
        windows = list(self.windows.get(name, ()))[-max(1, round(seconds / self.window_s)) :]
        return _joined(windows) if windows else None

    def whole(self) -> dict[str, Window]:
        """Everything from the first sample to the last, by disk, and in all."""
        if self._first is None or self._last is None or self._last.t <= self._first.t:
            return {}
        return _between(self._first, self._last)


def _between(begin: Sample, end: Sample) -> dict[str, Window]:
    """By disk, as far as it is in both; and `total`. A disk that came anew counts from zero, and is left out."""
    seconds, total = end.t - begin.t, DiskCounts(in_flight=0)
    windows: dict[str, Window] = {}
    for name, counts in end.disks.items():
        done = counts - begin.disks[name] if name in begin.disks else None
        if done is not None and done.reads >= 0 and done.read_bytes >= 0 and done.writes >= 0:
            windows[name] = Window(seconds, done)
            total = total + done
    return {**windows, TOTAL: Window(seconds, total)}


def _joined(windows: Sequence[Window]) -> Window:
    done = windows[0].done
    for window in windows[1:]:
        done = done + window.done
    return Window(sum(w.seconds for w in windows), replace(done, in_flight=windows[-1].done.in_flight))


def rows(sample: Sample) -> Iterable[tuple[object, ...]]:
    """A sample as lines of a table with COLUMNS; counts since the system started."""
    for name, c in sample.disks.items():
        times = f"{c.read_s * 1000:.0f}", f"{c.write_s * 1000:.0f}"
        yield f"{sample.t:.6f}", name, c.reads, c.read_bytes, times[0], c.in_flight, c.writes, c.written_bytes, times[1]
