"""`verify`: every copy read and compared, the manifest made, what is bad named."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from commandline import HANGS_S, Command, Start, read_until
from copies import every, flip, flip_in_model, large_experts, rewrite, write_experts
from loopback import ext4_image

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import COPY_NAME, Manifest, manifest_path
from runtime.commands import verify as command
from runtime.drives.device import DeviceError
from runtime.drives.jobs import MIB, Fault
from runtime.drives.real import RealDevice
from runtime.errors import Cancelled
from runtime.progress import Progress
from runtime.setup import copies as opened
from runtime.setup.verify import GIVE_UP, Found


@pytest.fixture(scope="module")
def bare(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model without its routed experts."""
    return rewrite(tiny, tmp_path_factory.mktemp("bare") / "model", lambda name: ".experts." not in name)


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    return shutil.copytree(tiny, tmp_path / "model")


def known(model: Path) -> Manifest:
    with Checkpoint.open(model, experts_elsewhere=True) as checkpoint:
        return Manifest.load(manifest_path(checkpoint), checkpoint)


def drives(**places: Path) -> list[object]:
    return [word for name, path in places.items() for word in ("--drive", f"{name}={path}")]


def test_the_first_makes_the_manifest_and_the_second_compares(cli: Command, tiny: Path, tmp_path: Path) -> None:
    write_experts(tiny, tmp_path / "a", lambda _, expert: expert < 3)
    ended = cli("verify", "--model", tiny, *drives(a=tmp_path / "a"))
    assert ended.status == 0
    assert [line.split(",")[0] for line in ended.out.splitlines()] == [
        "model    128 copies",
        "a        24 copies",
        "manifest 128 of 128 experts",
    ]
    assert ended.out.count("none bad") == 2
    assert "128 now from the model directory" in ended.out
    manifest = known(tiny)
    assert manifest.known.all()
    assert manifest.made_from == "the model directory"
    with Checkpoint.open(tiny) as checkpoint:
        path = manifest_path(checkpoint)
    before = path.stat().st_mtime_ns
    again = cli("verify", "--model", tiny)
    assert again.out.splitlines()[-1] == "manifest 128 of 128 experts"
    assert path.stat().st_mtime_ns == before
    assert os.listdir(path.parent) == [path.name]


def test_a_model_whose_experts_are_scattered(cli: Command, tiny: Path, tmp_path: Path) -> None:
    """The manifest is of the experts, wherever their tensors lie."""
    scattered = rewrite(tiny, tmp_path / "scattered")
    for path in (tiny, scattered):
        assert cli("verify", "--model", path).status == 0
    assert (known(tiny).sha256 == known(scattered).sha256).all()
    assert (known(tiny).blocks == known(scattered).blocks).all()


def test_each_kind_of_damage_is_named(cli: Command, tmp_path: Path) -> None:
    model = large_experts(tmp_path / "large")
    assert cli("verify", "--model", model).status == 0
    a, b = (write_experts(model, tmp_path / name, every) for name in "ab")
    flip(a / "L1-E2.bin", 3 * MIB + 5)
    flip(a / "L1-E3.bin", 0)
    flip(a / "L1-E3.bin", 7 * MIB - 800000)
    os.truncate(b / "L2-E0.bin", 1000)
    (b / "L2-E1.bin").unlink()
    (b / "L2-E1.bin").symlink_to(a / "L2-E1.bin")
    ended = cli("verify", "--model", model, *drives(a=a, b=b))
    assert ended.status == 4
    assert ended.err.splitlines()[1:] == [
        "error: 4 of 22 copies of experts are bad; remove them, and let replicate --to fill the drive again",
        "  drive a: layer 1 expert 2: L1-E2.bin: MiB 4 of 7 not as the manifest says",
        "  drive a: layer 1 expert 3: L1-E3.bin: MiB 1, 7 of 7 not as the manifest says",
        "  drive b: layer 2 expert 0: L2-E0.bin has 1,000 bytes, not 6,684,672",
        "  drive b: layer 2 expert 1: L2-E1.bin is no regular file",
    ]
    assert "model    8 copies" in ended.out
    flip_in_model(model, 2, 1, 5 * MIB)
    ended = cli("verify", "--model", model)
    assert ended.status == 4
    assert "1 of 8 copies of experts are bad; fetch the model's files again, or" in ended.err
    assert "drive model: layer 2 expert 1: model-00003-of-000004.safetensors: MiB 6 of 7 not as" in ended.err


def test_many_bad_copies_are_counted(cli: Command, tiny: Path, tmp_path: Path) -> None:
    assert cli("verify", "--model", tiny).status == 0
    for file in write_experts(tiny, tmp_path / "a", every).iterdir():
        flip(file, 50)
    ended = cli("verify", "--model", tiny, *drives(a=tmp_path / "a"))
    assert ended.status == 4
    lines = ended.err.splitlines()
    assert len(lines) == 1 + 1 + 20 + 1
    assert lines[-1] == f"  ... and {128 - 20} more"


def test_build_begins_anew(cli: Command, model: Path) -> None:
    assert cli("verify", "--model", model).status == 0
    flip_in_model(model, 4, 9, 77)
    assert cli("verify", "--model", model).status == 4
    ended = cli("verify", "--model", model, "--build")
    assert ended.status == 0
    assert "1 are other than before" in ended.out
    assert cli("verify", "--model", model).status == 0


# -- nobody to say what is right -----------------------------------------------------------------------------------


def test_copies_that_agree_are_believed_and_those_that_differ_are_not(
    cli: Command, bare: Path, tiny: Path, tmp_path: Path
) -> None:
    a, b, c = (write_experts(tiny, tmp_path / name, lambda layer, _: layer < 8) for name in "abc")
    write_experts(tiny, tmp_path / "last", lambda layer, _: layer == 8)
    flip(b / "L3-E5.bin", 9)
    two = cli("verify", "--model", bare, *drives(a=a, b=b, last=tmp_path / "last"))
    assert two.status == 4
    assert "of 1 experts the copies differ and no manifest says which is right" in two.err
    assert two.err.splitlines()[-1] == "  layer 3 expert 5: drives differ, a from b"
    assert "111 now from copies that agree, 16 now from a lone copy" in two.out
    assert known(bare).known.sum() == 127
    three = cli("verify", "--model", bare, *drives(a=a, b=b, c=c))
    assert three.err.splitlines()[-1] == (
        "  layer 3 expert 5: drives differ, a and c from b; most likely right: a and c"
    )
    assert known(bare).known.sum() == 127, "a majority is a hint and no proof"
    one = cli("verify", "--model", bare, *drives(a=a, c=c))
    assert one.status == 0
    assert known(bare).known.all()
    assert "drive b: layer 3 expert 5: L3-E5.bin: MiB 1 of 1" in cli("verify", "--model", bare, *drives(b=b)).err


def test_a_drives_own_manifest_tells_which_copy_is_right(cli: Command, bare: Path, tiny: Path, tmp_path: Path) -> None:
    a, b = (write_experts(tiny, tmp_path / name, every) for name in "ab")
    assert cli("verify", "--model", bare, *drives(a=a)).status == 0
    with Checkpoint.open(bare, experts_elsewhere=True) as checkpoint:
        shutil.move(manifest_path(checkpoint), a / COPY_NAME)
    flip(b / "L1-E0.bin", 1)
    ended = cli("verify", "--model", bare, *drives(a=a, b=b))
    assert ended.status == 4
    assert "128 now from a drive's own manifest" in ended.out
    assert ended.err.splitlines()[-1] == "  drive b: layer 1 expert 0: L1-E0.bin: MiB 1 of 1 not as the manifest says"


def test_a_replica_of_other_weights_is_called_that(cli: Command, model: Path, tmp_path: Path) -> None:
    a = write_experts(model, tmp_path / "a", every)
    assert cli("verify", "--model", model).status == 0
    with Checkpoint.open(model) as checkpoint:
        shutil.move(manifest_path(checkpoint), a / COPY_NAME)
    flip_in_model(model, 2, 2, 30)
    ended = cli("verify", "--model", model, *drives(a=a))
    assert ended.status == 4
    assert ended.err.splitlines()[-1] == (
        "  drive a: layer 2 expert 2: L2-E2.bin: MiB 1 of 1 not as the manifest says, "
        "but what the drive's own manifest says: a copy of other weights"
    )


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_files_that_cannot_be_read(cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experts(tiny, tmp_path / "a", every)

    class Ill(RealDevice):
        def read(self, file: str, offset: int, into: memoryview) -> int:
            if self.name == "a" and (file == "L1-E3.bin" or gone):
                raise DeviceError(Fault.IO, f"{file} at {offset}: Input/output error")
            return super().read(file, offset, into)

    monkeypatch.setattr("runtime.drives.real.RealDevice", Ill)
    gone = False
    ended = cli("verify", "--model", tiny, *drives(a=tmp_path / "a"))
    assert ended.status == 4
    assert ended.err.splitlines()[-1] == "  drive a: layer 1 expert 3: L1-E3.bin at 0: Input/output error"
    assert known(tiny).known.all()
    gone = True
    ended = cli("verify", "--model", tiny, *drives(a=tmp_path / "a"))
    assert ended.status == 4
    tried = int(ended.out.split("a        ")[1].split()[0])
    assert GIVE_UP <= tried <= GIVE_UP + 2 * opened.DEPTH
    assert f"{tried} bad, {128 - tried} not read" in ended.out


def test_stopped_it_keeps_what_it_has_learned(cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = command.read_all

    def part(found: Sequence[Found], progress: Progress) -> None:
        def until_half(done: int, total: int) -> None:
            if 2 * done >= total:
                os.kill(os.getpid(), signal.SIGINT)
            progress(done, total)

        whole(found, until_half)

    monkeypatch.setattr(command, "read_all", part)
    ended = cli("verify", "--model", tiny)
    assert ended.status == 130
    assert ended.err.splitlines()[-1] == "stopped while verifying, as asked"
    assert "64 not read" in ended.out
    assert known(tiny).known.sum() == 64
    monkeypatch.undo()


def test_stopped_it_believes_no_copy_before_it_has_seen_the_others(
    cli: Command, bare: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (write_experts(tiny, tmp_path / name, every) for name in "ab")
    flip(a / "L1-E1.bin", 1)
    whole = command.read_all

    def the_first_drive(found: Sequence[Found], progress: Progress) -> None:
        whole(found[:1], progress)
        raise Cancelled("stopped")

    monkeypatch.setattr(command, "read_all", the_first_drive)
    assert cli("verify", "--model", bare, *drives(a=a, b=b)).status == 130
    with Checkpoint.open(bare, experts_elsewhere=True) as checkpoint:
        assert not manifest_path(checkpoint).exists()


def test_a_signal_ends_a_process(start: Start, tmp_path: Path) -> None:
    process = start("verify", "--model", large_experts(tmp_path / "large"))
    assert process.stderr is not None
    read_until(process.stderr.fileno(), b"model ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS_S)
    assert process.returncode in (0, 130), (out, err)  # it may have been through
    assert b"Traceback" not in err


def test_a_home_that_cannot_be_written_is_one_line(
    cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(tmp_path / "file"))
    ended = cli("verify", "--model", tiny)
    assert ended.status == 4
    assert "none bad" in ended.out
    _, note, error = ended.err.splitlines()
    assert note.startswith(f"note     a new manifest cannot be kept in {tmp_path / 'file'}")
    assert error.startswith(f"error: the manifest cannot be written to {tmp_path / 'file'}")


def test_a_home_without_room_is_one_line(
    cli: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ext4_image(tmp_path) as (_, mount):
        (mount / "manifests").mkdir()
        with suppress(OSError), open(mount / "filler", "wb") as file:
            while True:
                file.write(bytes(1 << 20))
        with suppress(OSError), open(mount / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(512))
        monkeypatch.setenv("EXPERTSTREAM_HOME", str(mount))
        ended = cli("verify", "--model", tiny)
        assert ended.status == 4
        assert ended.err.splitlines()[-1].endswith("No space left on device; make room, or set EXPERTSTREAM_HOME")
        assert os.listdir(mount / "manifests") == []


def test_a_manifest_that_is_named(cli: Command, tiny: Path, bare: Path, tmp_path: Path) -> None:
    assert cli("verify", "--model", tiny).status == 0
    with Checkpoint.open(tiny) as checkpoint:
        named = shutil.move(manifest_path(checkpoint), tmp_path / "named")
    assert cli("verify", "--model", tiny, "--manifest", named).status == 0
    assert known(tiny).known.all()
    assert cli("verify", "--model", tiny, "--manifest", named, "--build").status == 2
    other = cli("verify", "--model", large_experts(tmp_path / "large"), "--manifest", named)
    assert other.status == 3
    assert "is the manifest of another model" in other.err
    flip(named, named.stat().st_size - 50)
    damaged = cli("verify", "--model", tiny, "--manifest", named)
    assert damaged.status == 3
    assert "is damaged" in damaged.err
    assert cli("verify", "--model", tiny, "--manifest", tmp_path / "none").status == 3
    shard = cli("verify", "--model", tiny, "--manifest", next(tiny.glob("*.safetensors")))
    assert (shard.status, "name another with --manifest" in shard.err, "remove" in shard.err) == (3, True, False)


def test_a_manifest_that_is_not_there_need_not_be_removed(cli: Command, tiny: Path, tmp_path: Path) -> None:
    ended = cli("verify", "--model", tiny, "--manifest", tmp_path / "none")
    assert ended.status == 3
    assert ended.err.splitlines()[-1] == f"error: cannot read {tmp_path / 'none'}: No such file or directory"


def test_the_embedded_model_is_verified_too(cli: Command) -> None:
    ended = cli("verify")
    assert ended.status == 0
    assert "224 of 224 experts" in ended.out
