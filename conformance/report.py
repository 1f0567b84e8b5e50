"""The report of a session on somebody's own checkpoint: one page of text, and the same as JSON (docs/conformance.md).

A pytest plugin, there only with `--model`: it lets nothing run but the tests marked `own_model`, and writes down how
each of them ended, on what, and what was not run and why.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill
from typing import Any

import pytest
from matrix import Coverage
from own import Own

from benchmarks import surroundings
from runtime.drives.crew import ReadCounts
from runtime.home import write_whole
from runtime.units import size

SCHEMA = "expertstream.conformance/1"
ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 2

Record = dict[str, Any]
Seen = dict[str, tuple[int, int]]


class Report:
    """See the top of the file."""

    KEY = pytest.StashKey["Report"]()

    def __init__(self, own: Own, stem: Path, coverage: Coverage) -> None:
        self.own, self.stem = own, stem
        self._coverage = coverage
        self._started, self._clock = datetime.now(UTC), time.monotonic()
        self._read: dict[str, Counter[str]] = {name: Counter() for name in own.paths}
        self.seen = self.look()
        self._outcomes: dict[str, Record] = {}
        self._titles: dict[str, str] = {}

    def look(self) -> dict[str, Seen]:
        """Size and time of change of each file in every directory that is read, and in the folders right below it."""
        found: dict[str, Seen] = {}
        for name, root in self.own.paths.items():
            files = found[name] = {}
            for folder, below, names in os.walk(root):
                if Path(folder) != root:
                    below.clear()
                for file in names:
                    facts = os.lstat(os.path.join(folder, file))
                    files[os.path.relpath(os.path.join(folder, file), root)] = (facts.st_size, facts.st_mtime_ns)
        return found

    def add(self, counts: Mapping[str, ReadCounts]) -> None:
        """What a cell has read."""
        for name, count in counts.items():
            self._read[name].update(
                bytes=count.requested_bytes, reads=count.reads, errors=count.errors, hedges=count.hedges
            )

    # -- what pytest tells --

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        named = collection_path.name.startswith("test_") and "own_model" not in collection_path.read_text()
        return True if named else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        others = [item for item in items if not item.get_closest_marker("own_model")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("own_model")]
        for item in items:
            said = (item.function.__doc__ or "").strip().partition("\n")[0]
            name = item.nodeid.partition("[")[0]
            self._titles[name] = said or name.rpartition("::")[2].removeprefix("test_").replace("_", " ")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, _, case = report.nodeid.partition("[")
        about = self._outcomes.setdefault(name, {"passed": 0, "failed": {}, "not_run": {}})
        if report.failed:
            about["failed"][case.removesuffix("]")] = _reason(report)
        elif report.skipped:
            about["not_run"][case.removesuffix("]")] = _reason(report)
        elif report.when == "call":
            about["passed"] += 1

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        record = self.record(exitstatus)
        text = page(record)
        for suffix, data in ((".json", json.dumps(record, indent=1) + "\n"), (".txt", text)):
            write_whole(self.stem.with_name(self.stem.name + suffix), data.encode())
        terminalreporter.section("conformance")
        terminalreporter.write(text)
        terminalreporter.write_line(f"written to {self.stem}.txt and {self.stem}.json")

    # -- the record --

    def record(self, status: int) -> Record:
        """All of it; see docs/conformance.md."""
        own, results = self.own, self._results()
        # What the baseline says is there only when it was run.
        plain = own.__dict__.get("plain")
        failed = any(result["failed"] for result in results)
        verdict = "failed" if failed else "interrupted" if status == INTERRUPTED else "passed"
        drives = {
            name: {
                **about,
                "mode": plain and plain.modes.get(name),
                "experts": self._held(name),
                **{what: self._read[name][what] for what in ("bytes", "reads", "errors", "hedges")},
            }
            for name, about in surroundings.drives(own.paths).items()
        }
        return {
            "schema": SCHEMA,
            "verdict": verdict if any(result["passed"] for result in results) or failed else "nothing was run",
            "started": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 1),
            "source": surroundings.commit(ROOT),
            "versions": surroundings.versions(),
            "machine": surroundings.machine(),
            "model": {**surroundings.model(own.model), "released": own.released},
            "backend": own.backend,
            "drives": drives,
            "one_device": [list(group) for group in surroundings.one_device(own.paths)],
            "settings": plain and plain.settings,
            "matrix": self._coverage.record(own.factors, own.allowed),
            "results": results,
            "not_varied": own.left_out(),
        }

    def _held(self, name: str) -> int:
        return sum(int(holder.here.sum()) for holder in self.own.placement.holders if holder.name == name)

    def _results(self) -> list[Record]:
        return [{"promise": self._titles[name], "test": name, **about} for name, about in self._outcomes.items()]


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in a line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash is not None else str(report.longrepr)
    return said.strip().partition("\n")[0]


# -- the page ------------------------------------------------------------------------------------------------------


def page(record: Record) -> str:
    """The record for people."""
    lines = [("verdict", record["verdict"].upper()), *_about(record), *_drives(record), *_covered(record)]
    for result in record["results"]:
        if result["passed"]:
            lines.append(("passed", _counted(result, result["passed"])))
    for result in record["results"]:
        for why, (first, *others) in _by_reason(result["failed"]).items():
            more = f" and {len(others)} more like it" if others else ""
            lines.append(("FAILED", f"{_counted(result, first)}{more}: {why}"))
        for why, cases in _by_reason(result["not_run"]).items():
            lines.append(("not run", f"{_counted(result, len(cases))}: {why}"))
    lines += [("not run", f"{what}: {why}") for what, why in record["not_varied"].items()]
    lines.append(("took", f"{record['seconds']:.0f} s from {record['started']}"))
    return "".join(f"{_line(label, text)}\n" for label, text in lines)


def _by_reason(cases: Mapping[str, str]) -> dict[str, list[str]]:
    """Which cases ended with each reason."""
    found: dict[str, list[str]] = {}
    for case, why in cases.items():
        found.setdefault(why, []).append(case)
    return found


Lines = list[tuple[str, str]]


def _line(label: str, text: str) -> str:
    first, rest = f"{label:9}", " " * 11
    return fill(text, 118, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def _about(record: Record) -> Lines:
    """Model, machine, program."""
    model, machine, versions, source = (record[key] for key in ("model", "machine", "versions", "source"))
    which = "the released checkpoint" if model["released"] else "not the released checkpoint"
    experts = f"{model['experts']:,} experts of {size(model['expert_bytes'])}, {model['experts_per_token']} a token"
    commit = f"commit {source['commit'] or 'unknown'}{', with changes' if source['dirty'] else ''}"
    said = [
        ("model", f"{model['path']}, {which}"),
        ("", f"fingerprint {model['fingerprint']}"),
        ("", f"{model['layers']} layers, {experts}, backend {record['backend']}"),
        ("machine", f"{machine['processor']}, {machine['processors']} processors, {size(machine['memory_bytes'])}"),
        ("", machine["platform"]),
        ("program", f"expertstream {versions['expertstream']}, {commit}, Python {versions['python']}"),
    ]
    if (settings := record["settings"]) is not None:
        budgets = f"memory {size(settings['memory_bytes'])}, expert cache {size(settings['expert_cache_bytes'])}"
        said.append(("settings", f"context {settings['context']:,}, {budgets}, {settings['precision']}"))
    return said


def _drives(record: Record) -> Lines:
    """What each drive is, and what was read from it."""
    said = []
    for name, drive in record["drives"].items():
        disks = ", ".join(drive["disks"]) or "an unknown disk"
        said += [
            ("drive", f"{name}: {drive['experts']:,} experts, {drive['mode'] or 'not read'}, {drive['path']}"),
            ("", f"  {drive['filesystem']} {drive['uuid']} on {disks}, {drive['model']}, serial {drive['serial']}"),
        ]
        if drive["reads"]:
            odd = f"{drive['errors']:,} made to fail, {drive['hedges']:,} read elsewhere because they were late"
            said.append(("", f"  {drive['reads']:,} reads in cells that passed, {size(drive['bytes'])}; {odd}"))
    return said + [("", f"{' and '.join(group)} are one device") for group in record["one_device"]]


def _covered(record: Record) -> Lines:
    """How much of the matrix was run."""
    m = record["matrix"]
    pairs = f"{m['pairs']} of {m['possible_pairs']} pairs of settings"
    equal = f"{m['prompts']} prompts, {m['digests']} tokens and digests of logits equal to the baseline's"
    return [
        ("covered", f"{m['cells']} of {m['possible_cells']} cells, {pairs}; {equal}"),
        *(
            ("", f"  {factor}: {', '.join(f'{value} {count}' for value, count in values.items())}")
            for factor, values in m["factors"].items()
        ),
    ]


def _counted(result: Record, case: int | str) -> str:
    """The promise, with how often or in which case."""
    if isinstance(case, int):
        return result["promise"] + (f" ({case})" if case > 1 else "")
    return f"{result['promise']}{f' [{case}]' if case else ''}"
