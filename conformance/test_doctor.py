"""`doctor`: what it finds is what a run would meet, and it ends as the run would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commandline import Command
from copies import write_experts

from runtime.commands import doctor
from runtime.drives.hardware import Disk, look_at
from runtime.generate import plan
from runtime.generate.limits import Limit
from runtime.ops.kernels import jit

MACHINE = ["python", "versions", "processor", "kernels", "mlx", "backend", "memory", "descriptors", "home"]


def findings(record: dict[str, Any], about: str) -> list[tuple[str, str]]:
    """(level, text) of what is said about something."""
    return [(found["level"], found["text"]) for found in record["findings"] if found["about"] == about]


def test_where_a_run_works_it_says_so_in_lines_and_leaves_nothing_behind(cli: Command, own_home: Path) -> None:
    outcome = cli("doctor")
    assert (outcome.status, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "note"}
    said = [line[9:22].strip() for line in lines]
    assert [about for about in said if about in MACHINE] == MACHINE
    assert said[-1] == "plan"
    assert not any(own_home.iterdir())


def test_a_model_and_its_drives_are_looked_at_as_a_run_does(cli: Command, tiny: Path, tmp_path: Path) -> None:
    write_experts(tiny, tmp_path / "a", lambda _, expert: expert % 2 == 0)
    outcome = cli("doctor", "--model", tiny, "--drive", f"a={tmp_path / 'a'}", "--json")
    record = outcome.record
    assert outcome.status == 0
    assert record["schema"] == "expertstream.doctor/1"
    assert {found["level"] for found in record["findings"]} <= {"ok", "note"}
    reads = [text for _, text in findings(record, "reads")]
    assert any(text.startswith("model: 128 of 128 experts, the trunk, ") for text in reads)
    assert any(text.startswith("a: 64 of 128 experts, ") for text in reads)
    for name in ("model", "a"):
        ((_, text),) = findings(record, f"drive {name}")
        assert " on " in text
        assert "read " in text
    assert findings(record, "verify") == [("note", "off: no manifest; python -m runtime verify makes one")]
    ((_, division),) = findings(record, "plan")
    assert "expert cache" in division


def broken(tiny: Path, path: Path, spoil: Callable[[Path], object]) -> Path:
    """A copy of the checkpoint, spoiled."""
    copy = path / "copy"
    shutil.copytree(tiny, copy)
    spoil(copy)
    return copy


@pytest.mark.parametrize("what", ["no model", "no drive", "odd drive", "no shard", "no config", "taken name"])
def test_it_ends_as_the_run_does_and_in_its_words(what: str, cli: Command, tiny: Path, tmp_path: Path) -> None:
    options: list[object] = {
        "no model": lambda: ["--model", tmp_path / "nowhere"],
        "no drive": lambda: ["--model", tiny, "--drive", f"a={tmp_path / 'nowhere'}"],
        "odd drive": lambda: ["--drive", "a"],
        "no shard": lambda: ["--model", broken(tiny, tmp_path, lambda at: next(at.glob("*-00003-*")).unlink())],
        "no config": lambda: ["--model", broken(tiny, tmp_path, lambda at: (at / "config.json").write_text("{"))],
        "taken name": lambda: ["--model", tiny, "--drive", f"a={tmp_path}", "--drive", "model=/"],
    }[what]()
    run = cli("run", "--prompt-ids", "1", "--max-new", 1, "--json", *options)
    outcome = cli("doctor", "--json", *options)
    assert outcome.status == run.status != 0
    assert outcome.record["error"] == run.record["error"]
    assert [found["level"] for found in outcome.record["findings"]].count("problem") == 1
    assert outcome.err == ""


def test_what_does_not_fit_is_said_with_the_floor(cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "memory_limit", lambda _: Limit(10**6, "a test"))
    outcome = cli("doctor", "--model", tiny)
    assert outcome.status == 5
    assert outcome.out.splitlines()[-1].startswith("problem  does not fit")
    assert "The least it can run in is" in outcome.out
    assert "checkpoint" in outcome.out


def test_a_compiler_that_is_turned_off_is_a_problem(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jit._CONFIG, "DISABLE_JIT", 1)
    outcome = cli("doctor")
    assert outcome.status == 2
    assert outcome.out.splitlines()[-1].endswith("unset NUMBA_DISABLE_JIT or use --backend reference")


def test_kernels_that_are_not_kept_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jit.build()
    assert (jit.uncompiled() == 0) == jit.keeps()
    for dispatcher, _ in jit._KERNELS:
        monkeypatch.setattr(dispatcher._cache._files, "_directories", [tmp_path])
    assert jit.uncompiled() == len(jit._KERNELS) > 0


def test_a_home_that_cannot_be_written_is_a_note(cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(tmp_path / "file"))
    outcome = cli("doctor", "--json")
    assert outcome.status == 0
    ((level, text),) = findings(outcome.record, "home")
    assert (level, "cannot be written" in text) == ("note", True)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"rotational": True, "bus": "ata"}, "a disk that turns"),
        ({"rotational": True, "bus": "virtio"}, ""),
        ({"rotational": False, "bus": "usb"}, "one USB hub"),
        ({"rotational": False, "bus": "nvme"}, ""),
    ],
)
def test_disks_that_are_slow_for_experts_are_noted(
    facts: dict[str, Any], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Disk = replace(look_at("no such disk"), name="x")

    def look(path: Path, *rest: object) -> Any:
        entry = original(path, *rest)  # type: ignore[arg-type]
        return replace(entry, mode="direct", disks=[replace(nothing, **facts)])

    original = doctor.look
    monkeypatch.setattr(doctor, "look", look)
    (found,) = doctor._drives({"a": tmp_path})
    assert (found.level, word in found.text) == ("note" if word else "ok", True)
    assert ("; " in found.text) == bool(word)


def test_huge_pages_and_descriptors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "HAS_HUGE", True)
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    assert doctor._huge_pages().level == "note"
    for mode, level in (("always madvise [never]", "note"), ("always [madvise] never", "ok")):
        (tmp_path / "enabled").write_text(mode)
        assert doctor._huge_pages().level == level
    for soft, level in ((256, "note"), (1024, "ok"), (doctor.resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(doctor.resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert doctor._descriptors().level == level
