"""A trace: one record of every slice that was read, and what became of every guess; the file is in docs/trace.md.

Noting a record fills a row of a table, without a lock: the number of the next row is drawn from a counter. A table has
a fixed number of rows, whose memory is touched when they are filled; what comes after the last is dropped and counted,
never written over what was before. Reports are made from the file alone (`report.py`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, islice
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from runtime.drives.crew import ReadRecord
from runtime.drives.jobs import Fault, Key, Kind, Priority
from runtime.drives.outcomes import Fate
from runtime.errors import UsageError
from runtime.home import whole

SCHEMA = "expertstream.trace/1"
LIMIT = 1 << 20
"""Slices and guesses kept of a run, each."""
DETAILS = 4096
"""Messages of failed reads kept of a run."""
CHUNK = 1 << 14
"""Records written or parsed at once."""

KINDS, PRIORITIES, FAULTS, FATES = list(Kind), list(Priority), [None, *Fault], list(Fate)
ROW = np.dtype(
    [("layer", "i4"), ("expert", "i4"), ("barrier", "i8"), ("drive", "i2"), ("file", "i4")]
    + [(name, "u1") for name in ("kind", "priority", "fault")]
    + [(name, "i8") for name in ("offset", "start", "length", "job_bytes", "device_bytes", "lease")]
    + [(name, "f8") for name in ("queued", "started", "landed")]
)
GUESS = np.dtype([("layer", "i4"), ("expert", "i4"), ("queued", "f8"), ("at", "f8"), ("fate", "u1"), ("barrier", "i8")])
COLUMNS = (
    *("layer", "expert", "token", "barrier", "drive", "kind", "priority", "fate"),
    *("queued", "needed", "started", "landed"),
    *("offset", "start", "length", "job_bytes", "device_bytes", "lease", "fault", "file", "detail"),
)
DEMAND, OPEN = "demand", "open"
"""Fates beside those of guesses that were told: no guess at all, and a guess of which nothing was heard."""


class _Table:
    """Rows filled by several threads at once, as far as there are any."""

    def __init__(self, dtype: np.dtype[Any], limit: int) -> None:
        self.rows = np.zeros(limit, dtype)
        self._limit, self._next = limit, count()

    def add(self, row: tuple[Any, ...]) -> int:
        """The row's number, or -1 when there is no room."""
        number = next(self._next)  # one step of the interpreter: no two threads draw the same
        if number >= self._limit:
            return -1
        self.rows[number] = row
        return number

    def end(self) -> tuple[npt.NDArray[Any], int]:
        """(the rows, how many were dropped). What is added from now on is lost."""
        drawn = next(self._next)
        return self.rows[: min(drawn, self._limit)], max(0, drawn - self._limit)


class Read(NamedTuple):
    """A slice as it was read; kind: `demand`, `prefetch` when it was a guess as it began, or `trunk`; what: the job's
    name, "" for an expert, whose layer is else -1. Times by `time.monotonic`."""

    drive: str
    kind: str
    layer: int
    expert: int
    what: str
    nbytes: int
    queued: float
    started: float
    landed: float
    fault: str


class TraceLog:
    """What a run notes. `slice` and `guess` are the hooks `trace` and `guess` of a `Reader`."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.began, self.wall_clock = time.monotonic(), datetime.now(UTC)
        self._slices, self._guesses = _Table(ROW, limit), _Table(GUESS, limit)
        self._names: dict[str, dict[Any, int]] = {"drive": {}, "file": {}, "key": {}}
        self._passes: list[tuple[float, int, int]] = []
        self._details: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """Nothing was read so far."""
        return not self._names["drive"]

    @staticmethod
    def nbytes(limit: int = LIMIT) -> int:
        """Memory of a log that is full."""
        return limit * (ROW.itemsize + GUESS.itemsize)

    def slice(self, trace: ReadRecord) -> None:
        """A read has ended."""
        part = trace.slice
        row = (
            *self._key(part.key),
            part.barrier,
            self._number("drive", part.drive),
            self._number("file", part.file),
            KINDS.index(part.kind),
            part.priority,
            FAULTS.index(trace.fault),
            part.offset,
            part.start,
            part.length,
            part.job_bytes,
            trace.device_bytes,
            part.lease,
            trace.queued,
            trace.started,
            trace.landed,
        )
        number = self._slices.add(row)
        if trace.detail and number >= 0 and len(self._details) < DETAILS:
            self._details[number] = trace.detail

    def guess(self, key: Key, fate: Fate, queued: float = nan, barrier: int = -1, at: float | None = None) -> None:
        """Something has become of a guess, now or `at`; without `queued`, of the last of this key that was told of."""
        moment = time.monotonic() if at is None else at
        self._guesses.add((*self._key(key), queued, moment, FATES.index(fate), barrier))

    def begin_pass(self, position: int, rows: int) -> None:
        """The model begins to compute `rows` tokens; `position` tokens were before them."""
        if len(self._passes) < LIMIT:
            self._passes.append((time.monotonic(), position, rows))

    def between(self, begin: float, end: float) -> list[Read]:
        """The reads under way then, as far as there was room for them, by their start."""
        rows = self._slices.rows
        rows = rows[(rows["landed"] > begin) & (rows["started"] < end)]
        drives, names = list(self._names["drive"]), list(self._names["key"])
        reads = []
        for row in rows[np.argsort(rows["started"], kind="stable")]:
            layer, expert, fault = int(row["layer"]), int(row["expert"]), FAULTS[row["fault"]]
            known = layer >= 0
            reads.append(
                Read(
                    drives[row["drive"]],
                    PRIORITIES[row["priority"]].name.lower() if known else "trunk",
                    layer,
                    expert if known else -1,
                    "" if known else names[expert],
                    int(row["length"]),
                    float(row["queued"]),
                    float(row["started"]),
                    float(row["landed"]),
                    "" if fault is None else fault.value,
                )
            )
        return reads

    def write(self, path: Path, about: Mapping[str, Any]) -> tuple[int, int]:
        """Write the file, whole or not at all; gzipped when its name ends so. Returns (slices in it, slices dropped).

        about: what a reader should know of the run, as JSON. The log takes nothing more. Raises OSError.
        """
        rows, dropped = self._slices.end()
        guesses, dropped_guesses = self._guesses.end()
        numbers = np.flatnonzero(rows["landed"])
        jobs = _told(guesses[guesses["at"] > 0])
        head = {
            "slices": len(numbers),
            "dropped": dropped,
            "dropped_guesses": dropped_guesses,
            "monotonic_start": self.began,
            "wall_clock": self.wall_clock.isoformat(timespec="microseconds"),
            "passes": [[round(t - self.began, 7), position, n] for t, position, n in self._passes],
            "guesses": {f.value: sum(j.fate == f.value for j in jobs.values()) for f in FATES},
            "keys": list(self._names["key"]),
            **about,
        }
        with ExitStack() as stack:
            file: Any = stack.enter_context(whole(path))
            if path.suffix == ".gz":
                file = stack.enter_context(gzip.GzipFile(filename="", mode="wb", compresslevel=4, fileobj=file))
            text = io.TextIOWrapper(file, "utf-8", newline="")
            stack.callback(text.detach)  # those who opened the file close it
            text.write(f"# {SCHEMA}\n# {json.dumps(head)}\n")
            table = csv.writer(text, lineterminator="\n")
            table.writerow(COLUMNS)
            for first in range(0, len(numbers), CHUNK):
                table.writerows(self._lines(rows, numbers[first : first + CHUNK], jobs))
        return len(numbers), dropped

    def _lines(
        self, rows: npt.NDArray[Any], numbers: npt.NDArray[np.int64], jobs: Mapping[_Job, _Told]
    ) -> Iterator[list[object]]:
        """The rows as they stand in the file, with what is known of their jobs."""
        drives, files = list(self._names["drive"]), list(self._names["file"])
        begun = [t for t, _, _ in self._passes]
        fields = ROW.names or ()
        for number, record in zip(numbers.tolist(), rows[numbers].tolist(), strict=True):
            row = dict(zip(fields, record, strict=True))
            priority, queued = PRIORITIES[row["priority"]], row["queued"]
            none = _Told(queued, row["barrier"], DEMAND) if priority is Priority.DEMAND else _Told(nan, -1, OPEN)
            told = jobs.get((row["layer"], row["expert"], queued), none)
            at = queued if isnan(told.needed) else told.needed
            of = bisect_right(begun, at) - 1
            fault = FAULTS[row["fault"]]
            yield [
                row["layer"],
                row["expert"],
                self._passes[of][1] if of >= 0 else -1,
                row["barrier"] if isnan(told.needed) else told.barrier,
                drives[row["drive"]],
                KINDS[row["kind"]].value,
                priority.name.lower(),
                told.fate,
                *map(self._clock, (queued, told.needed, row["started"], row["landed"])),
                *(row[name] for name in ("offset", "start", "length", "job_bytes", "device_bytes", "lease")),
                "" if fault is None else fault.value,
                files[row["file"]],
                self._details.get(number, ""),
            ]

    def _clock(self, moment: float) -> str:
        """Seconds since the log began; nothing for what never was."""
        return "" if isnan(moment) else f"{moment - self.began:.7f}"

    def _key(self, key: Key) -> tuple[int, int]:
        """(layer, expert); whatever else a job is named by is layer -1, and numbered."""
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int) and isinstance(key[1], int):
            return key
        return -1, self._number("key", str(key))

    def _number(self, what: str, name: str) -> int:
        numbers = self._names[what]
        number = numbers.get(name)
        if number is None:
            with self._lock:
                number = numbers.setdefault(name, len(numbers))
        return number


_Job = tuple[int, int, float]
"""Layer, expert, and when it was submitted: at most one job of a key is live at a time."""


@dataclass(slots=True)
class _Told:
    """What became of a job. needed: when, or nan."""

    needed: float
    barrier: int
    fate: str


def _told(guesses: npt.NDArray[Any]) -> dict[_Job, _Told]:
    """What is known of each guess: once it was needed, nothing else counts; before, what was told last."""
    jobs: dict[_Job, _Told] = {}
    last: dict[tuple[int, int], float] = {}
    for layer, expert, queued, at, fate, barrier in guesses.tolist():
        queued = last.get((layer, expert), nan) if isnan(queued) else queued
        last[layer, expert] = queued
        told = jobs.setdefault((layer, expert, queued), _Told(nan, -1, OPEN))
        if not isnan(told.needed):
            continue
        told.fate = FATES[fate].value
        if FATES[fate] is Fate.NEEDED:
            told.needed, told.barrier = at, barrier
    return jobs


# --- reading the file ---


@dataclass(frozen=True)
class TraceFile:
    """A trace as it was written: `about` is its head, `slices` has a field for each number of a record.

    drive, kind, priority, fate and fault are numbers, too, of the lists of names in `names`. Times are seconds since
    the log began, `needed` is nan for what never was.
    """

    about: dict[str, Any]
    slices: npt.NDArray[Any]
    names: dict[str, list[str]]


_TEXTS = ("drive", "kind", "priority", "fate", "fault")
_TIMES = ("queued", "needed", "started", "landed")
LOADED = np.dtype(
    [(name, "i2") for name in _TEXTS]
    + [(name, "f8") for name in _TIMES]
    + [(name, "i8") for name in COLUMNS if name not in (*_TEXTS, *_TIMES, "file", "detail")]
)


def load(path: Path) -> TraceFile:
    """Read a trace. Raises UsageError for what is none, or not the whole of one."""
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(open(path, "rb"))
            if file.peek(2)[:2] == b"\x1f\x8b":
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            return _parse(path, stack.enter_context(io.TextIOWrapper(file, "utf-8", newline="")))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path}: the trace is cut off or damaged: {error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no trace: it is not text") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _parse(path: Path, text: io.TextIOWrapper) -> TraceFile:
    first = text.readline(256).rstrip()
    if first != f"# {SCHEMA}":
        raise UsageError(f"{path} is no trace: its first line is {first[:60]!r}, wanted {f'# {SCHEMA}'!r}")
    try:
        about = json.loads(text.readline().removeprefix("# "))
        wanted = int(about["slices"])
        lines = csv.reader(text)
        columns = {name: position for position, name in enumerate(next(lines))}
        places = [columns[name] for name in LOADED.names or ()]
    except (ValueError, KeyError, TypeError, StopIteration, csv.Error) as error:
        raise UsageError(f"{path}: the head of the trace is damaged: {error!r}") from None
    names: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}
    parts, found = [np.empty(0, LOADED)], 0
    while True:
        try:
            chunk = list(islice(lines, CHUNK))
            parts.append(np.array([_record(line, places, names) for line in chunk], LOADED))
        except (ValueError, OverflowError, IndexError, csv.Error) as error:
            where = f"the trace is damaged or cut off after {found:,} of {wanted:,} records"
            raise UsageError(f"{path}: {where}: {error}") from None
        if not chunk:
            break
        found += len(chunk)
    if found != wanted:
        raise UsageError(f"{path}: the trace is cut off: it has {found:,} records of {wanted:,}")
    return TraceFile(about, np.concatenate(parts), {name: list(known) for name, known in names.items()})


def _record(line: list[str], places: list[int], names: dict[str, dict[str, int]]) -> tuple[float, ...]:
    values: list[float] = []
    for name, place in zip(LOADED.names or (), places, strict=True):
        text = line[place]
        if name in names:
            values.append(names[name].setdefault(text, len(names[name])))
        elif name in _TIMES:
            values.append(float(text or "nan"))
        else:
            values.append(int(text))
    return tuple(values)
