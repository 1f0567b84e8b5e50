"""What the sessions of plain runs share: how their arms are made and run, and how their results are written."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import charts, surroundings
from benchmarks.arms import ROOT, Arm, Place, Record, interleave, run_arm
from benchmarks.limits import ended_by_signals
from benchmarks.records import (
    exit_status,
    failed,
    paths,
    portable,
    save,
    session,
    split,
    tell,
    top_lines,
    voids,
    written,
)
from benchmarks.verdict import compare_arms
from runtime.commands.drives import parse_drives
from runtime.commands.tables import table
from runtime.errors import ExpertstreamError, UsageError
from runtime.generate import embedded_model
from runtime.generate.embedded import NOTE
from runtime.home import write_whole
from runtime.weights.layout import PLAIN_BYTES


def add_run_options(options: argparse.ArgumentParser) -> None:
    """Drives, further options of `run`, and what to compare with."""
    add = options.add_argument
    add("--drive", action="append", default=[], metavar="NAME=PATH", help="as for `run`; repeat")
    add("--simulate-drive", action="append", default=[], metavar="NAME=400MB/s", help="as for `run`; repeat")
    add("--run-options", default="", metavar="OPTIONS", help="further options of `run`, in one string")
    add("--versus", metavar="OPTIONS", help="compare with a run that has these options beside, in one string")
    add("--versus-checkout", type=Path, metavar="DIR", help="compare with the program in another checkout")
    add("--warm", action="store_true", help="leave the page cache as it is, and run each arm once before")


def variants(options: argparse.Namespace) -> dict[str, tuple[tuple[str, ...], Path]]:
    """By name, the further options of `run` and the checkout; the second one, if any, is compared with the first."""
    own = tuple(split(options.run_options, "--run-options"))
    found = {"": (own, ROOT)}
    if options.versus is not None or options.versus_checkout is not None:
        checkout = options.versus_checkout or ROOT
        if not (checkout / "runtime").is_dir():
            raise UsageError(f"--versus-checkout {checkout}: there is no runtime/ in it")
        found["versus "] = ((*own, *split(options.versus or "", "--versus")), checkout.resolve())
    return found


def make_arm(options: argparse.Namespace, name: str, words: Sequence[str], checkout: Path = ROOT, **more: Any) -> Arm:
    """An arm over the session's model and drives. words: its own options of `run`."""
    model = options.model or embedded_model()
    layout = parse_drives(options.drive, options.simulate_drive)
    drives = [f"--drive={text}" for text in options.drive] + [f"--simulate-drive={t}" for t in options.simulate_drive]
    named = ["--model", str(options.model)] if options.model else []
    large = surroundings.model(model)["expert_bytes"] >= PLAIN_BYTES  # tracing would have small ones read by drive
    return Arm(
        name=name,
        options=(*named, *drives, *words),
        cold=not options.warm,
        files=tuple(layout.paths(model).values()),
        trace=bool(drives) or large,
        shared=bool(options.simulate_drive),
        checkout=checkout,
        **more,
    )


def describe(options: argparse.Namespace, record: Record) -> None:
    """Put model and drives into the record."""
    model = options.model or embedded_model()
    places = parse_drives(options.drive, options.simulate_drive).paths(model)
    record["model"] = surroundings.model(model) | {"note": None if options.model else NOTE}
    record["drives"] = surroundings.drives(places)


@contextmanager
def place(options: argparse.Namespace, name: str, arms: Sequence[Arm]) -> Iterator[Place]:
    """Where arms run. First one of each checkout runs once, uncounted, so that kernels are compiled; with --warm all
    do, for a smoke none.

    Raises UsageError when one of them does not work.
    """
    one_each = list({arm.checkout: arm for arm in reversed(arms) if not arm.command}.values())
    warm = [] if options.smoke else list(arms) if options.warm else one_each
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="expertstream-", dir=options.work) as scratch:
        if warm:
            tell("warm up  not counted")
        for arm in warm:
            done = run_arm(arm, 0, Place(Path(scratch)))
            if done["status"]:
                raise UsageError(f"{arm.name} does not work: {done['void'][0]}")
        yield Place(Path(scratch), traces=options.out / f"{name}-traces")


class Shown(NamedTuple):
    """Results for people: a table, and the figure that `charts.bars` draws of every arm, with its axis and title."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    chart: tuple[str, str, str]


def conduct(
    asked: argparse.Namespace,
    name: str,
    kind: str,
    make_arms: Callable[[argparse.Namespace, Record], list[Arm]],
    show: Callable[[argparse.Namespace, Record, Sequence[str]], Shown],
) -> int:
    """A session from its options to its results; the exit status.

    `make_arms` and `show` may add to the record; `show` gets the names of the arms, and adds `comparisons` and which
    figures are `shown`.
    """
    try:
        record = session(asked, name, kind)
        describe(asked, record)
        arms = make_arms(asked, record)
        with place(asked, name, arms) as where:
            record["arms"] = interleave(arms, asked.rounds, where)
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)
    names = [arm.name for arm in arms]
    return finish(asked.out, where.scratch, record, names, show(asked, record, names))


def versus(record: Record, names: Sequence[str], *figures: str, more_is_better: bool = False) -> list[Record]:
    """Each arm that has a partner, compared with it."""
    return [
        compare_arms(record["arms"], name, f"versus {name}", figure, more_is_better=more_is_better)
        for name in names
        if f"versus {name}" in names
        for figure in figures
    ]


def results_of(record: Record, name: str) -> list[Record]:
    """What the runs of one arm came to."""
    return [result for result in record["arms"] if result["arm"] == name]


def finish(out: Path, scratch: Path, record: Record, names: Sequence[str], shown: Shown) -> int:
    """Write and print: JSON, table, chart, and what pytest-benchmark records of it. The exit status."""
    name = record["session"]
    record = portable(record, paths(scratch))
    verdicts = [
        f"verdict  {c['candidate']} against {c['baseline']}, {c['figure']}: {c['said']}" for c in record["comparisons"]
    ]
    defined = [f"defined  {key}: {said}" for key, said in record["definitions"].items() if key in record["shown"]]
    first = record["arms"][0]
    before = [f"         {what.replace('_', ' ')}: {first[what]}" for what in ("page_cache", "memory")]
    lines = ["", table(shown.head, shown.rows), "", *verdicts, *defined, *before, *voids(record)]
    said = "\n".join([*top_lines(record), *lines]) + "\n"
    try:
        with written("--out", out):
            saved = save(out, record)
            write_whole(out / f"{name}.txt", said.encode())
            charted = charts.bars(record, out / name, names, *shown.chart)
        kept = pytest_benchmark(saved, out / f"{name}-pytest-benchmark.json")
    finally:
        print(said, end="")
    tell(f"results  {saved}, .txt{charted}{kept}")
    return exit_status(record)


def pytest_benchmark(saved: Path, target: Path) -> str:
    """Have it recorded; what to say of that. Arms that are all void leave nothing to record."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    options = [f"--benchmark-json={target.resolve()}", "--benchmark-columns=median,min,max,rounds"]
    # pytest-benchmark records nothing in one of several processes that run tests, and would take itself for one
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [*command, *options, str(ROOT / "benchmarks" / "recorded.py")],
        cwd=ROOT,
        env=own | {"EXPERTSTREAM_BENCH": str(saved.resolve())},
        capture_output=True,
        text=True,
    )
    return f", {target.name}" if done.returncode == 0 else ", nothing for pytest-benchmark"
