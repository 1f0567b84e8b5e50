"""The reader threads under the scheduler: every byte once and right, whatever drives do; memory, threads, counts.

Real files on whatever file system the test directory has, and drives that are shelves of bytes in memory where
something has to go wrong. Counts and bits decide, never seconds.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import ext4_image

from runtime.drives.buffers import Buffer, BufferPool, address
from runtime.drives.crew import Errand, ReadCounts, ReadRecord, Report
from runtime.drives.device import Device, DeviceError
from runtime.drives.jobs import (
    MIB,
    Action,
    Completed,
    DriveBack,
    DriveChecked,
    DriveSpec,
    DriveSuspect,
    Event,
    Fault,
    Job,
    Key,
    Kind,
    Policy,
    Priority,
    Slice,
    Span,
)
from runtime.drives.kernel import device_bytes_read
from runtime.drives.ledger import Health
from runtime.drives.outcomes import Dropped, Landed, Lost
from runtime.drives.reader import Reader
from runtime.drives.real import RealDevice
from runtime.drives.throttled import Limit, ThrottledDevice
from runtime.drives.wakeup import SLICE_NS, slice_ns
from runtime.errors import DoesNotFitError, StorageError, memory_refused
from runtime.weights import landing

PATIENCE_S = 20.0
"""How long a test waits for what must happen. It is never waited for when all is well."""
SMALL = Policy(
    min_slice_bytes=4096,
    cut_bytes=4096,
    prefetch_slice_bytes=65536,
    check_bytes=4096,
    deadline_floor_s=0.1,
    back_off_s=0.02,
    check_timeout_s=1.0,
    max_hung_reads=3,
)
"""Limits for small jobs and short tests."""
PATIENT = replace(SMALL, deadline_floor_s=1000.0, check_timeout_s=PATIENCE_S)
"""The same, but nothing is ever late: what stands still stays so, and a busy machine makes no faults."""
OF_A_RUN = Policy(deadline_floor_s=1000.0, check_timeout_s=PATIENCE_S)
"""A run's own limits, but nothing is ever late."""


# --- drives in memory ---


class Memory:
    """Knows which memory is being read into, and remembers when two reads meet."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way: dict[object, tuple[int, int]] = {}
        self.met: list[str] = []

    def enter(self, read: object, into: memoryview) -> None:
        first = address(into)
        with self.lock:
            for other, (start, end) in self.under_way.items():
                if first < end and start < first + len(into):
                    self.met.append(f"read {read} into the memory of {other}")
            self.under_way[read] = (first, first + len(into))

    def leave(self, read: object) -> None:
        with self.lock:
            del self.under_way[read]


class Shelf:
    """A drive of bytes in memory. `ill(n, file, offset, into)` is called before the n-th read and may raise, wait, or
    fill `into` itself and say so by returning True."""

    mode = "memory"

    def __init__(
        self,
        name: str,
        files: Mapping[str, bytes],
        ill: Callable[[int, str, int, memoryview], object] = lambda *_: None,
        memory: Memory | None = None,
    ) -> None:
        self.name, self.files, self.ill, self.alignment = name, dict(files), ill, 1
        self.memory = memory or Memory()
        self.reads = self.now = self.most = 0
        self.closed = False
        self.lock = threading.Lock()

    def read(self, file: str, offset: int, into: memoryview) -> int:
        with self.lock:
            n, self.reads = self.reads, self.reads + 1
            self.now += 1
            self.most = max(self.most, self.now)
        self.memory.enter((self.name, n), into)
        try:
            if self.ill(n, file, offset, into) is not True:
                data = self.files[file][offset : offset + len(into)]
                if len(data) < len(into):
                    raise DeviceError(Fault.SHORT, f"{file} at {offset}: wanted {len(into)}, got {len(data)}")
                into[:] = data
            return len(into)
        finally:
            self.memory.leave((self.name, n))
            with self.lock:
                self.now -= 1

    def close(self) -> None:
        self.closed = True


def spec(device: Device, rate: float | None = 1e9, depth: int = 2) -> DriveSpec:
    return DriveSpec(device.name, depth, rate, 0.0, device.alignment)


def contents(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def jobs_of(
    data: bytes,
    length: int,
    drives: Sequence[str],
    count: int,
    priority: Priority = Priority.DEMAND,
    first: int = 0,
    barrier: int = 0,
) -> list[Job]:
    """`count` jobs, one after the other in the file "f", which all these drives hold."""
    return [
        Job(n, tuple(Span(d, "f", n * length, length) for d in drives), priority, barrier)
        for n in range(first, first + count)
    ]


@pytest.fixture
def engine() -> Iterator[Callable[..., Reader]]:
    """Makes readers; afterwards nothing may be left of them: no thread, no count that does not add up."""
    made: list[Reader] = []
    before = set(threading.enumerate())

    def make(devices: Sequence[Device | tuple[Device, DriveSpec]], limit: int = 64 * MIB, **options: object) -> Reader:
        pairs = [d if isinstance(d, tuple) else (d, spec(d)) for d in devices]
        options.setdefault("policy", PATIENT)
        pool = BufferPool(limit, max(4096, *(d.alignment for d, _ in pairs)))
        made.append(Reader(pairs, pool, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for reader in made:
        if not reader._closed:
            settle(reader)
        assert reader.close(PATIENCE_S) == 0
        for crew in reader._crews.values():
            if isinstance(crew.device, Shelf):
                assert not crew.device.memory.met
                assert crew.device.closed
    assert set(threading.enumerate()) <= before


def settle(reader: Reader) -> None:
    """Wait until nothing is under way; everything must add up then."""
    until = time.monotonic() + PATIENCE_S
    while not reader.idle:
        assert time.monotonic() < until, "the reader does not come to rest"
        time.sleep(0.002)
    reader.audit()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def take_all(reader: Reader, jobs: Sequence[Job], truth: Callable[[Job], bytes]) -> dict[Key, Landed]:
    """Take every job, compare every byte, give every buffer back."""
    by_key, landed = {job.key: job for job in jobs}, {}
    for outcome in reader.as_landed(by_key, PATIENCE_S):
        assert isinstance(outcome, Landed), outcome
        assert outcome.key not in landed
        assert outcome.buffer.view == truth(by_key[outcome.key])
        end = 0
        for piece in sorted(outcome.pieces, key=lambda p: p.start):
            assert piece.start == end, "a byte delivered twice or not at all"
            end += piece.length
        assert end == by_key[outcome.key].length
        landed[outcome.key] = outcome
        outcome.buffer.release()
    assert landed.keys() == by_key.keys()
    return landed


def at(data: bytes) -> Callable[[Job], bytes]:
    return lambda job: data[job.spans[0].offset : job.spans[0].offset + job.length]


# --- real files ---


EXPERT = 3_000_000 + 123
OFFSETS = {"a": 0, "b": 4096 * 7, "c": 1001}
"""Where each drive's file begins to hold the experts: the phases of a and b are equal, c's is another."""


@pytest.fixture(scope="module")
def experts_bytes() -> bytes:
    return contents(12 * EXPERT)


@pytest.fixture
def files(tmp_path: Path, experts_bytes: bytes) -> tuple[Path, bytes]:
    data = experts_bytes
    for name, offset in OFFSETS.items():
        (tmp_path / name).mkdir()
        with open(tmp_path / name / "f", "wb") as file:
            file.write(bytes(offset) + data)
            file.flush()
            os.fsync(file.fileno())
    return tmp_path, data


def experts(drives: Sequence[str], keys: Iterable[int], barrier: int = 0, **options: Priority) -> list[Job]:
    return [
        Job(k, tuple(Span(d, "f", OFFSETS[d] + k * EXPERT, EXPERT) for d in drives), barrier=barrier, **options)
        for k in keys
    ]


def expert(data: bytes) -> Callable[[Job], bytes]:
    return lambda job: data[job.key * EXPERT : (job.key + 1) * EXPERT]  # type: ignore[operator]


def test_several_drives_deliver_every_byte_once_and_right(
    files: tuple[Path, bytes], engine: Callable[..., Reader]
) -> None:
    """Three limited drives of unequal speed, one of which has its copies at another phase; one unknown at first."""
    root, data = files
    limits = [Limit("a", 400e6), Limit("b", 200e6), Limit("c", 150e6)]
    devices = [ThrottledDevice(RealDevice(x.name, root / x.name), x) for x in limits]
    specs = [spec(devices[0], 400e6), spec(devices[1], None), spec(devices[2], 150e6)]
    traces: list[ReadRecord] = []
    reader = engine(list(zip(devices, specs, strict=True)), policy=OF_A_RUN, trace=traces.append)
    for barrier in range(2):
        first = 6 * barrier
        jobs = experts("abc", range(first, first + 4), barrier)
        jobs += experts("b", [first + 4], barrier) + experts("c", [first + 5], barrier)
        reader.submit(jobs)
        take_all(reader, jobs, expert(data))
    settle(reader)
    by_drive, by_kind = reader.counts()
    assert all(counts.reads for counts in by_drive.values()), "every drive takes part"
    assert by_kind["demand"].requested_bytes == len(data)
    assert sum(n for (_, kind), n in reader.bytes_read().items() if kind == "demand") == len(data)
    for name, counts in by_drive.items():
        assert sum(n for (drive, _), n in reader.bytes_read().items() if drive == name) == counts.requested_bytes
    assert sum(counts.landed_last for counts in by_drive.values()) == 2, "one of each barrier"
    assert by_kind["check"].reads >= 1, "the unknown drive is measured before it is used"
    for name, counts in by_drive.items():
        alignment = reader._crews[name].device.alignment
        assert counts.requested_bytes <= counts.device_bytes <= counts.requested_bytes + 2 * alignment * counts.reads
        assert counts.errors == counts.retries == counts.hedges == 0
    assert sum(t.slice.length for t in traces) == len(data)
    assert len({t.slice.id for t in traces}) == len(traces) == by_kind["demand"].reads
    assert reader.totals()["a"].bounced_bytes == sum(
        t.slice.length for t in traces if t.slice.drive == "a" and t.slice.bounce
    )
    assert all(t.queued <= t.started <= t.landed and t.fault is None for t in traces)


def test_counts_are_those_of_the_kernel(files: tuple[Path, bytes], engine: Callable[..., Reader]) -> None:
    root, data = files
    devices = [RealDevice(name, root / name) for name in "abc"]
    before = device_bytes_read()
    if any(d.mode != "direct" for d in devices) or before is None:
        pytest.skip("no direct reads here, or nobody counts them")
    reader = engine([(devices[0], spec(devices[0])), (devices[1], spec(devices[1], None)), devices[2]], policy=OF_A_RUN)
    for turn in range(3):
        jobs = experts("abc"[turn:] + "abc"[:turn], range(12), turn)
        reader.submit(jobs)
        take_all(reader, jobs, expert(data))
    settle(reader)
    after = device_bytes_read()
    assert after is not None
    by_drive, by_kind = reader.counts()
    counted = sum(c.device_bytes for c in by_drive.values())
    assert counted == sum(c.device_bytes for c in by_kind.values())
    assert abs((after - before) - counted) <= 0.01 * counted
    assert counted - sum(c.requested_bytes for c in by_drive.values()) > 0


def test_files_that_vanish_or_are_cut_short_are_read_elsewhere(
    files: tuple[Path, bytes], engine: Callable[..., Reader]
) -> None:
    root, data = files
    news: list[DriveSuspect | DriveBack] = []
    reader = engine([RealDevice(name, root / name) for name in "abc"], policy=OF_A_RUN, watch=news.append)
    first = experts("abc", range(4))
    reader.submit(first)
    take_all(reader, first, expert(data))
    os.truncate(root / "a" / "f", 5 * EXPERT)
    (root / "b" / "f").rename(root / "b" / "away")
    reader._crews["b"].device.close()  # as when the drive was pulled out: what was open is of no use
    second = experts("abc", range(4, 12), 1)
    reader.submit(second)
    take_all(reader, second, expert(data))
    settle(reader)
    by_drive, _ = reader.counts()
    assert by_drive["a"].errors + by_drive["b"].errors >= 1
    assert sum(c.retries for c in by_drive.values()) >= 1
    lonely = experts("a", [11], 2)
    reader.submit(lonely)
    (outcome,) = reader.as_landed([11], PATIENCE_S)
    assert isinstance(outcome, Lost)
    message = str(outcome.error("layer 3, expert 11"))
    assert message.startswith("layer 3, expert 11: no copy left that can be read; drive a: ")
    assert "\n" not in message


def test_no_descriptor_and_no_thread_is_left(files: tuple[Path, bytes], engine: Callable[..., Reader]) -> None:
    root, _ = files
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        reader = engine([RealDevice(name, root / name) for name in "abc"])
        reader.submit(experts("abc", range(12)))
        for outcome in reader.as_landed([3, 4], PATIENCE_S):
            assert isinstance(outcome, Landed)
        assert reader.close(PATIENCE_S) == 0
        assert len(os.listdir("/dev/fd")) == before
        with pytest.raises(StorageError, match="closed"):
            reader.submit(experts("abc", [0]))
        with pytest.raises(StorageError, match="closed"):
            next(reader.as_landed([5]))


def test_a_device_that_dies_midway_by_the_kernels_word(
    files: tuple[Path, bytes], engine: Callable[..., Reader], tmp_path: Path
) -> None:
    """The file behind a loop device is cut: from then on its reads end with EIO, and the other copy serves."""
    root, data = files
    with ext4_image(tmp_path) as (image, mount):
        shutil.copy(root / "a" / "f", mount / "f")
        fd = os.open(mount / "f", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        reader = engine([RealDevice("a", mount), RealDevice("b", root / "b")])
        first = experts("ab", range(6))
        reader.submit(first)
        take_all(reader, first, expert(data))
        os.truncate(image, 4096)
        second = experts("ab", range(6, 12), 1)
        reader.submit(second)
        take_all(reader, second, expert(data))
        settle(reader)
        assert reader.counts()[0]["a"].errors >= 1
        assert reader.health("a") in (Health.SUSPECT, Health.LOST)
        lonely = experts("a", [11], 2)
        reader.submit(lonely)
        (outcome,) = reader.as_landed([11], PATIENCE_S)
        assert isinstance(outcome, Lost)
        reader.close()


# --- faults ---


DATA = contents(40 * 50_000)


def test_a_read_that_fails_is_read_elsewhere(engine: Callable[..., Reader]) -> None:
    def every_other(n: int, *_: object) -> None:
        if n % 2 == 0:
            raise DeviceError(Fault.IO, "f: Input/output error")

    memory = Memory()
    bad = Shelf("bad", {"f": DATA}, every_other, memory)
    good = Shelf("good", {"f": DATA}, memory=memory)
    news: list[DriveSuspect | DriveBack] = []
    reader = engine([bad, (good, spec(good, 1e8))], watch=news.append)
    for turn in range(4):
        jobs = jobs_of(DATA, 50_000, ["bad", "good"], 10, first=10 * turn, barrier=turn)
        reader.submit(jobs)
        take_all(reader, jobs, at(DATA))
    by_drive, _ = reader.counts()
    assert by_drive["bad"].errors >= 1
    assert by_drive["good"].errors == 0
    until(lambda: any(isinstance(n, DriveSuspect) and n.drive == "bad" for n in news))


def test_looks_whether_a_drive_answers_are_counted_apart() -> None:
    counts, look = ReadCounts(), Errand(None, None, Span("a", "f", 0, 10), "check", 0.0)
    counts.add(look, Report(DriveChecked("a", ok=False, detail="gone"), 10, fault=Fault.GONE))
    counts.add(look, Report(DriveChecked("a", True, 10, 0.1), 10, 10, 0.1))
    assert (counts.reads, counts.checks, counts.errors, counts.failed_checks) == (1, 1, 1, 1)
    assert look.failure(Fault.GONE, "no such\ndevice") == "drive or file gone: f: no such device"


def test_a_drive_lost_midway_costs_no_byte(engine: Callable[..., Reader]) -> None:
    def unplugged(n: int, *_: object) -> None:
        if n >= 1:
            raise DeviceError(Fault.GONE, "f: No such device")

    memory = Memory()
    lost, left = Shelf("lost", {"f": DATA}, unplugged, memory), Shelf("left", {"f": DATA}, memory=memory)
    reader = engine([lost, left])
    jobs = jobs_of(DATA, 50_000, ["lost", "left"], 40)
    reader.submit(jobs)
    landed = take_all(reader, jobs, at(DATA))
    settle(reader)
    by_drive, _ = reader.counts()
    assert by_drive["lost"].reads == 1
    assert by_drive["lost"].errors >= 1
    assert {p.drive for o in landed.values() for p in o.pieces} == {"lost", "left"}


def test_a_device_that_raises_anything_is_a_failed_read(engine: Callable[..., Reader]) -> None:
    def broken(n: int, *_: object) -> None:
        raise ZeroDivisionError("a bug")

    bad, good = Shelf("bad", {"f": DATA}, broken), Shelf("good", {"f": DATA})
    reader = engine([bad, good])
    jobs = jobs_of(DATA, 50_000, ["bad", "good"], 8)
    reader.submit(jobs)
    take_all(reader, jobs, at(DATA))
    assert reader.counts()[0]["bad"].errors >= 1


def test_when_no_copy_is_left_that_job_fails_and_the_reader_lives_on(engine: Callable[..., Reader]) -> None:
    bad: list[str] = []

    def broken(n: int, file: str, *_: object) -> None:
        if file in bad:
            raise DeviceError(Fault.IO, f"{file}: Input/output error")

    shelves = [Shelf(name, {"f": DATA, "g": DATA}, broken) for name in "ab"]
    others = [Job(("g", n), tuple(Span(d, "g", n * 1000, 1000) for d in "ab")) for n in range(10)]
    reader = engine(shelves)
    first = jobs_of(DATA, 50_000, "ab", 8, first=1)
    reader.submit(first)
    take_all(reader, first, at(DATA))
    reader.submit(others[:5])
    take_all(reader, others[:5], at(DATA))
    bad.append("f")
    reader.submit(jobs_of(DATA, 50_000, "ab", 1))
    (outcome,) = reader.as_landed([0], PATIENCE_S)
    assert isinstance(outcome, Lost)
    assert {drive for drive, _, _ in outcome.reasons} == {"a", "b"}
    error = outcome.error("layer 1, expert 0")
    assert isinstance(error, StorageError)
    assert error.exit_code == 4
    assert "drive a: i/o error: f: Input/output error" in str(error)
    until(lambda: all(reader.health(d) is Health.READY for d in "ab"))  # one bad file is no bad drive
    reader.submit(others[5:])
    take_all(reader, others[5:], at(DATA))


def test_wrong_bytes_are_seen_and_read_elsewhere(engine: Callable[..., Reader]) -> None:
    liar, good = Shelf("liar", {"f": bytes(len(DATA))}), Shelf("good", {"f": DATA})

    def verify(part: Slice, view: memoryview) -> str:
        return "" if view == DATA[part.offset : part.offset + part.length] else f"{part.drive} lies"

    traces: list[ReadRecord] = []
    unforgiving = replace(PATIENT, back_off_s=PATIENCE_S)  # a check of the liar would be one of its reads
    reader = engine([liar, good], policy=unforgiving, verify=verify, trace=traces.append)
    jobs = jobs_of(DATA, 50_000, ["liar", "good"], 20)
    reader.submit(jobs)
    landed = take_all(reader, jobs, at(DATA))
    assert {p.drive for o in landed.values() for p in o.pieces} == {"good"}
    counts = reader.counts()[0]["liar"]
    assert counts.reads == counts.requested_bytes == counts.device_bytes == 0
    assert counts.spoiled_bytes > 0
    assert {t.detail for t in traces if t.fault is Fault.WRONG} == {"liar lies"}


# --- who landed last ---


def stands(name: str, files: Mapping[str, bytes]) -> tuple[Shelf, Gate]:
    """A drive whose first read stands until its gate opens, and is right nevertheless."""
    gate = Gate(lambda n: n == 0)

    def ill(n: int, file: str, offset: int, into: memoryview) -> None:
        gate(n, file, offset, into)

    return Shelf(name, files, ill), gate


def last_by_drive(reader: Reader) -> dict[str, int]:
    return {name: counts.landed_last for name, counts in reader.counts()[0].items() if counts.landed_last}


def test_the_drive_of_the_last_slice_of_a_barrier_has_landed_last(engine: Callable[..., Reader]) -> None:
    """Not the one that has read most, or that was asked last; and of several barriers at a time each has its own."""
    a, gate = stands("a", {"f": DATA})
    reader = engine([(a, spec(a, depth=1)), Shelf("b", {"f": DATA})])
    shared = jobs_of(DATA, 50_000, ["a", "b"], 1, barrier=1)
    reader.submit(shared)
    until(lambda: gate.held == 1)
    rest, other = (jobs_of(DATA, 50_000, ["b"], 4, first=5 * n, barrier=n) for n in (1, 2))
    reader.submit([*rest, *other])
    take_all(reader, other, at(DATA))
    take_all(reader, rest, at(DATA))
    assert last_by_drive(reader) == {"b": 1}, "the second barrier alone"
    gate.opened.set()
    landed = take_all(reader, shared, at(DATA))
    assert {piece.drive for piece in landed[0].pieces} == {"a", "b"}
    assert last_by_drive(reader) == {"a": 1, "b": 1}
    assert not any(counts.landed_last for counts in reader.counts()[1].values())


def test_a_guess_counts_for_the_barrier_that_wants_it(engine: Callable[..., Reader]) -> None:
    """One that is promoted while it is read is waited for; one that has landed is not, nor one that nobody wants."""
    a, gate = stands("a", {"f": DATA})
    reader = engine([a, Shelf("b", {"f": DATA})])
    guesses = [Job(d, (Span(d, "f", 0, 50_000),), Priority.PREFETCH, 4) for d in "ab"]
    reader.submit(guesses)
    until(lambda: gate.held == 1 and reader._outcomes.landed("b"))
    assert last_by_drive(reader) == {}
    wanted = jobs_of(DATA, 50_000, ["b"], 2, barrier=4)
    reader.submit([*wanted, *(replace(guess, priority=Priority.DEMAND) for guess in guesses)])
    take_all(reader, wanted, at(DATA))
    assert last_by_drive(reader) == {}, "the promoted one is waited for"
    gate.opened.set()
    take_all(reader, guesses, at(DATA))
    assert last_by_drive(reader) == {"a": 1}


def test_nobody_lands_last_where_nothing_lands_last(engine: Callable[..., Reader]) -> None:
    """The last of a barrier is cancelled, or lost: the others were not it. What is read elsewhere counts there."""
    a, gate = stands("a", {"f": DATA})
    reader = engine([a, Shelf("b", {"f": DATA})])
    slow = Job("slow", (Span("a", "f", 0, 50_000),), barrier=1)
    reader.submit([slow, *jobs_of(DATA, 50_000, ["b"], 2, barrier=1)])
    take_all(reader, jobs_of(DATA, 50_000, ["b"], 2), at(DATA))
    reader.cancel(["slow"])
    gate.opened.set()
    settle(reader)
    missing = Job("missing", (Span("b", "none", 0, 50_000),), barrier=2)
    reader.submit([missing])
    assert [type(outcome) for outcome in reader.as_landed(["missing"], PATIENCE_S)] == [Lost]
    assert last_by_drive(reader) == {}
    half = Job("half", (Span("a", "none", 0, 50_000), Span("b", "f", 0, 50_000)), barrier=3)
    while reader.counts()[0]["a"].errors == 0:
        reader.submit([half])
        take_all(reader, [half], at(DATA))
    assert last_by_drive(reader).keys() == {"b"}


# --- late reads ---


class Gate:
    """Reads that match stand before it until it opens; then they fill their memory with rubbish."""

    def __init__(self, matches: Callable[[int], bool]) -> None:
        self.opened, self.standing, self.matches = threading.Event(), threading.Semaphore(0), matches
        self.held = 0

    def __call__(self, n: int, file: str, offset: int, into: memoryview) -> bool:
        if not self.matches(n):
            return False
        self.held += 1
        self.opened.wait(3 * PATIENCE_S)  # longer than anyone else waits
        into[:] = b"\xee" * len(into)
        return True


def test_a_read_that_hangs_is_hedged_and_its_memory_is_nobody_elses(engine: Callable[..., Reader]) -> None:
    gate = Gate(lambda n: n == 2)
    memory = Memory()
    slow, good = Shelf("slow", {"f": DATA}, gate, memory), Shelf("good", {"f": DATA}, memory=memory)
    reader = engine([slow, good], limit=2 * MIB, policy=SMALL)
    keep: list[Buffer] = []
    for turn in range(4):
        jobs = jobs_of(DATA, 50_000, ["slow", "good"], 10, first=10 * turn, barrier=turn)
        reader.submit(jobs)
        for outcome in reader.as_landed([j.key for j in jobs], PATIENCE_S):
            assert isinstance(outcome, Landed)
            if turn == 3:
                keep.append(outcome.buffer)
            else:
                assert outcome.buffer.view == at(DATA)(jobs[outcome.key - 10 * turn])  # type: ignore[operator]
                outcome.buffer.release()
    assert gate.held == 1
    assert not reader.idle, "the late read is still under way"
    by_drive, _ = reader.counts()
    assert by_drive["good"].hedges >= 1
    (hung,) = memory.under_way.values()
    for buffer in keep:
        first = address(buffer.view)
        assert first + len(buffer.view) <= hung[0] or hung[1] <= first
    gate.opened.set()
    settle(reader)
    kept = sorted(bytes(b.view) for b in keep)
    assert kept == sorted(DATA[n * 50_000 : (n + 1) * 50_000] for n in range(30, 40)), "rubbish came too late to hurt"
    for buffer in keep:
        buffer.release()
    assert reader.pool.in_use == 0


def test_a_late_read_that_comes_first_after_all_wins(engine: Callable[..., Reader]) -> None:
    """Both drives hang; the first to come back decides; the other's lease is released only when it has ended."""
    first, second = threading.Event(), threading.Event()

    def wait_for(event: threading.Event) -> Callable[..., None]:
        def ill(n: int, *_: object) -> None:
            if n == 0:
                event.wait(PATIENCE_S)

        return ill

    memory = Memory()
    a, b = Shelf("a", {"f": DATA}, wait_for(first), memory), Shelf("b", {"f": DATA}, wait_for(second), memory)
    reader = engine([(a, spec(a, 1e9, 1)), (b, spec(b, 1e6, 1))], policy=Policy(deadline_floor_s=0.05, back_off_s=5))
    jobs = jobs_of(DATA, 50_000, "ab", 1)
    reader.submit(jobs)
    until(lambda: a.reads + b.reads == 2)
    first.set()
    take_all(reader, jobs, at(DATA))
    assert reader.pool.in_use == reader.pool.cost(50_000), "the other read is under way"
    assert not reader.idle
    second.set()
    settle(reader)
    assert reader.pool.in_use == 0


def test_whoever_needs_the_bytes_is_told_that_a_drive_hangs(
    engine: Callable[..., Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three lands; nobody waits for the others any more, and nothing of them is left when they end."""
    monkeypatch.setattr(landing, "PATIENCE_S", 0.01)
    gate = Gate(lambda n: n > 0)
    lone = Shelf("lone", {"f": DATA}, gate)
    reader = engine([(lone, spec(lone, 1e9, 1))], policy=PATIENT)
    reader.submit(jobs_of(DATA, 50_000, ["lone"], 3))
    until(lambda: reader._outcomes.landed(0))
    landed = landing.as_landed(reader, range(3), lambda key: f"job {key}", None)
    next(landed).buffer.release()
    with pytest.raises(StorageError, match=r"^job 1 and 1 more have not come, and nothing else has for 0 s: a drive"):
        next(landed)
    gate.opened.set()
    settle(reader)
    assert reader.pool.in_use == 0


def test_hung_reads_do_not_use_up_the_depth(engine: Callable[..., Reader]) -> None:
    """A lone drive of depth 2 on which two reads hang comes back by a check and works beside them."""
    gate = Gate(lambda n: n < 2)
    lone = Shelf("lone", {"f": DATA}, gate)
    reader = engine([lone], policy=replace(SMALL, deadline_floor_s=0.05))
    jobs = jobs_of(DATA, 50_000, ["lone"], 20)
    reader.submit(jobs)
    take_all(reader, jobs, at(DATA))
    assert not gate.opened.is_set()
    assert reader.pool.in_use == 2 * reader.pool.cost(50_000)
    assert gate.held == 2
    assert len(reader._crews["lone"].threads) <= 2 + 2 + 1
    gate.opened.set()


def test_a_hung_read_blocks_neither_close_nor_exit() -> None:
    code = """
import threading, time
from runtime.drives.buffers import BufferPool
from runtime.drives.jobs import DriveSpec, Job, Policy, Span
from runtime.drives.ledger import Health
from runtime.drives.outcomes import Lost
from runtime.drives.reader import Reader
class Hung:
    name, alignment, mode = "hung", 1, "memory"
    def read(self, file, offset, into):
        time.sleep(3600)
    def close(self):
        print("closed")
reader = Reader([(Hung(), DriveSpec("hung", 2, 1e9, 0.0, 1))], BufferPool(10**7),
                policy=Policy(deadline_floor_s=0.05, give_up_s=0.1, check_timeout_s=0.1))
reader.submit([Job(n, (Span("hung", "f", 0, 1000),)) for n in range(3)])
assert all(isinstance(o, Lost) for o in reader.as_landed(range(3), 20))
print(reader.close(0.1) >= 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\nTrue\n"), done.stderr


# --- memory, order, guesses ---


def test_memory_stays_within_the_pool_and_demand_comes_in_order(engine: Callable[..., Reader]) -> None:
    """Forty jobs through four buffers: what waits is let in by barrier as buffers are released."""
    shelf = Shelf("one", {"f": DATA})
    pool_bytes = 4 * BufferPool(0, 4096).cost(50_000)
    reader = engine([shelf], limit=pool_bytes)
    late, soon = jobs_of(DATA, 50_000, ["one"], 20, barrier=9), jobs_of(DATA, 50_000, ["one"], 20, first=20, barrier=1)
    reader.submit(late)
    reader.submit(soon)
    order = []
    for outcome in reader.as_landed(range(40), PATIENCE_S):
        assert isinstance(outcome, Landed)
        assert outcome.buffer.view == DATA[outcome.key * 50_000 : (outcome.key + 1) * 50_000]  # type: ignore[operator]
        assert reader.pool.held_bytes <= pool_bytes
        order.append(outcome.key)
        outcome.buffer.release()
    assert all(order.index(n) >= 21 for n in range(4, 20)), "let in after all the sooner ones"
    assert reader.pool.peak_bytes <= pool_bytes
    assert reader.pool.made <= 4


def test_guesses_that_find_no_room_are_dropped_and_never_keep_demand_out(engine: Callable[..., Reader]) -> None:
    shelf = Shelf("one", {"f": DATA})
    reader = engine([shelf], limit=4 * BufferPool(0, 4096).cost(50_000))
    guesses = jobs_of(DATA, 50_000, ["one"], 10, Priority.PREFETCH)
    reader.submit(guesses)
    settle(reader)
    assert len(reader._outcomes.guesses) == 4, "there is room for four"
    wanted = jobs_of(DATA, 50_000, ["one"], 4, first=20)
    reader.submit(wanted)
    take_all(reader, wanted, at(DATA))
    outcomes = list(reader.as_landed(range(10), PATIENCE_S))
    assert all(isinstance(o, Dropped) for o in outcomes)
    assert reader.promote(range(10), 5) == list(range(10)), "none of them is to be had: they have to be asked for"
    assert reader.pool.in_use == 0


def test_guesses_not_begun_make_room_for_demand(engine: Callable[..., Reader]) -> None:
    """One guess hangs, one waits behind it: together they hold all memory there is."""
    gate = Gate(lambda n: n == 0)
    shelf = Shelf("one", {"f": DATA}, gate)
    reader = engine([shelf], limit=2 * BufferPool(0, 4096).cost(50_000), policy=PATIENT)
    reader.submit(jobs_of(DATA, 50_000, ["one"], 2, Priority.PREFETCH))
    until(lambda: gate.held == 1)
    wanted = jobs_of(DATA, 50_000, ["one"], 1, first=20)
    reader.submit(wanted)
    take_all(reader, wanted, at(DATA))
    assert not gate.opened.is_set()
    gate.opened.set()


def test_a_buffer_released_lets_the_next_job_in(engine: Callable[..., Reader]) -> None:
    """One buffer, and nothing under way when it is released: the release itself must wake what waits."""
    reader = engine([Shelf("one", {"f": DATA})], limit=BufferPool(0, 4096).cost(50_000), policy=PATIENT)
    jobs = jobs_of(DATA, 50_000, ["one"], 5)
    reader.submit(jobs)
    take_all(reader, jobs, at(DATA))
    assert reader.pool.made == 1


def test_a_guess_that_is_wanted_is_not_read_again(engine: Callable[..., Reader]) -> None:
    """Promoted while waiting, while under way, and after it has landed; by `promote` and by asking again."""
    gate = Gate(lambda n: False)
    shelf = Shelf("one", {"f": DATA}, gate)
    reader = engine([shelf])
    guesses = jobs_of(DATA, 50_000, ["one"], 6, Priority.PREFETCH)
    reader.submit(guesses)
    assert reader.promote([0, 1, 99], 3) == [99]
    reader.submit(jobs_of(DATA, 50_000, ["one"], 2, first=2, barrier=3))
    settle(reader)
    assert reader.promote([4], 3) == []
    reader.submit(jobs_of(DATA, 50_000, ["one"], 1, first=5, barrier=3))
    take_all(reader, guesses, at(DATA))
    assert shelf.reads == reader.counts()[0]["one"].reads == 6


def test_a_guess_and_its_demand_in_one_breath(engine: Callable[..., Reader]) -> None:
    shelf = Shelf("one", {"f": DATA})
    reader = engine([shelf])
    reader.submit(jobs_of(DATA, 50_000, ["one"], 3, Priority.PREFETCH) + jobs_of(DATA, 50_000, ["one"], 3, barrier=2))
    take_all(reader, jobs_of(DATA, 50_000, ["one"], 3), at(DATA))
    assert reader.counts()[1]["demand"].reads == shelf.reads == 3


def test_what_is_cancelled_is_dropped_at_every_stage(engine: Callable[..., Reader]) -> None:
    gate = Gate(lambda n: True)
    shelf = Shelf("one", {"f": DATA}, gate)
    reader = engine([shelf], limit=4 * BufferPool(0, 4096).cost(50_000), policy=OF_A_RUN)
    reader.submit(jobs_of(DATA, 50_000, ["one"], 10))
    until(lambda: gate.held == 2)
    reader.cancel(range(10))
    reader.cancel([77])
    assert {type(o) for o in reader.as_landed(range(10), PATIENCE_S)} == {Dropped}
    assert reader.pool.in_use == 2 * reader.pool.cost(50_000), "two reads are under way"
    gate.opened.set()
    settle(reader)
    assert reader.pool.in_use == 0
    assert [type(outcome) for outcome in reader.poll([0])] == [Dropped], "its bytes are nobody's"
    gate.matches = lambda n: False
    again = jobs_of(DATA, 50_000, ["one"], 10)
    reader.submit(again)
    take_all(reader, again, at(DATA))
    reader.submit(again)
    settle_but(reader, 4)
    reader.cancel(range(10))
    settle(reader)
    assert reader.pool.in_use == 0, "what had landed was given back"


def settle_but(reader: Reader, landed: int) -> None:
    until(lambda: sum(map(reader._outcomes.landed, range(10))) == landed)


def test_jobs_that_can_never_be_served_change_nothing(engine: Callable[..., Reader]) -> None:
    shelf = Shelf("one", {"f": DATA})
    reader = engine([shelf], limit=10 * MIB)
    good = jobs_of(DATA, 50_000, ["one"], 1)
    for bad, error in [
        (Job("large", (Span("one", "f", 0, 11 * MIB),)), DoesNotFitError),
        (Job("nowhere", ()), ValueError),
        (Job("unknown", (Span("two", "f", 0, 10),)), ValueError),
        (Job("twice", (Span("one", "f", 0, 10), Span("one", "g", 0, 10))), ValueError),
        (Job("empty", (Span("one", "f", 0, 0),)), ValueError),
    ]:
        with pytest.raises(error, match=str(bad.key)):
            reader.submit([*good, bad])
    assert reader.idle
    assert shelf.reads == 0


def test_waiting_can_be_limited(engine: Callable[..., Reader]) -> None:
    gate = Gate(lambda n: True)
    reader = engine([Shelf("one", {"f": DATA}, gate)])
    reader.submit(jobs_of(DATA, 50_000, ["one"], 1))
    with pytest.raises(TimeoutError, match="1 jobs have not ended"):
        list(reader.as_landed([0], timeout=0.01))
    reader.cancel([0])
    gate.opened.set()


@pytest.mark.parametrize(
    ("error", "told", "said"),
    [
        (AssertionError("a bug"), StorageError, "in the middle of its work: AssertionError"),
        (memory_refused("9 MB"), DoesNotFitError, "the system refused 9 MB"),
        (MemoryError(), DoesNotFitError, "the system refused memory"),
        (RuntimeError("can't start new thread"), DoesNotFitError, "the system refused a thread"),
        (RuntimeError("a bug"), StorageError, "in the middle of its work: RuntimeError"),
    ],
    ids=["bug", "refused", "memory", "thread", "error"],
)
def test_what_broke_the_reader_is_told_to_whoever_waits(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: type[Exception], said: str
) -> None:
    reader = Reader([(shelf := Shelf("one", {"f": DATA}), spec(shelf))], BufferPool(10 * MIB, 4096))
    whole = reader._scheduler.handle

    def wrong(event: Event, now: float) -> list[Action]:
        if isinstance(event, Completed):
            raise error
        return whole(event, now)

    monkeypatch.setattr(reader._scheduler, "handle", wrong)
    reader.submit(jobs_of(DATA, 50_000, ["one"], 3))
    for _ in range(2):
        with pytest.raises(told, match=said):
            list(reader.as_landed(range(3), PATIENCE_S))
    assert reader.close(PATIENCE_S) == 0


def test_reads_are_counted_by_kind(engine: Callable[..., Reader]) -> None:
    shelf = Shelf("one", {"f": DATA})
    reader = engine([(shelf, spec(shelf, None))], kind_of=lambda job: "trunk" if job.key == 7 else "")
    reader.submit(jobs_of(DATA, 50_000, ["one"], 3) + jobs_of(DATA, 50_000, ["one"], 1, first=7))
    reader.submit(jobs_of(DATA, 50_000, ["one"], 2, Priority.PREFETCH, first=10))
    settle(reader)
    _, by_kind = reader.counts()
    wanted = {"demand": 150_000, "trunk": 50_000, "prefetch": 100_000, "check": 4096}
    assert {k: c.requested_bytes for k, c in by_kind.items()} == wanted
    reader.cancel(range(12))


def test_depth_is_reached_and_kept_and_threads_are_not_more(engine: Callable[..., Reader]) -> None:
    """Every read waits until three are under way, time and again."""
    together = threading.Barrier(3)
    shelf = Shelf("one", {"f": DATA}, lambda n, *_: n > 0 and together.wait(PATIENCE_S) < 0)
    reader = engine([(shelf, spec(shelf, 1e9, 3))], policy=PATIENT)
    first = jobs_of(DATA, 50_000, ["one"], 1, first=39)
    reader.submit(first)
    take_all(reader, first, at(DATA))
    for turn in range(3):
        jobs = jobs_of(DATA, 50_000, ["one"], 12, first=12 * turn, barrier=turn)
        reader.submit(jobs)
        take_all(reader, jobs, at(DATA))
    assert shelf.most == 3
    assert len(reader._crews["one"].threads) == 3
    assert reader.counts()[0]["one"].errors == 0


def test_readers_do_not_wait_for_whoever_computes(engine: Callable[..., Reader]) -> None:
    """They ask for short time slices, where the system has any to ask for."""
    mine = slice_ns(threading.get_native_id())
    if not mine:
        pytest.skip("this system has no time slices to ask for")
    shelf = Shelf("one", {"f": DATA})
    reader = engine([(shelf, spec(shelf, 1e9, 3))])
    jobs = jobs_of(DATA, 50_000, ["one"], 6)
    reader.submit(jobs)
    take_all(reader, jobs, at(DATA))
    asked = {slice_ns(thread.native_id or 0) for thread in reader._crews["one"].threads}
    assert SLICE_NS in asked
    assert asked <= {SLICE_NS, mine}, "a thread that was not needed may not have begun"
    assert slice_ns(threading.get_native_id()) == mine


def test_names_and_alignments_must_agree() -> None:
    shelf = Shelf("one", {})
    shelf.alignment = 4096
    for wrong in (DriveSpec("two"), DriveSpec("one", alignment=512), DriveSpec("one", alignment=8192)):
        with pytest.raises(ValueError, match="drive "):
            Reader([(shelf, wrong)], BufferPool(10**6, 4096))


# --- everything at once ---


@pytest.mark.parametrize("seed", range(6))
def test_any_story_ends_with_every_byte_right_or_an_honest_failure(seed: int, engine: Callable[..., Reader]) -> None:
    """Three drives that fail, lie, stop for a while and end too early, four that ask, cancel and promote."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60_000) for _ in range(60)]
    starts = [sum(lengths[:n]) for n in range(60)]
    holders = [rng.sample("abc", rng.randrange(1, 4)) for _ in range(60)]
    pad = {"a": 0, "b": 512, "c": 4096}

    def ill(drive_rng: random.Random) -> Callable[[int, str, int, memoryview], object]:
        lock = threading.Lock()

        def act(n: int, file: str, offset: int, into: memoryview) -> object:
            with lock:
                dice = drive_rng.random()
            if dice < 0.03:
                raise DeviceError(Fault.IO, f"{file}: Input/output error")
            if dice < 0.05:
                into[:] = bytes(len(into))
                return True
            if dice < 0.06:
                time.sleep(0.15)
            elif dice < 0.3:
                time.sleep(0.001)
            return False

        return act

    memory = Memory()
    shelves = [
        Shelf(name, {"f": bytes(pad[name]) + DATA}, ill(random.Random(f"{seed}{name}")), memory) for name in "abc"
    ]

    errors: list[str] = []

    def verify(part: Slice, view: memoryview) -> str:
        alignment = {"a": 1, "b": 4096, "c": 4096}[part.drive]
        if (address(view) - part.offset) % alignment and not part.bounce:
            errors.append(f"seed {seed}: slice {part.id} to an address that does not fit")
        truth = DATA[part.offset - pad[part.drive] :][: part.length]
        return "" if view == truth else "not what it should be"

    traces: list[ReadRecord] = []
    specs = [DriveSpec("a", 2, 1e9, 0.0, 1), DriveSpec("b", 3, 1e8, 0.0, 4096), DriveSpec("c", 1, None, 0.0, 4096)]
    limit = 12 * BufferPool(0, 4096).cost(60_000)
    reader = engine(
        list(zip(shelves, specs, strict=True)), limit=limit, policy=SMALL, verify=verify, trace=traces.append
    )
    ended: Counter[str] = Counter()

    def work(me: int) -> None:
        mine = random.Random(seed * 10 + me)
        try:
            for turn in range(12):
                keys = [(me, turn, n) for n in mine.sample(range(60), 5)]
                jobs = {
                    k: Job(k, tuple(Span(d, "f", pad[d] + starts[k[2]], lengths[k[2]]) for d in holders[k[2]]))
                    for k in keys
                }
                guess = [Job(k, j.spans, Priority.PREFETCH) for k, j in jobs.items() if mine.random() < 0.5]
                reader.submit(guess)
                dropped = [k for k in keys if mine.random() < 0.2]
                reader.submit([Job(k, j.spans, Priority.DEMAND, turn) for k, j in jobs.items()])
                reader.cancel(dropped)
                for outcome in reader.as_landed(keys, PATIENCE_S):
                    ended[type(outcome).__name__] += 1
                    if isinstance(outcome, Landed):
                        n = outcome.key[2]  # type: ignore[index]
                        if outcome.buffer.view != DATA[starts[n] : starts[n] + lengths[n]]:
                            errors.append(f"seed {seed}: wrong bytes in {outcome.key}")
                        outcome.buffer.release()
                    elif isinstance(outcome, Dropped) and outcome.key not in dropped:
                        errors.append(f"seed {seed}: {outcome.key} was dropped")
        except BaseException as error:
            errors.append(f"seed {seed}: {error!r}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(reader)
    assert not errors
    assert sum(ended.values()) == 4 * 12 * 5
    assert ended["Landed"] > 100
    assert reader.pool.in_use == 0
    by_drive, by_kind = reader.counts()
    checks = by_kind.get("check")
    assert len(traces) + (checks.reads + checks.errors if checks else 0) == sum(s.reads for s in shelves)
    for name, counts in by_drive.items():
        mine = [t for t in traces if t.slice.drive == name]
        assert counts.retries == sum(t.slice.kind is Kind.RETRY for t in mine)
        assert counts.hedges == sum(t.slice.kind is Kind.HEDGE for t in mine)
        assert {t.slice.drive in holders[t.slice.key[2]] for t in mine} <= {True}  # type: ignore[index]
