"""The trunk converted to int8: the bits of int8 made at load, half the bytes, and nothing but this model's."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
from commandline import Command, on
from trajectory import make_prompt, same_weight
from trouble import lost_on_the_way, trouble, unreadable

from runtime import ops
from runtime.checkpoint import Checkpoint, converted, int8
from runtime.checkpoint.converted import FILE_NAME, ConvertedTrunk
from runtime.checkpoint.int8 import Int8Matrix, is_int8, quantize
from runtime.drives.real import RealDevice
from runtime.drives.throttled import Limit
from runtime.errors import CheckpointError, ExpertstreamError, StorageError, UsageError
from runtime.generate import Engine
from runtime.ops import backend_type
from runtime.setup import convert as conversion
from runtime.setup.convert import Outcome, convert
from runtime.setup.synth import synthesize
from runtime.setup.writing import hold
from runtime.weights import layout as arrangement
from runtime.weights.ahead import Block
from runtime.weights.division import EMBEDDING, LEAST_BLOCKS, Divider, Division
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL
from runtime.weights.stream import HEAD

PROMPT = make_prompt(3, 512)[:24].tolist()
QUIET = lambda done, total: None  # noqa: E731
NAME = "language_model.model.layers.0.self_attn.q_proj.weight"
Answer = list[tuple[int, str | None]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever late, so that every read is counted once; matrices come in several blocks."""
    monkeypatch.setattr(arrangement, "POLICY", replace(arrangement.POLICY, deadline_floor_s=1000.0))
    monkeypatch.setattr(ops, "BLOCK_BYTES", 1 << 15)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    synthesize("tiny", path, layers=4, vocab=512)
    return path


@pytest.fixture(scope="module")
def stores(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories that have the trunk. Not to be written to."""
    first, second = (tmp_path_factory.mktemp("stores") / name for name in "ab")
    made(model, first)
    shutil.copytree(first, second)
    return [first, second]


@pytest.fixture
def store(stores: list[Path], tmp_path: Path) -> Path:
    """The file of one, to be damaged."""
    shutil.copytree(stores[0], tmp_path / "own")
    return tmp_path / "own" / FILE_NAME


def made(model: Path, folder: Path, progress: Any = QUIET) -> Outcome:
    with Checkpoint.open(model) as checkpoint:
        return convert(checkpoint, folder, progress)


def over(stores: list[Path], **changes: Any) -> Layout:
    return Layout(tuple((f"s{number}", path) for number, path in enumerate(stores)), **changes)


def answer(engine: Engine) -> Answer:
    return [(s.token_id, s.logits_sha256) for s in engine.session().generate(PROMPT, 3, logits_hash=True)]


@contextmanager
def loaded(model: Path, stores: list[Path], streamed: int = 0, **options: Any) -> Iterator[Engine]:
    """With the trunk in int8 from these; of so many matrices one is streamed, or all stay."""

    def some(divider: Divider, room_bytes: int) -> Division:
        return divider.streaming([EMBEDDING, *divider.order[::streamed]], LEAST_BLOCKS)

    options = {"backend": "cpu", "threads": 1, "context": 64, "trunk": "int8", "layout": over(stores)} | options
    patched = mock.patch.object(Divider, "divide", some) if streamed else nullcontext()
    with patched, Engine.load(model, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[tuple[str, str], Answer]:
    """The answers where int8 is made at load, and those of the released trunk."""
    answers = {}
    for backend, precision in (("cpu", "int8"), ("reference", "int8"), ("cpu", "bf16")):
        with Engine.load(model, backend=backend, threads=1, trunk=precision, context=64) as engine:  # type: ignore[arg-type]
            answers[backend, precision] = answer(engine)
    return answers


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_what_int8_makes_of_the_released_weights(model: Path, stores: list[Path]) -> None:
    """As another library reads it."""
    with Checkpoint.open(model) as checkpoint, safetensors.safe_open(stores[0] / FILE_NAME, "numpy") as file:
        names = [name for name in checkpoint.trunk_names() if is_int8(name)]
        assert set(file.keys()) == {"xxh3_64", *names, *(f"{name}_scale" for name in names)}
        assert file.get_tensor("xxh3_64").shape == (len(names), 2)
        words = file.metadata()
        assert words["schema"] == "expertstream.trunk-int8/1"
        assert words["fingerprint"] == checkpoint.fingerprint
        for name in names:
            bits = checkpoint.read(name)
            wanted = Int8Matrix(np.empty(bits.shape, np.int8), np.empty(len(bits), np.float16))
            quantize(bits, wanted, name)
            assert np.array_equal(file.get_tensor(name), wanted.values)
            assert np.array_equal(file.get_tensor(f"{name}_scale"), wanted.scales)


def test_the_same_weights_make_the_same_file(
    model: Path, stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "PART_BYTES", 5000)
    monkeypatch.setattr(conversion, "SYNC_BYTES", 1 << 16)
    monkeypatch.setattr(int8, "BLOCK_BYTES", 700)
    steps: list[tuple[int, int]] = []
    outcome = made(model, tmp_path / "new" / "folder", lambda done, total: steps.append((done, total)))
    assert outcome.written
    assert outcome.path.read_bytes() == (stores[0] / FILE_NAME).read_bytes()
    assert outcome.path.stat().st_size == outcome.nbytes
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1]


def test_memory_does_not_depend_on_the_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 26 MB is made in blocks."""
    synthesize("tiny", tmp_path / "wide", layers=2, vocab=100_000)
    monkeypatch.setattr(conversion, "PART_BYTES", 1 << 18)
    with Checkpoint.open(tmp_path / "wide") as wide:
        tracemalloc.start()
        convert(wide, tmp_path / "out", QUIET)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 6 << 20


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "mlx", "reference"])
def test_every_weight_is_there_as_if_made_at_load(
    backend: str, model: Path, stores: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    monkeypatch.setattr("runtime.weights.trunk.NEIGHBOUR_BYTES", 1 << 13)  # some stay where they were read
    with (
        Engine.load(model, backend=backend, threads=1, trunk="int8") as plain,
        loaded(model, stores, backend=backend) as engine,
    ):
        here, there = engine.model.trunk, plain.model.trunk
        for home, other in [(here.top, there.top)] + [(here.layer(i), there.layer(i)) for i in range(4)]:
            assert home.keys() == other.keys()
            for name, weight in home.items():
                assert same_weight(weight, other[name]), name


@pytest.mark.parametrize(
    ("backend", "streamed", "copies", "options"),
    [
        ("cpu", 0, 2, {}),
        ("cpu", 1, 1, {"chunk": 7}),
        ("cpu", 1, 2, {"threads": 3, "chunk": 5, "prefetch": True}),
        ("cpu", 3, 2, {"verify_reads": "all", "reuse": False}),
        ("reference", 2, 1, {"verify_reads": "off", "chunk": 9}),
    ],
)
def test_the_same_bits(
    backend: str, streamed: int, copies: int, options: dict[str, Any], model: Path, stores: list[Path], whole: Any
) -> None:
    with loaded(model, stores[:copies], streamed, backend=backend, **options) as engine:
        assert answer(engine) == whole[backend, "int8"]
        assert bool(engine.model.trunk.streamed_bytes) == bool(streamed)


def test_the_same_bits_on_mlx(model: Path, stores: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlx.core", reason="needs MLX")
    monkeypatch.setattr("runtime.ops.mlx.TILE_BYTES", 1 << 14)
    with Engine.load(model, backend="mlx", trunk="int8", context=64) as engine:
        wanted = answer(engine)
    for streamed in (0, 1):
        with loaded(model, stores, streamed, backend="mlx") as engine:
            assert answer(engine) == wanted


def test_loading_reads_a_byte_a_weight_and_what_stays_as_released(model: Path, stores: list[Path]) -> None:
    with loaded(model, stores, layout=over(stores, limits=(Limit("m", 4e8),))) as engine:
        assert engine.drives is not None
        counts, kinds, _ = engine.drives.counts()
        spans = [engine.checkpoint.span(name) for name in engine.checkpoint.trunk_names()]
        halved = sum(span.nbytes // 2 for span in spans if is_int8(span.name))
        exact = sum(span.nbytes for span in spans if not is_int8(span.name))
        assert kinds["trunk"].requested_bytes == halved + exact
        read = {name: drive.requested_bytes - drive.checked_bytes for name, drive in counts.items()}
        assert read["m"] == exact
        assert read["s0"] + read["s1"] == halved
        reads = engine.drives.trunk_reads()
        for name, holders in ((NAME, ["s0", "s1"]), (EMBEDDING, ["m"])):
            assert [span.drive for span in reads.job(Block(name, 0, 0, 64)).spans] == holders
        said = engine.drives.settings
        assert [said[name]["trunk"] for name in ("m", "s0", "s1")] == ["bf16", "int8", "int8"]


def test_a_pass_reads_half_of_what_it_reads_without(model: Path, stores: list[Path]) -> None:
    read = {}
    for layout in (over([], limits=(Limit("m", 4e8),)), over(stores)):
        with loaded(model, [], 1, layout=layout) as engine:
            answer(engine)
            row = 2 * engine.config.hidden_size
            assert engine.model.trunk.streamed_bytes == 3 * engine.plan.trunk.read_bytes + (len(set(PROMPT)) - 1) * row
            read[bool(layout.directories)] = engine.plan.trunk.read_bytes - row
            assert engine.plan.as_dict()["trunk_read_per_token"] == engine.plan.trunk.read_bytes
    assert 2 * read[True] == read[False]


def test_bf16_is_bf16_whatever_a_drive_holds(model: Path, stores: list[Path], whole: Any) -> None:
    with loaded(model, stores, trunk="bf16") as engine:
        assert answer(engine) == whole["cpu", "bf16"]
        assert engine.drives is not None
        assert engine.drives.converted is None
        assert engine.drives.counts()[1]["trunk"].requested_bytes == engine.checkpoint.trunk_nbytes


def test_a_drive_lost_on_the_way(model: Path, stores: list[Path], whole: Any) -> None:
    with trouble() as doings, loaded(model, stores, 1) as engine:
        assert lost_on_the_way(engine, PROMPT, 3, doings) == whole["cpu", "int8"]
        assert engine.drives is not None
        counts, _, _ = engine.drives.counts()
        assert counts["s1"].errors > counts["s0"].errors == 0


# -- what it is not ----------------------------------------------------------------------------------------------------


def refused(model: Path, store: Path, kind: type[ExpertstreamError] = CheckpointError) -> str:
    """What is said of it, in one line that names the file."""
    with pytest.raises(kind) as error, loaded(model, [store.parent]):
        pass
    said = str(error.value)
    assert str(store) in said
    assert "\n" not in said
    return said


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def flip(path: Path, name: str) -> None:
    """One bit of a tensor."""
    (span,) = (span for span in converted.scan(path).spans if span.name == name)
    with path.open("r+b") as file:
        file.seek(span.offset + span.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_of_another_model(model: Path, store: Path, tmp_path: Path) -> None:
    synthesize("tiny", tmp_path / "other", layers=4, vocab=512, seed=1)
    assert "is the converted trunk of another model" in refused(tmp_path / "other", store)
    with pytest.raises(CheckpointError, match="of another model"):
        made(tmp_path / "other", store.parent)


def test_of_the_same_shape_with_other_weights(model: Path, store: Path, tmp_path: Path) -> None:
    """A tuned model has the same fingerprint."""
    tuned = Path(shutil.copytree(model, tmp_path / "tuned"))
    with Checkpoint.open(tuned) as checkpoint:
        fingerprint, span = checkpoint.fingerprint, checkpoint.span(NAME)
    bits = np.memmap(span.path, "<u2", "r+", span.offset, span.shape)
    bits[0] += 1 << 7  # doubled
    bits.flush()
    with Checkpoint.open(tuned) as checkpoint:
        assert checkpoint.fingerprint == fingerprint
    assert f"was made of other weights than those in {tuned}: row 0 of {NAME} has the scale" in refused(tuned, store)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"expertstream.trunk-int8/1", b"expertstream.trunk-int8/2", "is no converted trunk: it says"),
        (b"half to even", b"half to zero", "was rounded otherwise"),
        (b'"I8"', b'"U8"', "is damaged: its header is not that of this model"),
        (b"language_model.lm_head.weight_scale", b"language_model.ln_head.weight_scale", "is damaged: its header"),
        (b'{"__metadata__"', b'["__metadata__"', "is damaged: its header is not JSON"),
    ],
)
def test_another_form(old: bytes, new: bytes, said: str, model: Path, store: Path) -> None:
    edit(store, old, new)
    found = refused(model, store)
    assert said in found
    assert found.endswith(converted.AGAIN)


@pytest.mark.parametrize("value", [5, 0.5, None, True, "", "\ud800\n", [], [1], {}, {"a": [None]}])
def test_metadata_of_any_kind(value: object, model: Path, store: Path) -> None:
    data = store.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:end])

    def written(words: object) -> str:
        text = json.dumps(entries | {"__metadata__": words}).encode()
        store.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
        return refused(model, store)

    assert "is no converted trunk: it says nothing, wanted" in written(value)
    words = entries["__metadata__"]
    for name, said in (("schema", "is no converted"), ("fingerprint", " model"), ("rounding", "was rounded otherwise")):
        assert said in written(words | {name: value})


def test_cut_short(model: Path, store: Path) -> None:
    data = store.read_bytes()
    for length, said in ((len(data) - 1, "is cut short"), (100, "is damaged"), (0, "is damaged")):
        store.write_bytes(data[:length])
        assert said in refused(model, store)


def test_no_regular_file(model: Path, store: Path) -> None:
    store.unlink()
    store.mkdir()
    refused(model, store)


def test_damaged_scales_are_seen_when_it_is_opened(model: Path, store: Path) -> None:
    flip(store, f"{NAME}_scale")
    assert f"{NAME}_scale is not as it was written" in refused(model, store)


def test_damaged_values_are_seen_when_they_are_read(model: Path, store: Path, whole: Any) -> None:
    flip(store, NAME)
    assert f"{NAME} is not as it was written" in refused(model, store, StorageError)
    wrong = pytest.raises(StorageError, match=f"{NAME} is not as it was written")
    with loaded(model, [store.parent], 1) as engine, wrong:
        answer(engine)
    with loaded(model, [store.parent], 1, verify_reads="off") as engine:
        assert answer(engine) != whole["cpu", "int8"]


def test_of_several_copies_those_are_named_that_are_damaged(
    model: Path, stores: list[Path], store: Path, tmp_path: Path
) -> None:
    """Rows of one matrix come from all of them, and what was wrong once may be right when it is read again."""
    other = Path(shutil.copytree(stores[0], tmp_path / "other")) / FILE_NAME
    told = {
        path: re.escape(f"{path} is damaged: {NAME} is not as it was written; {converted.AGAIN}")
        for path in (store, other)
    }
    for path in (store, other):
        flip(path, NAME)
    with loaded(model, [other.parent, store.parent], 1) as engine:
        with pytest.raises(StorageError, match=f"^{told[other]}; {told[store]}$"):
            answer(engine)
        assert engine.drives is not None
        reads = engine.drives.trunk_reads()
        wrong = memoryview(bytes(reads.spans[NAME].nbytes))
        again = f"is right when it is read again from {other} and {store}: a drive, its cable"
        for path, said in ((other, f"^{told[store]}$"), (store, re.escape(again))):
            flip(path, NAME)
            assert reads.check is not None
            with pytest.raises(StorageError, match=said):
                reads.check(NAME, 0, wrong)
        os.truncate(store, 100)
        with pytest.raises(StorageError, match=re.escape(f"{store} cannot be read again: ")):
            reads.check(NAME, 0, wrong)


def test_after_a_damaged_matrix_the_next_pass_begins_anew(model: Path, store: Path, whole: Any) -> None:
    """The last one of a pass, behind which the order begins again."""
    flip(store, HEAD)
    with loaded(model, [store.parent], 1) as engine:
        for _ in range(3):
            with pytest.raises(StorageError, match=f"{HEAD} is not as it was written"):
                answer(engine)
        flip(store, HEAD)
        assert answer(engine) == whole["cpu", "int8"]


def test_damage_that_comes_later_is_seen_where_every_read_is_looked_at(model: Path, store: Path) -> None:
    for mode, seen in (("first", False), ("all", True)):
        with loaded(model, [store.parent], 1, verify_reads=mode) as engine:
            list(engine.session().generate(PROMPT, 2))
            flip(store, NAME)
            if seen:
                with pytest.raises(StorageError, match=f"{NAME} is not as it was written"):
                    list(engine.session().generate(PROMPT, 2))
            else:
                list(engine.session().generate(PROMPT, 2))
            flip(store, NAME)


def test_a_drive_that_cannot_read_it_when_it_is_opened_is_not_used(
    model: Path, stores: list[Path], store: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable(monkeypatch, store)
    said = f"drive s0: cannot read {store}: Input/output error; it is not used"
    with loaded(model, [store.parent, stores[0]]) as engine:
        assert answer(engine) == whole["cpu", "int8"]
        assert engine.drives is not None
        assert said in engine.drives.notes
        assert engine.drives.counts()[0]["s1"].reads > 0
    with loaded(model, [store.parent]) as engine:
        assert answer(engine) == whole["cpu", "int8"]
        assert engine.drives is not None
        assert engine.drives.notes[0] == said
        assert "no converted trunk can be read: int8 is made of the released weights" in engine.drives.notes


def test_two_that_differ(model: Path, stores: list[Path], store: Path) -> None:
    """Each is what it says it is."""
    with Checkpoint.open(model) as checkpoint:
        form = converted.Form.of(checkpoint, store)
        there = ConvertedTrunk.open(store, checkpoint)
    place = form.spans[converted.CHECKSUMS].offset + 16 * list(form.matrices).index(NAME)
    with store.open("r+b") as file:
        file.seek(place)
        file.write((there.sums[NAME].values ^ 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=f"{store} and .* differ"), loaded(model, [stores[0], store.parent]):
        pass


# -- making it ---------------------------------------------------------------------------------------------------------


def test_what_is_there_is_compared_and_not_written_again(model: Path, store: Path) -> None:
    before = store.stat().st_mtime_ns
    outcome = made(model, store.parent)
    assert not outcome.written
    assert store.stat().st_mtime_ns == before
    flip(store, NAME)
    with pytest.raises(StorageError, match=f"{NAME} is not as it was written; remove it"):
        made(model, store.parent)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_stopped_it_leaves_nothing(share: float, model: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > share * total:
            raise Stopped

    with pytest.raises(Stopped):
        made(model, tmp_path / "new" / "folder", stop)
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    with pytest.raises(Stopped):
        made(model, tmp_path / "there", stop)
    assert not list((tmp_path / "there").iterdir())


def test_what_a_killed_one_left_is_removed(model: Path, tmp_path: Path) -> None:
    left, other = tmp_path / f".{FILE_NAME}.0123abcd", tmp_path / "L1-E0.bin"
    left.write_bytes(b"half")
    other.write_bytes(b"somebody's")
    (folder := tmp_path / f".{FILE_NAME}.89abcdef").mkdir()
    made(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE_NAME, other.name, folder.name}


def test_a_drive_that_does_not_keep_what_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(RealDevice):
        def read(self, file: str, offset: int, into: memoryview) -> int:
            moved = super().read(file, offset, into)
            into[-1] ^= 1
            return moved

    monkeypatch.setattr(conversion, "RealDevice", Forgetful)
    with pytest.raises(StorageError, match="what was written is not what is read back, in language_model"):
        made(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_drive_that_is_full(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion.os, "fsync", full)
        with pytest.raises(StorageError, match=f"cannot write .*{FILE_NAME}: No space left on device"):
            made(model, tmp_path / "new")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(StorageError, match="new cannot be written to: Permission denied"):
            made(model, tmp_path / "new")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: mock.Mock(free=10**6))
    with pytest.raises(StorageError, match=r"has 1 MB free; the trunk in int8 takes .* and 16.8 MB are to stay free"):
        made(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_places_that_are_refused(model: Path, tmp_path: Path) -> None:
    before = sorted(model.iterdir())
    for folder in (model, model / "below"):
        with pytest.raises(UsageError, match="is in the model's directory, where nothing is written"):
            made(model, folder)
    assert sorted(model.iterdir()) == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="is the directory of a checkpoint"):
        made(model, other)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "file", tmp_path / "link", Path(os.devnull)):
        for folder in (place, place / "below" / "it"):
            with pytest.raises(UsageError, match=f"--out {folder}: {place} is no directory: give one"):
                made(model, folder)
    (tmp_path / "taken").mkdir()
    lock = hold(tmp_path / "taken")
    with pytest.raises(UsageError, match="another process is writing there"):
        made(model, tmp_path / "taken")
    conversion.os.close(lock)


def test_weights_that_int8_cannot_hold(model: Path, tmp_path: Path) -> None:
    bad = Path(shutil.copytree(model, tmp_path / "bad"))
    with Checkpoint.open(bad) as checkpoint:
        span = checkpoint.span(NAME)
    bits = np.memmap(span.path, "<u2", "r+", span.offset, span.shape)
    bits[7, 3] = 0x7FC0  # not a number
    bits.flush()
    with pytest.raises(CheckpointError, match=f"{NAME}: row 7 has weights"):
        made(bad, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_the_plan_says_what_a_converted_trunk_would_read(model: Path, stores: list[Path]) -> None:
    limits = over([], limits=(Limit("m", 4e8),))
    with loaded(model, [], 1, layout=limits, trunk="bf16") as engine:
        released = engine.plan.trunk.read_bytes
        assert "; with --trunk int8, which is not weight-exact, " in engine.plan.streaming
        assert engine.plan.streaming.endswith(" from a converted trunk")
    with loaded(model, [], 1, layout=limits) as engine:
        assert engine.plan.trunk.read_bytes == released, "int8 is made of what is read"
        assert "; from a converted trunk (python -m runtime convert), " in engine.plan.streaming
    with loaded(model, stores, 1) as engine:
        assert engine.plan.trunk.read_bytes < released
        assert "convert" not in engine.plan.streaming


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_less_is_read_and_more_stays(backend: str, model: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    with Checkpoint.open(model) as checkpoint:
        made, read = (Divider(checkpoint, backend_type(backend), "int8", 4096, 4, there) for there in (False, True))
        assert read.everything == made.everything, "what is kept is the same"
        least = made.divide(0)
        room = least.resident_bytes + least.staging_bytes
        while (before := made.divide(room)).room_bytes:
            found = read.divide(room)
            assert found.resident_bytes + found.staging_bytes <= room
            assert found.read_bytes <= before.read_bytes / 2 + 2 * checkpoint.config.hidden_size
            room += 200_000


def test_from_the_command_line(cli: Command, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "trunk"
    outcome = cli("convert", "--trunk", "int8", "--model", model, "--out", out)
    assert outcome.status == 0
    assert "not weight-exact" in outcome.err
    assert f"--trunk int8 --drive NAME={out}" in outcome.err
    assert "are right" in cli("convert", "--trunk", "int8", "--model", model, "--out", out).out
    options = ["--prompt-ids", "1,2,3", "--max-new", "2", "--json", "--trunk", "int8", "--logits-hash"]
    wanted = cli("run", *on(model), *options).record
    found = cli("run", *on(model), *options, "--drive", f"t={out}")
    assert found.record["logits_sha256"] == wanted["logits_sha256"]
    assert found.record["settings"]["precision"].startswith("not weight-exact")
    assert found.record["io"]["by_drive"]["t"]["bytes"] > 0
    assert "t: 0 of 48 experts, the trunk in int8, " in found.err
    assert f"{MODEL}: 48 of 48 experts, of the trunk what stays as released, " in found.err
    (out / FILE_NAME).write_bytes(b"")
    broken = cli("run", *on(model), *options, "--drive", f"t={out}")
    assert broken.status == 3
    assert broken.err.count("\n") == 1


def test_verify_reads_it_whole(cli: Command, model: Path, stores: list[Path], store: Path) -> None:
    drives = ["--drive", f"a={stores[0]}", "--drive", f"b={store.parent}"]
    outcome = cli("verify", "--model", model, *drives)
    assert outcome.status == 0
    assert len(re.findall(r"^[ab] +the trunk in int8, .* in .* s, .*: right$", outcome.out, re.MULTILINE)) == 2
    flip(store, NAME)
    outcome = cli("verify", "--model", model, *drives)
    assert outcome.status == 4
    assert f"error: drive b: {store} is damaged: {NAME} is not as it was written; " in outcome.err
    edit(store, b"half to even", b"half to zero")
    outcome = cli("verify", "--model", model, *drives)
    assert (outcome.status, "drive b: " in outcome.err, "was rounded otherwise" in outcome.err) == (4, True, True)


def test_the_map_of_drives_shows_it(cli: Command, model: Path, stores: list[Path], store: Path) -> None:
    options = ["drives", "map", "--model", model, "--drive", f"a={stores[0]}", "--drive", f"b={store.parent}"]
    assert cli(*options).out.count("0 of 48 experts, the trunk in int8\n") == 2
    edit(store, b"half to even", b"half to zero")
    record = cli(*options, "--json").record["drives"]
    assert [record[name]["holds"]["trunk"] for name in (MODEL, "a", "b")] == ["bf16", "int8", None]
    assert any("was rounded otherwise" in note for note in record["b"]["notes"])


def test_the_doctor_tells_of_each_and_ends_as_the_run_does(
    cli: Command, model: Path, stores: list[Path], store: Path
) -> None:
    drives = ["--model", model, "--drive", f"a={stores[0]}", "--drive", f"b={store.parent}"]

    def told(*options: str) -> tuple[int, list[list[tuple[str, str]]]]:
        found = cli("doctor", *drives, *options, "--json")
        assert found.status == cli("run", *drives, *options, "--prompt-ids", "1", "--max-new", "1").status
        texts = [
            [(one["level"], one["text"]) for one in found.record["findings"] if one["about"] == f"drive {name}"][1:]
            for name in "ab"
        ]
        assert [one["level"] for one in found.record["findings"]].count("problem") == (found.status != 0)
        return found.status, texts

    unread, read = (
        ("ok", f"its trunk in int8 is this model's, and {how}") for how in ("only --trunk int8 would read", "is read")
    )
    assert told() == (0, [[unread], [unread]])
    assert told("--trunk", "int8") == (0, [[read], [read]])
    assert told("--trunk", "int8", "--memory", "1M")[0] == 5
    assert told("--memory", "much")[0] == 2
    assert f"drive a: {FILE_NAME} there is what --trunk int8 would read" in cli("doctor", *drives).out
    edit(store, b"half to even", b"half to zero")
    for level, status, options in (("note", 0, []), ("problem", 3, ["--trunk", "int8"])):
        found, (_, ((said, text),)) = told(*options)
        assert (found, said, "was rounded otherwise" in text) == (status, level, True)


def test_precision_is_never_chosen_unasked(cli: Command, model: Path, tmp_path: Path) -> None:
    outcome = cli("convert", "--model", model, "--out", tmp_path / "trunk")
    assert outcome.status == 2
    assert "--trunk" in outcome.err
    assert not (tmp_path / "trunk").exists()
