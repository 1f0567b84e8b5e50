"""Drives behind the operating system: bytes, modes, errors, descriptors, limits, identities and what a probe says.

Real files on whatever file system the test directory has; counts and bits decide, never seconds.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import ext4_image

from runtime.drives import real
from runtime.drives.buffers import HAS_HUGE, HUGE, BufferPool, address, aligned
from runtime.drives.device import DeviceError
from runtime.drives.identity import UNKNOWN, Identity, disks_below_image, identify, same_device
from runtime.drives.jobs import Fault, Span
from runtime.drives.kernel import device_bytes_read
from runtime.drives.probe import Ceiling, Findings, probe
from runtime.drives.real import Descriptors, RealDevice
from runtime.drives.throttled import Limit, ThrottledDevice
from runtime.errors import UsageError

SIZE = 300_123
"""No multiple of any block: the last bytes of the file share their block with nothing."""
SHM = Path("/dev/shm")
CANARY = 0xA5


def contents(size: int = SIZE, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def durable(path: Path, data: bytes) -> Path:
    """Write, and make sure that the bytes have a place on the device."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


@pytest.fixture
def device(tmp_path: Path) -> Iterator[RealDevice]:
    durable(tmp_path / "data", contents())
    device = RealDevice("one", tmp_path, descriptors=Descriptors())
    yield device
    device.close()


@pytest.fixture
def direct(device: RealDevice) -> RealDevice:
    if device.mode != "direct":
        pytest.skip(f"the test directory does not allow direct reads: {device.mode}")
    return device


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.access(SHM, os.W_OK) or identify(SHM).filesystem != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    path = SHM / f"expertstream-test-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def fetch(device: RealDevice, offset: int, length: int, shift: int = 0) -> tuple[bytes, int]:
    """Read into the middle of a field of canaries, at an address that fits the offset or misses it by `shift`."""
    field = aligned(length + 8192, max(device.alignment, 1), (offset + shift - 4096) % 4096)
    field[:] = bytes([CANARY]) * len(field)
    moved = device.read("data", offset, field[4096 : 4096 + length])
    assert set(field[:4096].tobytes()) == {CANARY}
    assert set(field[4096 + length :].tobytes()) == {CANARY}
    return field[4096 : 4096 + length].tobytes(), moved


# --- bytes ---


EDGES = [0, 1, 4095, 4096, 4097, 8191, 8192, 12288, SIZE - 4096, SIZE - 1, SIZE // 4096 * 4096]


@pytest.mark.parametrize("shift", [0, 1, 2048])
def test_every_span_comes_exactly_and_moves_at_most_two_blocks_more(device: RealDevice, shift: int) -> None:
    data, rng = contents(), random.Random(shift)
    spans = [(a, b - a) for a in EDGES for b in EDGES if a < b] + [(a, SIZE - a) for a in EDGES]
    spans += [(a, rng.randrange(1, SIZE - a)) for a in (rng.randrange(SIZE - 1) for _ in range(100))]
    for offset, length in spans:
        got, moved = fetch(device, offset, length, shift)
        assert got == data[offset : offset + length]
        assert length <= moved <= length + 2 * device.alignment


def test_a_bounce_longer_than_its_buffer_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "BOUNCE_BYTES", 3 * 65536)
    data = contents(2_000_001)
    durable(tmp_path / "data", data)
    device = RealDevice("one", tmp_path)
    got, moved = fetch(device, 777, 1_990_000, shift=3)
    assert got == data[777 : 777 + 1_990_000]
    assert moved <= 1_990_000 + 2 * device.alignment
    assert len(device._bounces) == (device.alignment > 1)


def test_reads_larger_than_one_call_are_put_together(device: RealDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "CALL_BYTES", 65536)
    got, moved = fetch(device, 4097, 250_000)
    assert got == contents()[4097 : 4097 + 250_000]
    assert moved <= 250_000 + 2 * device.alignment


def test_partial_reads_are_continued(device: RealDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than was asked for; a direct read goes on at a block, whatever was given."""
    whole, calls = os.preadv, []

    def partly(fd: int, views: list[memoryview], at: int) -> int:
        assert at % device.alignment == 0
        calls.append(at)
        wanted = sum(len(v) for v in views)
        share = max(device.alignment, wanted // 2 + 1234)
        got, cut = 0, []
        for view in views:
            cut.append(view[: max(0, min(len(view), share - got))])
            got += len(cut[-1])
        if device.alignment > 1:  # the bytes come whole, but not all of them are reported
            return min(whole(fd, views, at), share)
        return whole(fd, cut, at)

    monkeypatch.setattr(os, "preadv", partly)
    for offset, length in [(0, 200_000), (5, 200_000), (4096, SIZE - 4096), (SIZE - 9000, 9000)]:
        assert fetch(device, offset, length)[0] == contents()[offset : offset + length]
    assert len(calls) > 8


def test_a_read_that_makes_no_headway_is_an_error(direct: RealDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: 100)
    with pytest.raises(DeviceError, match="less than a block") as caught:
        fetch(direct, 0, 8192)
    assert caught.value.fault is Fault.IO


def test_many_threads_share_a_device(device: RealDevice) -> None:
    data, wrong = contents(), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            offset = rng.randrange(SIZE - 1)
            length = rng.randrange(1, SIZE - offset)
            if fetch(device, offset, length, shift=rng.randrange(2))[0] != data[offset : offset + length]:
                wrong.append((offset, length))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- modes ---


def test_direct_is_what_the_kernel_counts_as_direct(direct: RealDevice) -> None:
    before, moved = device_bytes_read(this_thread=True), 0
    if before is None:
        pytest.skip("this system does not count device reads")
    for _ in range(3):  # the second and third would come from the cache, were there one
        moved += fetch(direct, 0, SIZE)[1] + fetch(direct, 123, 4567)[1] + fetch(direct, SIZE - 10, 10)[1]
    after = device_bytes_read(this_thread=True)
    assert after is not None
    assert after - before == moved


def test_memory_that_calls_itself_direct_is_buffered(shm: Path) -> None:
    """tmpfs takes O_DIRECT and reads from memory: the mode says so, and the bytes are right."""
    durable(shm / "data", contents())
    device = RealDevice("ram", shm)
    assert device.mode.startswith("buffered: ")
    assert str(shm / "data") in device.mode
    assert device.alignment == 1
    for offset, length in [(0, SIZE), (1, 4096), (4095, 10_000), (SIZE - 1, 1)]:
        assert fetch(device, offset, length) == (contents()[offset : offset + length], length)


def test_a_sparse_file_is_probed_where_it_has_bytes(tmp_path: Path) -> None:
    """The blocks of a hole come from no device and would look like memory."""
    reference = RealDevice("plain", tmp_path, probe=durable(tmp_path / "plain", contents())).mode
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(50_000_000)
        file.seek(40_000_000)
        file.write(contents())
        os.fsync(file.fileno())
    assert RealDevice("one", tmp_path, probe=tmp_path / "holes").mode == reference


def test_one_file_that_refuses_direct_reads_is_read_anyway_and_named(
    direct: RealDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opening = os.open

    def refusing(path: str, flags: int, *args: int) -> int:
        if flags & real.O_DIRECT and path.endswith("odd"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opening(path, flags, *args)

    durable(tmp_path / "odd", contents(seed=1))
    monkeypatch.setattr(os, "open", refusing)
    into = memoryview(bytearray(1000))
    assert direct.read("odd", 33, into) == 1000
    assert into == contents(seed=1)[33:1033]
    assert direct.mode == f"buffered: {tmp_path / 'odd'} does not allow direct reads"
    assert fetch(direct, 0, 8192) == (contents()[:8192], 8192)


def test_direct_reads_that_fail_only_when_reading(direct: RealDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, refused = os.preadv, []

    def refusing(fd: int, views: list[memoryview], at: int) -> int:
        if not refused:
            refused.append(at)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    assert fetch(direct, 5, 100)[0] == contents()[5:105]
    assert direct.mode.startswith("buffered: ")


def test_of_reads_that_find_it_out_at_once_each_goes_on(direct: RealDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, refused = os.preadv, []

    def refusing(fd: int, views: list[memoryview], at: int) -> int:
        if not refused:
            refused.append(at)
            direct._plain.add(direct._path("data"))  # as the other one has done
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    assert fetch(direct, 5, 100)[0] == contents()[5:105]


def test_an_empty_directory_says_that_nothing_was_probed(tmp_path: Path) -> None:
    assert RealDevice("one", tmp_path).mode == "buffered: no file to probe with"


def test_one_bad_file_is_no_bad_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable(tmp_path / "larger", contents() * 2)
    durable(tmp_path / "data", contents())
    really = real._open_regular

    def refuse(path: str, flags: int) -> int:
        if path.endswith("larger"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return really(path, flags)

    monkeypatch.setattr(real, "_open_regular", refuse)
    device = RealDevice("d", tmp_path)
    assert fetch(device, 0, 9)[0] == contents()[:9]
    (tmp_path / "data").unlink()
    with pytest.raises(DeviceError, match="larger: Permission denied"):
        RealDevice("d", tmp_path)


def test_places_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drive").mkdir()
    durable(tmp_path / "drive" / "data", contents())
    monkeypatch.chdir(tmp_path)
    device = RealDevice("d", "drive", probe="drive/data")
    assert fetch(device, 1, 9)[0] == contents()[1:10]


def test_a_drive_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="is not there") as caught:
        RealDevice("one", tmp_path / "nowhere")
    assert caught.value.fault is Fault.GONE


# --- errors ---


def test_the_end_of_the_file_names_path_offset_wanted_and_got(device: RealDevice, tmp_path: Path) -> None:
    for offset, length, got in [(SIZE - 10, 11, 10), (0, SIZE + 1, SIZE), (SIZE, 1, 0), (SIZE + 9999, 5, 0)]:
        with pytest.raises(DeviceError) as caught:
            fetch(device, offset, length)
        assert caught.value.fault is Fault.SHORT
        expected = f"{tmp_path / 'data'} at {offset}: wanted {length} bytes, got {got}: the file ends there"
        assert str(caught.value) == expected


def test_a_truncated_file_is_short_and_a_restored_one_is_read_again(device: RealDevice, tmp_path: Path) -> None:
    assert fetch(device, 100, 200_000)[0] == contents()[100:200_100]
    os.truncate(tmp_path / "data", 150_000)
    with pytest.raises(DeviceError, match="got 149900") as caught:
        fetch(device, 100, 200_000)
    assert caught.value.fault is Fault.SHORT
    durable(tmp_path / "new", contents(seed=2)).replace(tmp_path / "data")
    assert fetch(device, 100, 200_000)[0] == contents(seed=2)[100:200_100]


def test_what_is_not_there_or_not_a_file_is_gone(device: RealDevice, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    into = memoryview(bytearray(10))
    for name in ("nothing", "folder", "pipe", "data/below"):
        with pytest.raises(DeviceError, match=f"{name} at 7: wanted 10 bytes, got 0") as caught:
            device.read(name, 7, into)
        assert caught.value.fault is Fault.GONE


@pytest.mark.parametrize(
    ("number", "fault"),
    [(errno.EIO, Fault.IO), (errno.ENODEV, Fault.GONE), (errno.ENXIO, Fault.GONE), (errno.ESTALE, Fault.GONE)],
)
def test_system_errors_become_faults_and_descriptors_are_opened_anew(
    device: RealDevice, monkeypatch: pytest.MonkeyPatch, number: int, fault: Fault
) -> None:
    fetch(device, 0, 4096)
    opened = device._descriptors.opens
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
        with pytest.raises(DeviceError, match=os.strerror(number)) as caught:
            fetch(device, 0, 4096)
    assert caught.value.fault is fault
    assert device._descriptors.held == 0
    assert fetch(device, 0, 4096)[0] == contents()[:4096]
    assert device._descriptors.opens == opened + 1


# --- descriptors ---


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_no_more_files_stay_open_than_the_budget(tmp_path: Path) -> None:
    before = open_files()
    for n in range(40):
        (tmp_path / f"{n}").write_bytes(contents(5000, n))
    shared = Descriptors(budget=5)
    devices = [RealDevice(name, tmp_path, descriptors=shared) for name in "ab"]
    into = memoryview(bytearray(5000))
    for n in list(range(40)) * 2:
        devices[n % 2].read(f"{n}", 0, into)
        assert into == contents(5000, n)
        assert shared.held <= 5
        assert open_files() <= before + 5
    opens = shared.opens
    devices[1].read("39", 0, into)
    assert shared.opens == opens, "the file used last is still open"
    for device in devices:
        device.close()
    assert shared.held == 0
    assert open_files() == before


def test_a_file_being_read_is_not_closed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    files = Descriptors(budget=1)

    def opener(path: str) -> int:
        return os.open(path, os.O_RDONLY)

    with files.borrow("d", str(tmp_path / "a"), opener) as a:
        with files.borrow("d", str(tmp_path / "b"), opener):
            pass
        files.forget("d")
        assert os.pread(a, 1, 0) == b"a"
    with pytest.raises(OSError, match="descriptor"):
        os.pread(a, 1, 0)
    assert files.held == 0
    with files.borrow("d", str(tmp_path / "a"), opener), files.borrow("d", str(tmp_path / "b"), opener):
        assert files.held == 2, "both are being read"
    assert files.held == 1
    before = open_files()
    with files.borrow("d", str(tmp_path / "b"), opener):
        assert open_files() == before, "the other was closed first"
    files.forget("d")


def test_when_the_system_has_no_descriptor_left_unused_ones_are_given_up(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"{n}").write_bytes(contents(5000, n))
    device = RealDevice("one", tmp_path, descriptors=Descriptors(budget=100))
    into = memoryview(bytearray(5000))
    for n in range(5):
        device.read(f"{n}", 0, into)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(n) for n in os.listdir("/dev/fd"))
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        while True:
            try:
                taken.append(os.open(tmp_path / "0", os.O_RDONLY))
            except OSError:
                break
        device.read("5", 0, into)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
        device.close()
    assert into == contents(5000, 5)


def test_sixty_four_descriptors_are_enough(tmp_path: Path) -> None:
    """With a soft limit of 64 several readers go through 300 files on two drives."""
    for n in range(300):
        (tmp_path / f"{n}").write_bytes(n.to_bytes(2, "little") * 100)
    code = f"""
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from runtime.drives.real import Descriptors, RealDevice
files = Descriptors()
devices = [RealDevice(name, {str(tmp_path)!r}, descriptors=files) for name in "ab"]
def work(first):
    into = memoryview(bytearray(200))
    for n in range(first, 300, 8):
        devices[n % 2].read(str(n), 0, into)
        assert into == n.to_bytes(2, "little") * 100
        good.append(n)
good = []
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(files.budget, len(set(good)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "16 300\n", done.stderr


# --- buffers ---


def test_byte_0_lies_at_the_phase() -> None:
    for alignment in (4096, 65536):
        pool = BufferPool(10**9, alignment)
        for phase in (0, 1, 8, 4095, 4096, 65535, 10**9 + 7):
            buffer = pool.take(100_000, phase)
            assert address(buffer.view) % alignment == phase % alignment
            assert len(buffer.view) == 100_000
            assert address(aligned(1000, alignment, phase)) % alignment == phase % alignment


def test_buffers_are_used_again_and_stay_within_the_limit() -> None:
    pool = BufferPool(4_000_000)
    cost = pool.cost(900_000)
    for _ in range(10):
        buffers = [pool.take(900_000, phase) for phase in range(4)]
        assert pool.in_use == 4 * cost == pool.held_bytes
        for buffer in buffers:
            buffer.release()
        assert pool.in_use == 0
    assert pool.made == 4
    other = pool.take(2_000_000)
    assert pool.held_bytes <= 4_000_000, "spare buffers of another size made room"
    other.release()
    assert pool.peak_bytes <= 4_000_000


def test_a_buffer_is_given_back_once() -> None:
    pool = BufferPool(1_000_000)
    buffer = pool.take(10)
    buffer.release()
    with pytest.raises(ValueError, match="given back before"):
        buffer.release()
    assert pool.take(10) is not buffer


def test_beyond_the_limit_nothing_is_kept() -> None:
    pool = BufferPool(1_000_000)
    buffers = [pool.take(400_000) for _ in range(4)]
    for buffer in buffers:
        buffer.release()
    assert pool.in_use == 0
    assert pool.held_bytes <= 1_000_000


def test_buffers_that_lie_side_by_side_share_nothing() -> None:
    pool = BufferPool(60_000_000)
    buffers = [pool.take(3_000_000, 77 * n) for n in range(12)]
    for number, buffer in enumerate(buffers, 1):
        buffer.view[:] = bytes([number]) * 3_000_000
    assert all(buffer.view == bytes([number]) * 3_000_000 for number, buffer in enumerate(buffers, 1))


def test_memory_that_is_let_go_goes_back_to_the_system() -> None:
    """Spares of one size make room for a buffer of another; what is found in their place is fresh memory."""
    pool = BufferPool(40_000_000)
    for buffer in [pool.take(4_000_000) for _ in range(8)]:
        buffer.view[:] = b"x" * 4_000_000
        buffer.release()
    pool.take(39_000_000).release()
    assert pool.held_bytes <= pool.peak_bytes <= 40_000_000
    buffers = [pool.take(4_000_000) for _ in range(8)]
    assert pool.made == 8 + 1 + 8
    assert not any(any(buffer.view[:: 1 << 12]) for buffer in buffers)


@pytest.mark.skipif(not HAS_HUGE, reason="this system has no huge pages")
def test_buffers_ask_for_huge_pages_and_for_no_more_memory_than_they_have() -> None:
    view = BufferPool(100_000_000).take(17_547_264).view
    view[:] = bytes(len(view))
    smaps = Path("/proc/self/smaps").read_text()
    areas = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^Rss: +(\d+) kB.*?^VmFlags: (.*?)$", smaps, re.M | re.S)
    (rss, flags) = next(
        (int(rss), flags.split()) for low, high, rss, flags in areas if int(low, 16) <= address(view) < int(high, 16)
    )
    if "hg" not in flags:
        pytest.skip("this kernel was built without huge pages")
    assert rss * 1024 <= len(view) + 2 * HUGE


def test_memory_somebody_else_makes_serves_at_any_address_and_is_left_to_him() -> None:
    made: list[bytearray] = []

    def make(nbytes: int) -> memoryview:
        made.append(bytearray(nbytes + 3))
        return memoryview(made[-1])[3:]

    pool = BufferPool(1_000_000, 4096, make)
    for _ in range(2):
        buffers = [pool.take(200_000, phase) for phase in (0, 8, 4095)]
        for buffer, phase in zip(buffers, (0, 8, 4095), strict=True):
            assert address(buffer.view) % 4096 == phase
            assert buffer.view.nbytes == 200_000
            buffer.release()
    assert len(made) == pool.made == 3
    del buffer, buffers
    pool.resize(0)
    assert pool.held_bytes == 0
    for area in made:
        area.clear()  # BufferError while somebody has a view of it


def test_buffers_become_arrays_without_a_copy() -> None:
    import numpy as np

    buffer = BufferPool(10**6).take(4096, 64)
    array = np.frombuffer(buffer.view, np.uint8)[64:128].reshape(8, 8)
    ctypes.c_char.from_buffer(buffer.view, 64).value = b"\x07"
    assert array[0, 0] == 7
    assert array.flags.writeable


# --- limits ---


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("a=400MB/s", Limit("a", 400e6)),
        ("b=1.5GB/s,latency=0.2ms", Limit("b", 1.5e9, 0.2e-3)),
        ("c = 200 mb/s, latency=50us", Limit("c", 200e6, 50e-6)),
        ("d=64MiB/s,latency=1s", Limit("d", 64 * 2**20, 1.0)),
        ("e=900kB/s,latency=.5µs", Limit("e", 900e3, 0.5e-6)),
    ],
)
def test_limits_as_they_are_written(text: str, limit: Limit) -> None:
    parsed = Limit.parse(text)
    assert parsed.name == limit.name
    assert parsed.rate == pytest.approx(limit.rate, rel=1e-12)
    assert parsed.latency_s == pytest.approx(limit.latency_s, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=400MB/s",
        "a=400",
        "a=400MB",
        "a=-4MB/s",
        "a=1MB/s,",
        "a=1MB/s,latency=3",
        "a=1TB/s",
        "a=٤MB/s",
    ],
)
def test_limits_that_are_not_understood(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=400MB/s"):
        Limit.parse(text)


@pytest.mark.parametrize("text", ["a=0MB/s", "a=1kB/s", "a=9999999GB/s", f"a={'9' * 400}GB/s", "a=1MB/s,latency=2s"])
def test_limits_that_no_drive_could_keep(text: str) -> None:
    with pytest.raises(UsageError, match="the rate must be from"):
        Limit.parse(text)


def test_no_number_of_readers_beats_the_limit(device: RealDevice) -> None:
    """From the first request to the last byte, in any burst, whatever was before it."""
    throttled, rng = ThrottledDevice(device, Limit("slow", 40e6)), random.Random(3)
    assert (throttled.name, throttled.mode, throttled.alignment) == ("slow", device.mode, device.alignment)
    for readers in (1, 4):
        total, lock = [0], threading.Lock()

        def work(seed: int, total: list[int] = total, lock: threading.Lock = lock) -> None:
            rng = random.Random(seed)
            for _ in range(4):
                length = rng.randrange(100_000, SIZE)
                into = memoryview(bytearray(length))
                throttled.read("data", SIZE - length, into)
                assert into == contents()[SIZE - length :]
                with lock:
                    total[0] += length

        time.sleep(rng.random() / 50)
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(readers)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begun
        assert total[0] >= readers * 400_000
        assert total[0] / seconds <= 40e6 * 1.01


def test_latency_is_added_to_every_read_and_overlaps(device: RealDevice) -> None:
    throttled = ThrottledDevice(device, Limit("far", 1e12, latency_s=0.02))
    begun = time.monotonic()
    for _ in range(3):
        throttled.read("data", 0, memoryview(bytearray(10)))
    assert time.monotonic() - begun >= 0.06


def test_errors_pass_through_a_limit(device: RealDevice) -> None:
    with pytest.raises(DeviceError, match="the file ends there"):
        ThrottledDevice(device, Limit("slow", 1e9)).read("data", SIZE, memoryview(bytearray(1)))


# --- identities ---


def test_two_names_on_one_device_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = {name: identify(tmp_path / name) for name in "ab"}
    assert same_device(found) == [("a", "b")]
    assert found["a"].st_dev == (os.major(os.stat(tmp_path).st_dev), os.minor(os.stat(tmp_path).st_dev))
    assert 0 < found["a"].free_bytes <= found["a"].total_bytes
    for field in ("uuid", "serial", "model", "filesystem"):
        assert getattr(found["a"], field), "what is not known is said to be unknown"


def test_a_link_does_not_hide_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    link, place = (replace(identify(path), free_bytes=0) for path in (tmp_path / "link", tmp_path))
    assert link == place


def test_another_file_system_is_another_device(tmp_path: Path, shm: Path) -> None:
    found = {"disk": identify(tmp_path), "ram": identify(shm)}
    if found["disk"].st_dev == found["ram"].st_dev:
        pytest.skip("the test directory is on the same tmpfs")
    assert same_device(found) == []
    assert found["ram"].filesystem == "tmpfs"
    assert found["ram"].serial == UNKNOWN
    assert found["ram"].disks == ()


def test_devices_are_the_same_by_disk_or_serial_never_by_what_is_unknown() -> None:
    plain = Identity("/x", (0, 0), "/x", "ext4", "/dev/x", UNKNOWN, (), UNKNOWN, UNKNOWN, "", 1, 2)
    drives = {
        "partition 1": replace(plain, st_dev=(8, 1), disks=("sda",)),
        "other": replace(plain, st_dev=(8, 17), disks=("sdb",), serial="S1", model="M"),
        "partition 2": replace(plain, st_dev=(8, 2), disks=("sda",)),
        "striped": replace(plain, st_dev=(9, 0), disks=("sdc", "sdd")),
        "second path": replace(plain, st_dev=(8, 33), disks=("sde",), serial="S1", model="M"),
        "half": replace(plain, st_dev=(8, 49), disks=("sdd",)),
        "unknown 1": replace(plain, st_dev=(0, 40)),
        "unknown 2": replace(plain, st_dev=(0, 41)),
        "left": replace(plain, st_dev=(8, 65), disks=("sdf",)),
        "right": replace(plain, st_dev=(8, 81), disks=("sdg",)),
        "bridge": replace(plain, st_dev=(9, 1), disks=("sdf", "sdg")),
    }
    groups = {frozenset(names) for names in same_device(drives)}
    assert groups == {
        frozenset({"partition 1", "partition 2"}),
        frozenset({"other", "second path"}),
        frozenset({"striped", "half"}),
        frozenset({"left", "right", "bridge"}),
    }


# --- the probe ---


BIG = 8 << 20


@pytest.fixture
def big(tmp_path: Path) -> Path:
    return durable(tmp_path / "big", contents(BIG))


def whole(name: str, path: Path) -> list[Span]:
    return [Span(name, str(path), 0, path.stat().st_size)]


def test_a_probe_counts_what_the_kernel_counts(big: Path) -> None:
    device = RealDevice("one", big.parent, probe=big)
    if device.mode != "direct" or device_bytes_read() is None:
        pytest.skip("no direct reads here, or nobody counts them")
    found = probe([(device, whole("one", big))], depths=(1, 3), block_bytes=1 << 20, budget_bytes=BIG, limit_s=5)
    for ceiling in found.alone["one"]:
        assert ceiling.nbytes >= BIG or ceiling.seconds >= 5
        assert ceiling.kernel_bytes is not None
        assert 0.99 * ceiling.nbytes <= ceiling.kernel_bytes
        assert ceiling.rate is not None
    spec = found.spec(device)
    assert spec.rate in [c.rate for c in found.alone["one"]]
    assert spec.depth in (1, 3)
    assert spec.alignment == device.alignment
    assert spec.latency_s > 0


def test_the_speed_of_memory_is_not_called_the_speed_of_a_drive(shm: Path) -> None:
    path = durable(shm / "big", contents(BIG))
    device = RealDevice("ram", shm)
    found = probe([(device, whole("ram", path))], depths=(1,), block_bytes=1 << 20, budget_bytes=BIG)
    ceiling = found.alone["ram"][0]
    assert ceiling.nbytes == BIG
    assert ceiling.rate is None
    assert "from memory" in ceiling.refused
    assert found.best("ram") is None
    assert found.spec(device).rate is None
    assert found.modes["ram"].startswith("buffered")


def test_what_lies_in_the_page_cache_is_not_called_the_speed_of_a_drive(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file, forced through the cache and already in it."""
    monkeypatch.setattr(real, "O_DIRECT", 0)
    monkeypatch.setattr(real, "_drop_cached", lambda *_: None)
    if device_bytes_read() is None:
        pytest.skip("nobody counts device reads here")
    device = RealDevice("one", big.parent, probe=big)
    assert device.mode.startswith("buffered: ")
    big.read_bytes()
    ceiling = probe([(device, whole("one", big))], depths=(1,), block_bytes=1 << 20, budget_bytes=BIG).alone["one"][0]
    assert ceiling.rate is None
    assert "from memory" in ceiling.refused


def test_a_probe_cannot_beat_a_limit_and_sees_that_drives_do_not_share(big: Path) -> None:
    drives = []
    for limit in (Limit("a", 200e6), Limit("b", 100e6)):
        drives.append((ThrottledDevice(RealDevice(limit.name, big.parent, probe=big), limit), whole(limit.name, big)))
    found = probe(drives, depths=(1, 2), block_bytes=1 << 20, budget_bytes=BIG * 2, limit_s=0.15)
    for name, rate in (("a", 200e6), ("b", 100e6)):
        for ceiling in found.alone[name]:
            assert ceiling.nbytes / ceiling.seconds <= 1.01 * rate
    if found.best("a") is None:
        pytest.skip("the test directory reads from memory")
    (together,) = [t for t in found.together if len(t.drives) == 2]
    assert together.rates["a"] <= 1.01 * 200e6
    assert together.rate <= 1.01 * 300e6


def test_names_of_one_device_are_not_measured_together(big: Path) -> None:
    names = ("a", "b")
    drives = [(RealDevice(n, big.parent, probe=big), whole(n, big)) for n in names]
    identities = {n: identify(big) for n in names}
    found = probe(drives, depths=(1,), block_bytes=1 << 20, budget_bytes=1 << 20, identities=identities)
    assert found.one_device == (names,)
    assert found.together == ()


def test_the_smallest_depth_that_is_as_good_as_the_best_is_chosen() -> None:
    rates = {1: 50, 2: 99, 4: 100, 8: 90}
    alone = {"d": tuple(Ceiling(("d",), depth, rate, 1.0, None) for depth, rate in rates.items())}
    best = Findings(alone, {}, {}, (), ()).best("d")
    assert best is not None
    assert best.depth == 2


def test_a_drive_with_nothing_to_read_is_not_probed(big: Path) -> None:
    with pytest.raises(ValueError, match="no span"):
        probe([(RealDevice("one", big.parent), [Span("one", str(big), 0, 1000)])])


# --- a file system of our own, where that is possible ---


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Path]:
    with ext4_image(tmp_path, block_bytes=1024) as (_, mount):
        yield mount


def test_a_loop_image_reads_direct_and_says_what_it_is(loop: Path) -> None:
    durable(loop / "data", contents())
    device = RealDevice("loop", loop)
    assert device.mode == "direct"
    before, moved = device_bytes_read(this_thread=True), 0
    for offset, length in [(0, SIZE), (1, 1), (4095, 8193), (SIZE - 5, 5)]:
        got, n = fetch(device, offset, length)
        assert got == contents()[offset : offset + length]
        moved += n
    after = device_bytes_read(this_thread=True)
    assert before is not None
    assert after is not None
    assert moved - 3 * 4096 <= after - before <= moved, "its blocks are smaller: the last one of the file counts less"
    identity = identify(loop)
    assert identity.filesystem == "ext4"
    assert identity.backing.endswith("image")
    assert same_device({"loop": identity, "disk": identify(loop.parent)}) == []
    assert disks_below_image(identity.disks[0]) == identify(loop.parent).disks
    device.close()


def test_a_device_that_loses_its_blocks_gives_an_io_error(loop: Path) -> None:
    """The kernel's own EIO: the file behind the loop device is cut short."""
    durable(loop / "data", contents())
    device = RealDevice("loop", loop)
    assert fetch(device, 0, SIZE)[0] == contents()
    os.truncate(loop.parent / "image", 4096)
    with pytest.raises(DeviceError, match=os.strerror(errno.EIO)) as caught:
        fetch(device, 0, SIZE)
    assert caught.value.fault is Fault.IO
    device.close()
