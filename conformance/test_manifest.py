"""The manifest, and `--verify-reads`: wrong bytes are noticed before anybody computes with them."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from commandline import Command, on
from copies import every, flip, flip_in_model, large_experts, rewrite, write_experts

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.arrays import read_arrays, write_arrays
from runtime.checkpoint.manifest import COPY_NAME, Manifest, digest, load_if_there, manifest_path
from runtime.drives.jobs import MIB, Kind, Priority, Slice
from runtime.drives.real import RealDevice
from runtime.errors import CheckpointError, StorageError
from runtime.generate import Engine, Step
from runtime.weights import layout as arrangement
from runtime.weights.checks import ReadChecks
from runtime.weights.layout import Drives, Layout
from runtime.weights.placement import MODEL

Outcome = list[tuple[int, str | None]]


def manifest_of(checkpoint: Checkpoint) -> Manifest:
    """What is in the model directory is right."""
    manifest = Manifest(checkpoint, "the test")
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.num_experts):
            manifest.put(layer, expert, digest(expert_bytes(checkpoint, layer, expert).data))
    return manifest


def expert_bytes(checkpoint: Checkpoint, layer: int, expert: int) -> np.ndarray:
    return np.concatenate([part.ravel() for part in checkpoint.read_expert(layer, expert)])


def keep(model: Path, says: Path | None = None) -> None:
    """Put the manifest of the model, or what another one says, into the program's home, for the model."""
    with Checkpoint.open(says or model) as source:
        manifest = manifest_of(source)
    with Checkpoint.open(model, experts_elsewhere=True) as checkpoint:
        manifest.fingerprint = checkpoint.fingerprint
        manifest.save(manifest_path(checkpoint))


def answer(engine: Engine, ids: Iterable[int] = (1, 2, 3, 4, 5)) -> Outcome:
    steps: Iterable[Step] = engine.session().generate(list(ids), 4, logits_hash=True)
    return [(step.token_id, step.logits_sha256) for step in steps]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever late."""
    policy = replace(arrangement.POLICY, deadline_floor_s=1000.0, check_timeout_s=20.0)
    monkeypatch.setattr(arrangement, "POLICY", policy)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Outcome:
    with Engine.load(tiny, backend="cpu") as engine:
        return answer(engine)


@pytest.fixture(scope="module")
def bare(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its routed experts."""
    return rewrite(tiny, tmp_path_factory.mktemp("bare") / "model", lambda name: ".experts." not in name)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_experts(tmp_path_factory.mktemp("large") / "model")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Drives named here leave most of the work to others."""
    names: set[str] = set()

    class Slow(RealDevice):
        def read(self, file: str, offset: int, into: memoryview) -> int:
            if self.name in names:
                time.sleep(0.005)
            return super().read(file, offset, into)

    monkeypatch.setattr("runtime.drives.real.RealDevice", Slow)
    return names


# -- the file ------------------------------------------------------------------------------------------------------


def test_what_it_holds(large: Path, tmp_path: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        data = expert_bytes(checkpoint, 2, 3).tobytes()
        manifest = Manifest(checkpoint, "here")
        assert manifest.get(2, 3) is None
        manifest.put(2, 3, digest(memoryview(data)))
        path = tmp_path / "new" / "manifest"
        manifest.save(path)
        again = Manifest.load(path, checkpoint)
        assert np.argwhere(again.known).tolist() == [[1, 3]]
        assert again.made_from == "here"
        found = again.get(2, 3)
        assert found is not None
        assert found.sha256 == hashlib.sha256(data).digest()
        parts = [data[at : at + MIB] for at in range(0, len(data), MIB)]
        assert len(parts) == 7
        assert len(parts[-1]) < MIB
        assert found.blocks.tolist() == [xxhash.xxh3_64_intdigest(part) for part in parts]


def test_any_safetensors_library_reads_it(tiny: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="the official library is not here")
    with Checkpoint.open(tiny) as checkpoint:
        manifest = manifest_of(checkpoint)
        manifest.save(tmp_path / "m")
        with safetensors.safe_open(tmp_path / "m", "np") as file:
            assert file.metadata()["schema"] == "expertstream.manifest/1"
            assert file.metadata()["fingerprint"] == checkpoint.fingerprint
            for name, array in (("known", manifest.known), ("sha256", manifest.sha256), ("xxh3_64", manifest.blocks)):
                assert np.array_equal(file.get_tensor(name), array)


def test_what_is_no_manifest_of_this_model(tiny: Path, large: Path, tmp_path: Path) -> None:
    path = tmp_path / "m"
    with Checkpoint.open(tiny) as checkpoint, Checkpoint.open(large) as other:
        manifest_of(checkpoint).save(path)
        with pytest.raises(CheckpointError, match="manifest of another model, fingerprint"):
            Manifest.load(path, other)
        whole = path.read_bytes()
        for damaged in (whole[:7], whole[:100], whole[:-1], whole + b"x", b"", b"no manifest at all"):
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="remove it; python -m runtime verify makes a new one"):
                Manifest.load(path, checkpoint)
            assert load_if_there(path, checkpoint)[0] is None
        path.write_bytes(whole)
        for at in range(len(whole) - 2000, len(whole), 333):
            flip(path, at)
            with pytest.raises(CheckpointError, match="damaged"):
                Manifest.load(path, checkpoint)
            flip(path, at)
        arrays, words = read_arrays(path)
        for change in ({"known": arrays["known"][1:]}, {"sha256": arrays["sha256"].astype("<u8")}):
            write_arrays(path, arrays | change, words)
            with pytest.raises(CheckpointError, match="damaged"):
                Manifest.load(path, checkpoint)
        write_arrays(path, arrays, words | {"schema": "expertstream.manifest/2"})
        with pytest.raises(CheckpointError, match="no manifest"):
            Manifest.load(path, checkpoint)
        path.unlink()
        assert load_if_there(path, checkpoint) == (None, "")
        path.mkdir()
        assert load_if_there(path, checkpoint)[0] is None


# -- slices --------------------------------------------------------------------------------------------------------


def part(key: tuple[int, int], start: int, length: int, drive: str = MODEL) -> Slice:
    numbers = {"lease": 1, "job_bytes": length, "phase": 0, "barrier": 0, "expected_s": 0.0, "deadline": 0.0}
    return Slice(1, key, drive, "file", start, start, length, **numbers, bounce=False, kind=Kind.FIRST,
                 priority=Priority.DEMAND)  # type: ignore[arg-type] # fmt: skip


def test_a_wrong_bit_is_found_in_every_slice_that_has_it_and_in_no_other(large: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        manifest = manifest_of(checkpoint)
        good = expert_bytes(checkpoint, 1, 2)
        for at in (0, MIB - 1, MIB, 3 * MIB + 17, good.size - 1):
            bad = good.copy()
            bad[at] ^= 64
            checks = ReadChecks(checkpoint, "all", {MODEL: manifest})
            for first in range(7):
                for last in range(first + 1, 8):
                    start, end = first * MIB, min(last * MIB, good.size)
                    piece = part((1, 2), start, end - start)
                    assert checks(piece, good[start:end].data) == ""
                    said = checks(piece, bad[start:end].data)
                    assert bool(said) == (start <= at < end)
                    assert not said or f"file: MiB {at // MIB + 1} of 7 not as the manifest says" in said


def test_first_looks_once_at_each_block_of_each_drive_and_all_always(large: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        manifest = manifest_of(checkpoint)
        good = expert_bytes(checkpoint, 1, 2)
        bad = good.copy()
        bad[5 * MIB] ^= 1
        drives = {MODEL: manifest, "b": manifest}
        first = ReadChecks(checkpoint, "first", drives)
        head, rest = part((1, 2), 0, 4 * MIB), part((1, 2), 4 * MIB, good.size - 4 * MIB)
        assert first(head, good[: 4 * MIB].data) == ""
        for _ in range(2):
            assert "MiB 6 of 7" in first(rest, bad[4 * MIB :].data), "what was wrong is looked at again"
        assert first(rest, good[4 * MIB :].data) == ""
        assert first(rest, bad[4 * MIB :].data) == "", "what was right is not"
        assert "MiB 6 of 7" in first(part((1, 2), 4 * MIB, good.size - 4 * MIB, "b"), bad[4 * MIB :].data)
        every_time = ReadChecks(checkpoint, "all", drives)
        assert every_time(rest, good[4 * MIB :].data) == ""
        assert "MiB 6 of 7" in every_time(rest, bad[4 * MIB :].data)
        assert not ReadChecks(checkpoint, "off", drives).active


def test_what_the_manifest_does_not_know_is_not_checked(large: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        manifest = Manifest(checkpoint)
        manifest.put(1, 0, digest(expert_bytes(checkpoint, 1, 0).data))
        checks = ReadChecks(checkpoint, "all", {MODEL: manifest})
        zeros = np.zeros(checkpoint.expert_nbytes, np.uint8).data
        assert checks(part((1, 0), 0, len(zeros)), zeros)
        assert checks(part((1, 1), 0, len(zeros)), zeros) == ""
        assert checks(part((1, 0), 0, len(zeros), "unknown"), zeros) == ""
        assert str(checks).endswith("1 of 8 experts in the manifest")


def test_a_drives_own_manifest_speaks_of_its_own_copies_alone(large: Path, tmp_path: Path) -> None:
    with Checkpoint.open(large) as checkpoint:
        whole, general = manifest_of(checkpoint), Manifest(checkpoint)
        general.put(1, 0, digest(memoryview(b"\1" * checkpoint.expert_nbytes)))
        general.save(manifest_path(checkpoint))
        whole.save(tmp_path / COPY_NAME)
        checks = ReadChecks.open(checkpoint, "first", {MODEL: large, "b": tmp_path})
        assert checks.coverage == {MODEL: 1, "b": 8}
        data, wrong = expert_bytes(checkpoint, 1, 1).data, np.zeros(checkpoint.expert_nbytes, np.uint8).data
        assert checks(part((1, 1), 0, len(data)), wrong) == ""
        assert checks(part((1, 1), 0, len(data), "b"), wrong)
        assert checks(part((1, 1), 0, len(data), "b"), data) == ""
        right = expert_bytes(checkpoint, 1, 0).data
        assert checks(part((1, 0), 0, len(right), "b"), right), "where both know, the general one decides"


# -- whole runs ----------------------------------------------------------------------------------------------------


def stale(model: Path, directory: Path, at: int = 3) -> Path:
    """A copy of every expert, each with a wrong bit, at the right length."""
    write_experts(model, directory, every)
    for file in directory.iterdir():
        flip(file, at)
    return directory


@pytest.mark.parametrize("mode", ["first", "all"])
def test_a_stale_replica_costs_time_and_not_the_answer(
    mode: str, tiny: Path, alone: Outcome, tmp_path: Path, slow: set[str]
) -> None:
    keep(tiny)
    replica = stale(tiny, tmp_path / "replica")
    slow.add(MODEL)
    with Engine.load(tiny, backend="cpu", layout=Layout((("r", replica),)), verify_reads=mode) as engine:  # type: ignore[arg-type]
        assert answer(engine) == alone
        assert engine.drives is not None
        counts, kinds, _ = engine.drives.counts()
        assert counts["r"].errors >= 1
        assert counts["r"].reads <= kinds["check"].reads, "not a byte of it was used"
        assert counts[MODEL].errors == 0


def test_without_checks_it_is_believed(tiny: Path, alone: Outcome, tmp_path: Path, bare: Path) -> None:
    keep(bare, tiny)
    replica = stale(tiny, tmp_path / "replica")
    with Engine.load(bare, backend="cpu", layout=Layout((("r", replica),)), verify_reads="off") as engine:
        assert answer(engine) != alone


def test_among_three_copies_the_wrong_ones_are_left_out(
    bare: Path, tiny: Path, alone: Outcome, tmp_path: Path, slow: set[str]
) -> None:
    keep(bare, tiny)
    stale(tiny, tmp_path / "a")
    stale(tiny, tmp_path / "b", at=77)
    write_experts(tiny, tmp_path / "c", every)
    slow.add("c")
    layout = Layout(tuple((name, tmp_path / name) for name in "abc"))
    with Engine.load(bare, backend="cpu", layout=layout) as engine:
        assert answer(engine) == alone
        assert engine.drives is not None
        counts, kinds, _ = engine.drives.counts()
        assert counts["a"].reads + counts["b"].reads <= kinds["check"].reads
        assert counts["c"].errors == 0
        assert counts["a"].errors + counts["b"].errors >= 1


def test_slices_of_one_expert_over_two_drives(large: Path, tmp_path: Path, slow: set[str]) -> None:
    """Experts are cut; a slice with the wrong bit is read again from the other drive."""
    slow.add(MODEL)
    keep(large)
    write_experts(large, tmp_path / "b", every)
    for file in (tmp_path / "b").iterdir():
        flip(file, 4 * MIB + 5)
    with Checkpoint.open(large) as checkpoint:
        layout = Layout((("b", tmp_path / "b"),))
        drives = Drives(checkpoint, layout)
        checks = ReadChecks.open(checkpoint, "all", layout.paths(large))
        seen: list[tuple[str, int, int, bool]] = []
        lock = threading.Lock()

        def verify(piece: Slice, view: memoryview) -> str:
            said = checks(piece, view)
            with lock:
                seen.append((piece.drive, piece.start, piece.length, bool(said)))
            return said

        reads = drives.start(64 * drives.unit_bytes, verify)
        for _ in range(6):
            for layer in (1, 2):
                reads.submit(layer, range(4))
                for expert, packed, give_back in reads.landed(layer, range(4)):
                    got = np.concatenate([tensor.ravel() for tensor in packed])
                    assert np.array_equal(got, expert_bytes(checkpoint, layer, expert))
                    del packed, got
                    give_back()
        drives.close()
        assert all(start % MIB == 0 for _, start, _, _ in seen)
        for drive, start, length, wrong in seen:
            assert wrong == (drive == "b" and start <= 4 * MIB + 5 < start + length)
        assert any(wrong for *_, wrong in seen)


def test_wrong_bytes_are_told_apart_from_other_failures(
    cli: Command, tiny: Path, tmp_path: Path, slow: set[str]
) -> None:
    keep(tiny)
    slow.add(MODEL)
    replica = stale(tiny, tmp_path / "replica")
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 2, "--drive", f"r={replica}", "--json")
    errors = ended.record["io"]["by_drive"]["r"]["errors"]
    assert errors >= 1
    told = f"note     drive r: {errors} reads failed, {errors} of them by wrong bytes ("
    assert f"{told}python -m runtime verify names them); other copies were read; the last: layer " in ended.err


def test_with_the_last_copy_bad_the_run_ends_and_names_it(cli: Command, bare: Path, tiny: Path, tmp_path: Path) -> None:
    keep(bare, tiny)
    replica = stale(tiny, tmp_path / "replica")
    ended = cli("run", *on(bare), "--prompt-ids", "1,2,3", "--max-new", 2, "--drive", f"r={replica}")
    assert ended.status == 4
    last = ended.err.splitlines()[-1]
    assert last.startswith("error: layer 1 expert ")
    assert "no copy left that can be read; drive r: wrong bytes: L1-E" in last
    assert ".bin: MiB 1 of 1 not as the manifest says; python -m runtime verify" in last


def test_plain_reads_are_checked_too(cli: Command, tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    keep(model)
    line = ("run", *on(model), "--prompt-ids", "1,2,3", "--max-new", 2)
    ended = cli(*line)
    assert ended.status == 0
    assert "verify   the first read of each expert and drive, 128 of 128 experts in the manifest" in ended.err
    for expert in range(16):
        flip_in_model(model, 3, expert, 100)
    ended = cli(*line)
    assert ended.status == 4
    assert "error: layer 3 expert " in ended.err
    assert "drive model: wrong bytes: MiB 1 of 1 not as the manifest says" in ended.err
    assert cli(*line, "--verify-reads", "off").status == 0
    with Engine.load(model, backend="reference") as engine, pytest.raises(StorageError):
        answer(engine)


def test_what_is_said_and_recorded(cli: Command, tiny: Path) -> None:
    line = ["run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 1, "--json"]
    simulated = [*line, "--simulate-drive", "a=400MB/s"]
    for arguments, said in ((line, ""), (simulated, "off: no manifest; python -m runtime verify makes one")):
        ended = cli(*arguments)
        assert [text[9:] for text in ended.err.splitlines() if text.startswith("verify")] == [said] * bool(said)
        assert ended.record["settings"]["verify_reads"] == {"mode": "off", "experts": {}}
    keep(tiny)
    ended = cli(*simulated)
    assert "verify   the first read of each expert and drive, 128 of 128 experts in the manifest\n" in ended.err
    assert ended.record["settings"]["verify_reads"] == {"mode": "first", "experts": {"a": 128}}
    off = cli(*simulated, "--verify-reads", "off")
    assert "verify   off, as asked\n" in off.err
    plan = ended.record["memory"]["plan"]["reading"] - off.record["memory"]["plan"]["reading"]
    assert plan == 128 * (1 + 32 + 8 + 1), "known, SHA-256, one checksum, seen"
    assert cli(*simulated, "--verify-reads", "all").record["settings"]["verify_reads"]["mode"] == "all"
    assert json.loads(cli(*line).out)["settings"]["verify_reads"]["mode"] == "first"


def test_a_bad_manifest_is_a_note_and_the_run_goes_on(cli: Command, tiny: Path) -> None:
    keep(tiny)
    with Checkpoint.open(tiny) as checkpoint:
        flip(manifest_path(checkpoint), manifest_path(checkpoint).stat().st_size - 9)
    ended = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 1, "--simulate-drive", "a=400MB/s")
    assert ended.status == 0
    assert "is damaged: its bytes are not those that were written; remove it" in ended.err
    assert "verify   off: no manifest" in ended.err
