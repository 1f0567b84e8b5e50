"""`drives monitor`: what the disks below the drives do, whoever uses them, while it happens and in the end."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from runtime.commands.arguments import check_seconds, output_file
from runtime.commands.drives import require_model
from runtime.commands.tables import table
from runtime.commands.terminal import Interrupts, is_terminal, say, write
from runtime.drives.identity import identify
from runtime.drives.kernel import DiskCounters
from runtime.drives.monitor import COLUMNS, SCHEMA, TOTAL, Meter, Sample, Sampler, Window, rows
from runtime.errors import NotKept, StorageError, UsageError
from runtime.home import whole
from runtime.units import parse_latency, size
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL

REFRESH_S = 0.25
LINE_S = 1.0
"""How often a line is printed where nobody watches a terminal."""
SHORTEST_S = 0.001
MOST_SECONDS = 366 * 86400.0
BARS = " ▁▂▃▄▅▆▇█"
HEADERS = ("", "GB/s", "reads/s", "a read", "latency", "in flight", "written/s")

Show = Callable[[Meter], None]


@dataclass
class Watched:
    """What is monitored: the disks, and by disk the drives on it. `notes`: what a person should know of that."""

    disks: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)

    def label(self, disk: str) -> str:
        names = self.disks.get(disk, [])
        return f"{disk} ({', '.join(names)})" if names else disk


def monitor(
    model: Path | None,
    layout: Layout,
    *,
    interval: str,
    seconds: float | None,
    csv_file: Path | None,
    pid: int | None,
) -> None:
    """Watch until ^C, for so many seconds, or until the process is gone; then print what it came to.

    Raises UsageError for what cannot be watched or written, StorageError when the table cannot be written to its end.
    """
    places = ({} if model is None else {MODEL: model}) | dict(layout.directories)
    interval_s = _interval(interval)
    if seconds is not None:
        check_seconds(seconds, MOST_SECONDS)
    require_model(model)
    watched = _find(places)
    keep_out = {f"the directory of drive {name}": path for name, path in places.items()}
    target = None if csv_file is None else output_file(csv_file, "--csv", keep_out)
    process = None if pid is None else _Process(pid)
    if target is not None and (below := set(identify(target.parent).disks) & set(watched.disks)):
        watched.notes.append(f"{target} lies on {' and '.join(sorted(below))}: writing it is seen, too")
    for note in watched.notes:
        say(f"note     {note}")
    sampler, meter = Sampler(list(watched.disks), interval_s), Meter(max(0.1, interval_s))
    began = time.monotonic()
    kept = _Kept(target, watched, interval_s)
    with Interrupts() as stop, kept as keep, _display(watched, process) as show:
        sampler.start()
        try:
            while not stop.cancelled() and (process is None or process.lives):
                left = REFRESH_S if seconds is None else began + seconds - time.monotonic()
                if left <= 0:
                    break
                time.sleep(min(REFRESH_S, left))
                _take(sampler, meter, keep)
                show(meter)
        finally:
            sampler.stop()
            _take(sampler, meter, keep)
    write(_summary(meter, sampler, watched, process, time.monotonic() - began))
    if target is not None:
        if kept.problem is not None:
            raise NotKept(kept.problem)
        say(f"csv      {target}: {meter.samples:,} samples")
    stop.check_terminated("watching")


def _take(sampler: Sampler, meter: Meter, keep: Callable[[Iterable[Sample]], None]) -> None:
    samples = sampler.drain()
    meter.feed(samples)
    keep(samples)


def _interval(text: str) -> float:
    try:
        seconds = parse_latency(text)
    except UsageError:
        seconds = 0.0
    if seconds < SHORTEST_S:
        raise UsageError(f"--interval {text!r} is not understood: write a time from 1ms to 1s, such as 10ms")
    return seconds


def _find(places: Mapping[str, Path]) -> Watched:
    """The disks below the named places; with none named, all that there are."""
    if not places:
        disks = DiskCounters.all_disks()
        if not disks:
            raise UsageError("no disk is known here: name places with --drive NAME=PATH")
        return Watched({disk: [] for disk in disks})
    watched = Watched({})
    for name, path in places.items():
        try:
            found = identify(path)
        except OSError as error:
            raise UsageError(f"drive {name}: {path} cannot be looked at: {error.strerror or error}") from None
        for disk in found.disks:
            watched.disks.setdefault(disk, []).append(name)
        if not found.disks:
            watched.notes.append(f"drive {name}: the disk below {path} ({found.filesystem}) is not known")
    counted = DiskCounters(watched.disks)
    known = counted.read()
    counted.close()
    for disk in [disk for disk in watched.disks if disk not in known]:
        watched.notes.append(f"drive {' and '.join(watched.disks.pop(disk))}: the system does not count for {disk}")
    if not watched.disks:
        raise UsageError(f"nothing to watch: {'; '.join(watched.notes)}")
    return watched


class _Process:
    """A process beside which the disks are watched. fetched: bytes from storage since then, None where unknown."""

    def __init__(self, pid: int) -> None:
        try:
            self._process = psutil.Process(pid)
            self.name = self._process.name()
            self._before = self._read()
            self._process.cpu_percent()
        except (psutil.NoSuchProcess, ValueError, OverflowError):  # the latter for what no process can have
            raise UsageError(f"--pid {pid}: there is no such process") from None
        except psutil.AccessDenied:
            raise UsageError(f"--pid {pid}: this process may not be looked at; it is another user's") from None
        self.fetched = None if self._before is None else 0

    @property
    def lives(self) -> bool:
        try:
            return bool(self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:  # it went between the two questions
            return False

    def _read(self) -> int | None:
        if not hasattr(self._process, "io_counters"):  # macOS
            return None
        return int(self._process.io_counters().read_bytes)

    def line(self) -> str:
        """What it does now; nothing when it has just gone."""
        with suppress(psutil.Error):
            read = self._read()
            if read is not None and self._before is not None:
                self.fetched = read - self._before
            cpu, rss = self._process.cpu_percent(), self._process.memory_info().rss
            return f"{self.name} {self._process.pid}: {self._fetched()}, {cpu:.0f} % of a processor, {size(rss)}"
        return ""

    def _fetched(self) -> str:
        return "" if self.fetched is None else f"{size(self.fetched)} fetched from storage"

    def summary(self) -> str:
        return f"{self.name} {self._process.pid}: {self._fetched() or 'what it fetched is not known'}"


# --- the table ---


class _Kept:
    """Keeps samples in a file that is there, whole, when the block ends; without a target it does nothing.

    problem: why the file cannot be written, once that is known; watching goes on. Raises StorageError when the file
    cannot even be begun.
    """

    def __init__(self, target: Path | None, watched: Watched, interval_s: float) -> None:
        self.problem: str | None = None
        self._target, self._stack = target, ExitStack()
        self._head = {"disks": watched.disks, "interval_s": interval_s, "wall_clock": datetime.now(UTC).isoformat()}
        self._out: Any = None

    def __enter__(self) -> Callable[[Iterable[Sample]], None]:
        if self._target is not None:
            try:
                file: Any = self._stack.enter_context(whole(self._target))
            except OSError as error:
                raise StorageError(self._words(error)) from None
            text = io.TextIOWrapper(file, "utf-8", newline="")
            self._stack.callback(text.detach)  # what opened the file closes it
            text.write(f"# {SCHEMA}\n# {json.dumps(self._head)}\n")
            self._out = csv.writer(text, lineterminator="\n")
            self._out.writerow(COLUMNS)
        return self._keep

    def _keep(self, samples: Iterable[Sample]) -> None:
        if self._out is None:
            return
        try:
            for sample in samples:
                self._out.writerows(rows(sample))
        except OSError as error:
            self._give_up(error)
            say(f"note     {self.problem}")

    def _give_up(self, error: OSError) -> None:
        self.problem, self._out = self._words(error), None
        with suppress(OSError):  # what is half-written goes
            self._stack.__exit__(type(error), error, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is None:
            return
        try:
            self._stack.__exit__(kind, error, trace)
        except OSError as problem:
            if problem is error:
                raise
            self.problem = self._words(problem)

    def _words(self, error: OSError) -> str:
        return f"--csv {self._target} could not be written: {error.strerror or error}"


# --- what is shown ---


@contextmanager
def _display(watched: Watched, process: _Process | None) -> Iterator[Show]:
    """A live table on a terminal, else a line a second, on stderr."""
    if not is_terminal(sys.stderr):
        yield _lines(watched, process)
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def picture(meter: Meter) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for number, header in enumerate((*HEADERS, "the last seconds")):
            table.add_column(header, justify="right" if 0 < number < len(HEADERS) else "left", no_wrap=True)
        for name in _names(meter, watched):
            window = meter.recent(name)
            if window is not None:
                curve = sparkline([w.bytes_per_s for w in meter.windows[name]], meter.peaks.get(name, 0.0))
                style = "bold" if name == TOTAL else None
                table.add_row(watched.label(name), *_cells(window), Text(curve, "cyan"), style=style)
        return Group(table, Text(process.line(), "dim")) if process is not None else Group(table)

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda meter: live.update(picture(meter), refresh=True)


def _lines(watched: Watched, process: _Process | None) -> Show:
    said = time.monotonic()

    def show(meter: Meter) -> None:
        nonlocal said
        if time.monotonic() - said < LINE_S:
            return
        said += LINE_S
        parts = []
        for name in _names(meter, watched):
            if (window := meter.recent(name)) is not None:
                rate, reads, _, latency, in_flight, _ = _cells(window)
                parts.append(f"{watched.label(name)} {rate} GB/s, {reads} reads/s, {latency}, {in_flight} in flight")
        if process is not None:
            parts.append(process.line())
        say("; ".join(part for part in parts if part))

    return show


def sparkline(values: Sequence[float], peak: float) -> str:
    """A bar for each value, of eight heights, against the peak."""
    if peak <= 0:
        return BARS[0] * len(values)
    return "".join(BARS[min(len(BARS) - 1, round(value / peak * (len(BARS) - 1)))] for value in values)


def _names(meter: Meter, watched: Watched) -> list[str]:
    """The disks, and all together where there are several."""
    names = [disk for disk in watched.disks if disk in meter.windows]
    return [*names, TOTAL] if len(names) > 1 else names


def _cells(window: Window) -> tuple[str, ...]:
    now = f" ({window.done.in_flight} now)" if window.done.in_flight > 0 else ""
    return (
        f"{window.bytes_per_s / 1e9:.2f}",
        f"{window.reads_per_s:,.0f}",
        size(round(window.mean_bytes)),
        f"{window.latency_s * 1e3:.2f} ms",
        f"{window.in_flight:.1f}{now}",
        size(round(window.written_per_s)),
    )


def _summary(meter: Meter, sampler: Sampler, watched: Watched, process: _Process | None, seconds: float) -> str:
    whole_time = meter.whole()
    names = [disk for disk in watched.disks if disk in whole_time]
    body = []
    for name in [*names, TOTAL] if len(names) > 1 else names:
        window, peak = whole_time[name], meter.peaks.get(name)
        cells = _cells(window)
        best = "-" if peak is None else f"{peak / 1e9:.2f}"
        written = size(window.done.written_bytes)
        body.append([watched.label(name), size(window.done.read_bytes), cells[0], best, *cells[1:4]])
        body[-1] += [f"{window.in_flight:.1f}", written]
    headers = ["", "read", "GB/s", "peak", "reads/s", "a read", "latency", "in flight", "written"]
    lines = [table(headers, body)]
    share = sampler.cpu_s / seconds if seconds > 0 else 0.0
    told = f"{seconds:.1f} s, {meter.samples:,} samples, {share:.1%} of a processor"
    for count, what in (
        (sampler.missed, "came too late and were left out"),
        (sampler.dropped, "were dropped"),
        (meter.late, "windows were too long for a peak"),
    ):
        told += f"; {count:,} {what}" if count else ""
    lines.append(told)
    if process is not None:
        lines.append(process.summary())
    return "\n".join(lines) + "\n"
