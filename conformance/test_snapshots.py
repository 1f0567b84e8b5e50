"""What is known of earlier conversations, in memory and on disk: it changes what is computed, never what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serverside import lend, served

from runtime.errors import UsageError
from runtime.generate import Engine, Sampler, Snapshot, Snapshots, Spill
from runtime.generate import spill as spilling
from runtime.generate.engine import chunks
from runtime.generate.spill import SUFFIX
from runtime.units import size

PROMPT = list(range(300, 372))
GIGA = 1_000_000_000


@pytest.fixture(scope="module", params=["cpu", "reference", "mlx"])
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Engine]:
    try:
        engine = Engine.load(tiny, backend=request.param, threads=1 if request.param == "cpu" else None)
    except UsageError as missing:
        pytest.skip(str(missing))
    with engine:
        yield engine


def nobody(message: str) -> None:
    raise AssertionError(message)


def after(engine: Engine, count: int) -> Snapshot:
    """A snapshot after so many tokens of the prompt."""
    session = engine.session()
    list(session.generate(PROMPT[:count], 1, stop_ids=[]))
    snapshot = session.snapshot()
    assert snapshot is not None
    return snapshot


def hashes(engine: Engine, snapshot: Snapshot | None) -> list[str | None]:
    """The logits after the whole prompt, and after three more tokens."""
    session = engine.session() if snapshot is None else engine.resume(snapshot)
    steps = session.generate(PROMPT, 4, choose=Sampler(1.0, 0.9, 7), logits_hash=True, stop_ids=[])
    return [step.logits_sha256 for step in steps]


def test_from_a_disk_the_same_bits_come_back(engine: Engine, tmp_path: Path) -> None:
    """On every backend, for a conversation that is resumed twice; the snapshot itself stays as it is."""
    kept = after(engine, 70)
    Spill(tmp_path, GIGA, engine, nobody).write(kept)
    spill = Spill(tmp_path, GIGA, engine, nobody)
    read = spill.longest(PROMPT, 0)
    assert read is not None
    assert read.ids == kept.ids
    assert read.nbytes == kept.nbytes
    warm = hashes(engine, kept)
    assert hashes(engine, read) == hashes(engine, read) == warm
    if engine.ops.name != "mlx":  # there a row may round with the number of rows
        assert warm == hashes(engine, None)


def test_the_plan_sets_aside_two_conversations_or_what_is_asked_for(embedded: Path) -> None:
    with Engine.load(embedded, backend="reference", context=500, snapshots=None) as engine:
        assert engine.plan["snapshots"] == 2 * engine.snapshot_nbytes(500)
        assert f"snapshots {size(engine.plan['snapshots'])}" in str(engine.plan)
    with Engine.load(embedded, backend="reference", context=500, snapshots=123_456) as engine:
        assert engine.plan["snapshots"] == 123_456
    with Engine.load(embedded, backend="reference", context=500) as engine:
        assert "snapshots" not in str(engine.plan)


def test_a_chunk_ends_where_it_is_told_to() -> None:
    assert list(chunks(0, 10, 4)) == [(0, 4), (4, 8), (8, 10)]
    assert list(chunks(0, 10, 4, (5, 0, 10))) == [(0, 4), (4, 5), (5, 9), (9, 10)]
    assert list(chunks(3, 3, 4)) == []


def test_what_the_disk_has_serves_what_it_begins(engine: Engine, tmp_path: Path) -> None:
    spill = Spill(tmp_path, GIGA, engine, nobody)
    for count in (40, 70):
        spill.write(after(engine, count))
    assert len(spill) == 2
    for length, beyond, found in ((72, 0, 70), (72, 70, None), (70, 0, 70), (69, 0, 40), (39, 0, None)):
        best = spill.longest(PROMPT[:length], beyond)
        assert (None if best is None else len(best.ids)) == found
    assert spill.longest([1, *PROMPT[1:]], 0) is None


def test_a_damaged_file_is_removed_and_never_used(engine: Engine, tmp_path: Path) -> None:
    Spill(tmp_path, GIGA, engine, nobody).write(after(engine, 40))
    (path,) = tmp_path.iterdir()
    spill = Spill(tmp_path, GIGA, engine, nobody)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert spill.longest(PROMPT, 0) is None
    assert not path.exists()


def test_what_is_not_this_engine_s_is_not_used(engine: Engine, embedded_engine: Engine, tmp_path: Path) -> None:
    session = embedded_engine.session()
    list(session.generate(PROMPT[:40], 1))
    other = session.snapshot()
    assert other is not None
    Spill(tmp_path, GIGA, embedded_engine, nobody).write(other)
    for name in ("notes.txt", f"rubbish{SUFFIX}"):
        (tmp_path / name).write_text("mine")
    spill = Spill(tmp_path, GIGA, engine, nobody)
    assert len(spill) == 0
    assert spill.longest(PROMPT, 0) is None
    assert len(list(tmp_path.iterdir())) == 3


ELSEWHERE: dict[str, Callable[[], object]] = {
    "processor": lambda: "another-0123456789abcdef",
    "versions": lambda: {"numba": "0.1"},
    "sources": lambda: "0123456789abcdef",
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_what_was_computed_elsewhere_is_not_used(
    what: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = after(engine, 40)
    with monkeypatch.context() as there:
        there.setattr(spilling, what, ELSEWHERE[what])
        Spill(tmp_path, GIGA, engine, nobody).write(kept)
        assert len(Spill(tmp_path, GIGA, engine, nobody)) == 1
    spill = Spill(tmp_path, GIGA, engine, nobody)
    assert spill.longest(PROMPT, 0) is None
    spill.write(kept)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_disk_has_a_budget(engine: Engine, tmp_path: Path) -> None:
    """The ones used longest ago go; what is larger than all of it is not written."""
    first, second, third = (after(engine, count) for count in (40, 41, 42))
    Spill(tmp_path, GIGA, engine, nobody).write(third)
    (file,) = tmp_path.iterdir()
    largest = file.stat().st_size
    file.unlink()
    spill = Spill(tmp_path, 2 * largest, engine, nobody)
    spill.write(first)
    spill.write(second)
    assert spill.longest(PROMPT[:40], 0) is not None
    spill.write(third)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * largest
    assert [spill.longest(PROMPT[:count], count - 1) is not None for count in (40, 41, 42)] == [True, False, True]
    for too_little in (10, largest - 1):
        Spill(tmp_path / "none", too_little, engine, nobody).write(third)
        assert not (tmp_path / "none").exists()


def test_the_budget_is_of_all_that_is_there(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another engine has left there goes, too, once room is needed; files of other names stay."""
    kept = after(engine, 40)
    with monkeypatch.context() as there:
        there.setattr(spilling, "sources", ELSEWHERE["sources"])
        Spill(tmp_path, GIGA, engine, nobody).write(kept)
    (theirs,) = tmp_path.iterdir()
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    spill = Spill(tmp_path, theirs.stat().st_size * 3 // 2, engine, nobody)
    spill.write(kept)
    assert len(spill) == 1
    assert not theirs.exists()
    assert notes.exists()


def test_a_disk_that_refuses_is_told_once(engine: Engine, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "file").write_text("in the way")
    spill = Spill(tmp_path / "file", GIGA, engine, told.append)
    for count in (40, 41):
        spill.write(after(engine, count))
    assert len(told) == 1
    assert len(spill) == 0


class Shelf:
    """A disk that remembers what it is given."""

    def __init__(self) -> None:
        self.written: list[Snapshot] = []

    def longest(self, prompt: object, beyond: int) -> None:
        return None

    def write(self, snapshot: Snapshot) -> None:
        self.written.append(snapshot)


def test_memory_lets_go_of_what_was_used_longest_ago(engine: Engine) -> None:
    shelf = Shelf()
    small, middle, large = (after(engine, count) for count in (40, 41, 71))
    snapshots = Snapshots(small.nbytes + large.nbytes, shelf)
    for snapshot in (small, middle):
        snapshots.keep(snapshot)
    assert snapshots.longest(PROMPT[:40]) is small
    snapshots.keep(large)
    assert shelf.written == [middle]
    assert snapshots.held_bytes == small.nbytes + large.nbytes
    snapshots.put_down()
    assert shelf.written == [middle, small, large]


def test_a_server_that_begins_anew_knows_what_it_knew(embedded_engine: Engine, tmp_path: Path) -> None:
    def disk(engine: Engine) -> Spill:
        return Spill(tmp_path, GIGA, engine, nobody)

    room = 4 * embedded_engine.snapshot_nbytes(embedded_engine.context)
    question = "What is the capital of France?"
    with served(lend(embedded_engine, snapshots=room), disk=disk) as server:
        before = server.chat(question).json
    assert list(tmp_path.glob(f"*{SUFFIX}"))
    with served(lend(embedded_engine, snapshots=room), disk=disk) as server:
        after = server.chat(question).json
    assert after["choices"] == before["choices"]
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == before["usage"]["prompt_tokens"]
