"""What a ladder runs on: real drives, loop devices limited by the kernel, or one directory behind limits of our own.

Everything that is set up is undone when its block ends, however it ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import surroundings
from benchmarks.arms import ROOT
from benchmarks.limits import Unavailable, keep_in_memory, kernel_limits, loop_drives
from benchmarks.records import tell
from runtime.checkpoint import Checkpoint
from runtime.commands.drives import parse_drives
from runtime.errors import UsageError
from runtime.weights.placement import MODEL, ExpertFiles, Shards

LIMITS = "200,100,100,80"
SMOKE = ("--layers", "2", "--experts", "4", "--top-k", "2")
"""Of the ladder checkpoint: one layer of four experts, 70 MB."""
KINDS = {
    "real": "real drives, as named",
    "kernel": "loop devices limited by the kernel; what lies behind them is one disk, and memory",
    "throttled": "throttled drives: one directory behind limits that this program keeps",
}


@dataclass
class Stage:
    """What the arms run on. places: by drive, its directory, the model's first; limits: bytes/s, where they are known;
    prefix: of every command that reads; how: what keeps the limits; why: nothing better was possible; memory: whether
    what lies behind the drives was read into memory first."""

    kind: str
    model: Path
    places: dict[str, Path]
    limits: dict[str, float] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    how: str = ""
    why: str = ""
    memory: bool | None = None

    def options(self, rung: Sequence[str]) -> list[str]:
        """Of `run` and `drives probe`, for the drives of a rung."""
        if self.kind == "throttled":
            drives = [f"--simulate-drive={name}={self.limits[name] / 1e6:g}MB/s" for name in rung]
        else:
            drives = [f"--drive={name}={self.places[name]}" for name in rung if name != MODEL]
        return ["--model", str(self.model), *drives]

    def holders(self) -> dict[tuple[int, int], frozenset[str]]:
        """The drives that have each expert, by layer and expert."""
        with Checkpoint.open(self.model, experts_elsewhere=True) as checkpoint:
            layers, here = checkpoint.config.moe_layers, Shards(MODEL, checkpoint).here
            tables = {
                name: here if self.kind == "throttled" or name == MODEL else ExpertFiles(name, path, checkpoint).here
                for name, path in self.places.items()
            }
        return {
            (layer, expert): frozenset(name for name, table in tables.items() if table[row, expert])
            for row, layer in enumerate(layers)
            for expert in range(here.shape[1])
        }

    @property
    def rungs(self) -> list[tuple[str, ...]]:
        """The first drive, the first two, and so on."""
        names = list(self.places)
        return [tuple(names[: n + 1]) for n in range(len(names))]


@contextmanager
def set_up(options: argparse.Namespace, scratch: Path) -> Iterator[Stage]:
    """Set up; undone when the block ends."""
    rates = _limits(options.limits)
    if options.drive:
        if options.kind:
            raise UsageError("--kind is of drives that are not real: leave it out, or leave --drive out")
        with _real(options) as stage:
            yield stage
        return
    why = "asked for" if options.kind == "throttled" else ""
    if not why:
        with ExitStack() as stack:
            try:
                stage = stack.enter_context(_kernel(options, rates, scratch))
            except Unavailable as error:
                if options.kind == "kernel":
                    raise UsageError(f"--kind kernel: {error}") from None
                why = f"no loop devices limited by the kernel: {error}"
            else:
                yield stage
                return
    tell(f"drives   throttled by this program: {why}")
    names = [f"d{n}" for n in range(1, len(rates) + 1)]
    model = options.model or synthetic((options.cache or scratch) / _name(options), options.smoke)
    yield Stage("throttled", model, dict.fromkeys(names, model), dict(zip(names, rates, strict=True)), why=why)


@contextmanager
def _kernel(options: argparse.Namespace, rates: Sequence[float], scratch: Path) -> Iterator[Stage]:
    names = [MODEL, *"bcdefghijkl"[: len(rates) - 1]]
    source = options.model or (synthetic(options.cache / _name(options), options.smoke) if options.cache else None)
    nbytes = _nbytes(source) if source else int(1.02 * _ladder_bytes(options.smoke))
    with ExitStack() as stack:
        sizes = {name: int(nbytes * _part(name, names)) for name in names}
        mounts = stack.enter_context(loop_drives(sizes, scratch))
        limits = {mounts[name]: int(rate) for name, rate in zip(names, rates, strict=True)}
        how, prefix = stack.enter_context(kernel_limits(limits))
        tell(f"drives   {len(names)} loop devices behind limits of the kernel ({how})")
        model = mounts[MODEL] / "model"
        if source is None:
            synthetic(model, options.smoke)
        else:
            tell(f"copy     {source} to the first drive")
            _command("cp", "-r", str(source), str(model))
        _replicate(model, {name: mounts[name] for name in names if name != MODEL}, names)
        places = {name: model if name == MODEL else mounts[name] for name in names}
        stage = Stage("kernel", model, places, dict(zip(names, map(float, rates), strict=True)), prefix, how)
        for place in places.values():
            _sync(place)
        stage.memory = keep_in_memory(scratch)
        tell(f"images   {'read into memory' if stage.memory else 'on the disk: memory has no room for them'}")
        yield stage


@contextmanager
def _real(options: argparse.Namespace) -> Iterator[Stage]:
    named = dict(parse_drives(options.drive, ()).directories)
    with ExitStack() as stack:
        if options.model is not None:
            places = {MODEL: options.model, **named}
        else:
            rooms = {
                name: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertstream-", dir=path)))
                for name, path in named.items()
            }
            first, *others = rooms
            tell(f"write    a synthetic checkpoint to {named[first]}, and copies to {', '.join(others) or 'none'}")
            model = synthetic(rooms[first] / "model", options.smoke)
            _replicate(model, {name: rooms[name] for name in others}, list(rooms))
            places = {MODEL: model, **{name: rooms[name] for name in others}}
        if same := surroundings.one_device(places):
            raise UsageError(f"{' and '.join(same[0])} are one device: on a ladder each rung adds another one")
        yield Stage("real", places[MODEL], places)


def _part(name: str, names: Sequence[str]) -> float:
    """The last of several drives holds a half."""
    return 0.5 if name == names[-1] and len(names) > 2 else 1.0


def _replicate(model: Path, targets: Mapping[str, Path], names: Sequence[str]) -> None:
    for name, target in targets.items():
        budget = int(_expert_bytes(model) * _part(name, names))
        with tempfile.TemporaryDirectory() as home:
            call(
                ["replicate", "--model", str(model), "--to", str(target), "--budget", str(budget), "--floor", "1"],
                Path(home),
            )


def _expert_bytes(model: Path) -> int:
    with Checkpoint.open(model, experts_elsewhere=True) as checkpoint:
        return int(checkpoint.experts_here.size) * checkpoint.expert_nbytes


def _limits(text: str) -> list[float]:
    try:
        rates = [float(part) * 1e6 for part in text.split(",")]
    except ValueError:
        rates = []
    if not 1 <= len(rates) <= 12 or not all(0.5e6 <= rate < 1e12 for rate in rates):
        raise UsageError(f"--limits {text!r}: write 1 to 12 rates in MB/s, of at least 0.5, such as {LIMITS}")
    return rates


def _name(options: argparse.Namespace) -> str:
    return "ladder-smoke" if options.smoke else "ladder"


def _ladder_bytes(smoke: bool) -> int:
    return 200_000_000 if smoke else 2_500_000_000


def _nbytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def synthetic(path: Path, smoke: bool) -> Path:
    """The synthetic checkpoint there, made unless it is there: a ladder, for a smoke a small one."""
    if not (path / "config.json").exists():
        tell(f"synth    {path}")
        call(["synth", "--shape", "ladder", *(SMOKE if smoke else ()), "--out", str(path)])
    return path


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def call(words: Sequence[str], home: Path | None = None, prefix: Sequence[str] = ()) -> str:
    """A command of the program to its end; what it printed. Raises UsageError with what it said."""
    env = os.environ | ({} if home is None else {"EXPERTSTREAM_HOME": str(home)})
    return _command(*prefix, sys.executable, "-m", "runtime", *words, env=env)


def _command(*words: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UsageError(f"{' '.join(words)}: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}")
    return done.stdout
