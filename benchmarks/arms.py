"""Arms: one measured run each, in a fresh process, with everything that made its numbers, or the reason why it is void.

An arm is `python -m runtime run … --json --logits-hash --stats`, or another engine's command. What the program had
learned before (EXPERTSTREAM_HOME) is a copy of the same snapshot for every arm, and is thrown away after it. Lines on
stderr are events: each is kept with the second, from the start of the process, at which it arrived; the `--stats` line
of a token is when the token was there. Figures are computed from these times (`figures`), never from what an engine
says of its speed.

An arm that is not what it should be is void, not slow: its numbers count nowhere (`void_reasons`, `judge`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from runtime.drives.buffers import address, fresh
from runtime.drives.trace import load as load_trace
from runtime.errors import StorageError
from runtime.generate.limits import memory_limit

ROOT = Path(__file__).resolve().parent.parent
RUN_SCHEMA = "expertstream.run/1"

SWAP_BYTES = 1_000_000
"""Swap traffic of the whole system during an arm above which it is void."""
FOREIGN_PART, FOREIGN_BYTES = 0.02, 16_000_000
"""An arm is void when others read more from a disk of its drives than this part of its own bytes, and this much."""

PRINTED = 4000
"""Characters kept of what another engine prints."""

_TOKEN = re.compile(r"\s*(\d+)\s+(\d+)\s+[\d.]+ ms\b")

Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """What is run. options: after `run`; settings: of the run record, which must come back as said here.

    modes: how each drive must have been read, such as `direct`; files: what is dropped from the page cache first when
    `cold`; prefix: a command that starts the process, as one that puts it under a limit; command: another engine's,
    instead of ours; partners: arms of one name here must generate the same tokens, and the same logits where `exact`;
    faults: failed and late reads are what it is about; shared: its drives are limits over a disk that others may use;
    memory: bytes that are touched before it, so that all arms find theirs alike.
    """

    name: str
    partners: str = ""
    options: tuple[str, ...] = ()
    cold: bool = True
    files: tuple[Path, ...] = ()
    trace: bool = False
    modes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    faults: bool = False
    shared: bool = False
    exact: bool = True
    prefix: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    checkout: Path = ROOT
    limit_s: float = 3600.0
    memory: int = 0

    def line(self, trace: Path | None) -> list[str]:
        """The command line."""
        ours = [sys.executable, "-m", "runtime", "run", *self.options, "--json", "--logits-hash", "--stats"]
        traced = [] if trace is None else ["--trace", str(trace)]
        return [*self.prefix, *(self.command or (*ours, *traced))]


@dataclass(frozen=True)
class Place:
    """Where arms run. home: the snapshot that every arm begins with; traces: where traces are kept; scratch: theirs."""

    scratch: Path
    home: Path | None = None
    traces: Path | None = None


def interleave(arms: Sequence[Arm], rounds: int, place: Place, spare: int = 0) -> list[Record]:
    """Every arm once a round, each round in the other direction, so that none is always the one after another.

    While an arm has fewer than `rounds` results that are not void, there are further rounds, up to `spare`, of all
    arms, so that pairs stay pairs. A KeyboardInterrupt ends the arm under way, too.
    """
    results: list[Record] = []
    for number in range(rounds + spare):
        if number >= rounds and all(_counted(results, arm) >= rounds for arm in arms):
            break
        for arm in arms if number % 2 == 0 else reversed(arms):
            result = run_arm(arm, number, place)
            results.append(result)
            print(f"{arm.name:24} round {number + 1}  {brief(result)}", file=sys.stderr, flush=True)
    judge(results)
    return results


def _counted(results: Sequence[Record], arm: Arm) -> int:
    return sum(result["arm"] == arm.name and not result["void"] for result in results)


def run_arm(arm: Arm, number: int, place: Place) -> Record:
    """Run it once. The result is JSON (docs/benchmarks.md, `arms`); `void` are the reasons found so far.

    Raises StorageError where the place cannot be written to.
    """
    with ExitStack() as stack:
        with _writing(place.scratch, "--work"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=place.scratch))
            home = Path(folder) / "home"
            if place.home is None:
                home.mkdir()
            else:
                shutil.copytree(place.home, home)
        trace = Path(folder) / "trace.csv.gz" if arm.trace else None
        cold = drop(arm.files) if arm.cold else "warm: nothing was dropped"
        memory = have(arm.memory)
        before, swap, stolen = resource.getrusage(resource.RUSAGE_CHILDREN), psutil.swap_memory(), _stolen_s()
        process = _Process(arm.line(trace), arm.checkout, os.environ | {"EXPERTSTREAM_HOME": str(home)}, arm.limit_s)
        after, swapped = resource.getrusage(resource.RUSAGE_CHILDREN), psutil.swap_memory()
        result: Record = {
            "arm": arm.name,
            "round": number,
            "started": process.began,
            "command": process.line,
            "page_cache": cold,
            "memory": memory,
            "home": "empty" if place.home is None else "a copy of the session's snapshot",
            "partners": arm.partners,
            "exact": arm.exact,
            "status": process.status,
            "elapsed_s": process.elapsed_s,
            "events": process.events,
            "run": process.record(),
            "printed": process.printed() if arm.command else None,
            "swap_bytes": swapped.sin - swap.sin + swapped.sout - swap.sout,
            "major_faults": after.ru_majflt - before.ru_majflt,
            "cpu_s": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
            "stolen_s": None if stolen is None else (_stolen_s() or 0.0) - stolen,
            "trace": None,
            "disks": None,
        }
        if trace is not None and trace.exists():
            result |= _traced(trace)
            if place.traces is not None:
                kept = place.traces / f"{_plain(arm.name)}-{number + 1}.csv.gz"
                with _writing(place.traces, "--out"):
                    place.traces.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(trace, kept)
                result["trace"]["file"] = f"{place.traces.name}/{kept.name}"
    result["figures"] = figures(result)
    result["tokens_sha256"], result["output_sha256"] = (output_hash(result["run"], exact) for exact in (False, True))
    result["void"] = void_reasons(result, arm)
    return result


@contextmanager
def _writing(place: Path, option: str) -> Iterator[None]:
    """The block writes there what the session needs."""
    try:
        yield
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error  # of a tree's first
        raise StorageError(f"{place} cannot be written: {why}; name another place with {option}") from None


def _stolen_s() -> float | None:
    """Processor seconds since the start that a virtual machine was ready to use and did not get; None if not told."""
    return getattr(psutil.cpu_times(), "steal", None)


class _Process:
    """A command that has run to its end: what it said, when, and how it ended."""

    def __init__(self, line: list[str], cwd: Path, env: Mapping[str, str], limit_s: float) -> None:
        self.line, self.events, self._out = line, list[list[Any]](), list[str]()
        self.began = datetime.now(UTC).isoformat(timespec="milliseconds")
        start = time.monotonic()
        pipe = subprocess.PIPE
        with subprocess.Popen(
            line, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        ) as process:

            def listen() -> None:
                assert process.stderr is not None
                for said in process.stderr:
                    self.events.append([round(time.monotonic() - start, 6), said.rstrip("\n")])

            listener = threading.Thread(target=listen, daemon=True)
            timer = threading.Timer(limit_s, process.kill)
            listener.start()
            timer.start()
            try:
                assert process.stdout is not None
                self._out = process.stdout.readlines()
                self.status = process.wait()
                self.elapsed_s = time.monotonic() - start
                listener.join()
            except BaseException:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                raise
            finally:
                timer.cancel()

    def printed(self) -> str:
        """What was on stdout, its end when it was long."""
        return "".join(self._out)[-PRINTED:]

    def record(self) -> Record | None:
        """The JSON object on stdout, if it was one."""
        with suppress(ValueError, IndexError):
            found = json.loads(self._out[-1])
            return found if isinstance(found, dict) else None
        return None


def _traced(trace: Path) -> Record:
    """From the trace: its head, and by disk what the arm read there and what others did."""
    head = load_trace(trace).about
    for known in ("settings", "model"):  # as in the run record
        head.pop(known, None)
    disks: Record = {}
    for disk, done in head.get("disks", {}).items():
        own = sum(head["drives"][name]["device_bytes"] for name in done["drives"] if name in head["drives"])
        disks[disk] = {
            "drives": done["drives"],
            "read_bytes": done["read_bytes"],
            "own_bytes": own,
            "foreign_bytes": max(0, done["read_bytes"] - own),
            "written_bytes": done["written_bytes"],
        }
    return {"trace": {"head": head}, "disks": disks or None}


# --- figures ---

DEFINITIONS = {
    "inclusive_tokens_per_s": "generated tokens / seconds from the start of the process to the last token",
    "steady_tokens_per_s": "(generated tokens - 1) / (seconds to the last token - seconds to the first token)",
    "elapsed_s": "seconds from the start of the process to its end",
    "first_token_s": "seconds from the start of the process to the first token",
    "prompt_s": "seconds from the model being ready to the first token, as the run itself counts (timing.ttft_s)",
    "prefill_tokens_per_s": "(tokens of the long prompt - tokens of the short one) / (first_token_s of the long one - "
    "first_token_s of the short one)",
}
"""How each figure is computed from the raw times, stored with every result."""


def figures(result: Record) -> Record:
    """From the arrival of tokens; None where there are too few. Units are in the names, definitions above."""
    times = [at for at, said in result["events"] if _TOKEN.match(said)]
    n, run = len(times), result["run"] or {}
    whole = n == len(run.get("token_ids", ()))
    return {
        "elapsed_s": result["elapsed_s"],
        "tokens": n if whole else None,
        "first_token_s": times[0] if n and whole else None,
        "last_token_s": times[-1] if n and whole else None,
        "prompt_s": run.get("timing", {}).get("ttft_s"),
        "inclusive_tokens_per_s": n / times[-1] if n and whole else None,
        "steady_tokens_per_s": (n - 1) / (times[-1] - times[0]) if n > 1 and whole else None,
    }


def spread(results: Iterable[Record], figure: str) -> Record | None:
    """Median, least and most of a figure over the arms that are not void; None where there are none."""
    values = [r["figures"][figure] for r in results if not r["void"] and r["figures"].get(figure) is not None]
    if not values:
        return None
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "arms": len(values)}


def brief(result: Record) -> str:
    """A result in a few words."""
    if result["void"]:
        return "void: " + "; ".join(result["void"])
    f = result["figures"]
    steady = "" if f["steady_tokens_per_s"] is None else f", then {f['steady_tokens_per_s']:.3f} tokens/s"
    return (
        f"first token after {f['first_token_s']:.2f} s{steady}"
        if f["first_token_s"]
        else f"{result['elapsed_s']:.2f} s"
    )


# --- what makes an arm void ---


def output_hash(run: Record | None, exact: bool) -> str | None:
    """SHA-256 of what was generated: token ids, and the digests of their logits when `exact`."""
    if run is None or "token_ids" not in run:
        return None
    said = [run["token_ids"], run.get("logits_sha256") if exact else None]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def void_reasons(result: Record, arm: Arm) -> list[str]:
    """Why the arm alone is void; what only its partners show is found by `judge`."""
    if result["status"] != 0:
        last = result["events"][-1][1] if result["events"] else "it said nothing"
        return [f"ended with status {result['status']}: {last}"]
    reasons = []
    if result["swap_bytes"] > SWAP_BYTES:
        reasons.append(f"{result['swap_bytes']:,} bytes were swapped by the system meanwhile")
    run = result["run"]
    if arm.command:
        return reasons
    if run is None or run.get("schema") != RUN_SCHEMA:
        return [*reasons, f"it printed no record of schema {RUN_SCHEMA}"]
    if result["figures"]["tokens"] is None:
        reasons.append("the lines of its tokens did not all arrive")
    missing = object()
    for name, wanted in arm.settings.items():
        found = run["settings"].get(name, missing)
        if found is missing:
            reasons.append(f"the setting {name} is unknown to the run")
        elif found != wanted:
            reasons.append(f"the setting {name} was to be {wanted!r} and is {found!r}")
    return reasons + _storage_reasons(result, run, arm)


def _storage_reasons(result: Record, run: Record, arm: Arm) -> list[str]:
    reasons = []
    drives, head = run["io"]["by_drive"], (result["trace"] or {}).get("head", {})
    for name, mode in arm.modes.items():
        found = drives[name]["mode"].partition(";")[0] if name in drives else "not read at all"
        if found != mode:
            reasons.append(f"drive {name} was to be read {mode} and was {found}")
    for name, drive in drives.items():
        hedges = head.get("drives", {}).get(name, {}).get("hedges", 0)
        troubles = {"failed": drive["errors"], "retried": drive["retries"], "late": hedges}
        if not arm.faults and any(troubles.values()):
            said = ", ".join(f"{n} {what}" for what, n in troubles.items() if n)
            reasons.append(f"reads of drive {name}: {said}")
    for disk, done in (result["disks"] or {}).items():
        foreign = done["foreign_bytes"]
        if not arm.shared and foreign > FOREIGN_BYTES and foreign > FOREIGN_PART * done["own_bytes"]:
            reasons.append(f"others read {foreign:,} bytes from {disk} beside its own {done['own_bytes']:,}")
    return reasons


def judge(results: Sequence[Record]) -> None:
    """Compare what partners generated: what most said stands, the others are void. Without a majority all are."""
    for name in dict.fromkeys(result["partners"] for result in results):
        group = [r for r in results if r["partners"] == name]
        _outvote(group, "tokens_sha256", "tokens")
        _outvote([r for r in group if r["exact"]], "output_sha256", "logits")


def _outvote(group: Sequence[Record], key: str, what: str) -> None:
    group = [r for r in group if r[key] is not None and not r["void"]]
    hashes = [r[key] for r in group]
    common = next((h for h in hashes if 2 * hashes.count(h) > len(hashes)), None)
    for result in group:
        if result[key] != common:
            others = f"{common[:12]} of most partners" if common else "those of its partners, which do not agree either"
            result["void"].append(f"its {what} {result[key][:12]} are not {others}")


# --- state before an arm ---


def drop(paths: Iterable[Path]) -> str:
    """Drop the files there from the page cache; says what was done. Files that somebody writes or maps may stay."""
    if not hasattr(os, "posix_fadvise"):
        return "as it was: this system has no posix_fadvise"
    count = nbytes = 0
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_file():
                continue
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                nbytes += os.fstat(fd).st_size
            finally:
                os.close(fd)
            count += 1
    return f"cold: {count:,} files of {nbytes:,} bytes were dropped (posix_fadvise DONTNEED)"


def have(nbytes: int) -> str:
    """Touch so much memory, but no more than is left beside what this process holds, and give it back; says what was
    done.

    Some virtual machines return free memory to their host and get it again page by page: what a process pays for memory
    then depends on how long ago another one ended.
    """
    nbytes = min(nbytes, memory_limit(None).nbytes - psutil.Process().memory_info().rss)
    if nbytes <= 0:
        return "as it was"
    began, area = time.monotonic(), fresh(nbytes)
    part = -(-nbytes // (os.cpu_count() or 1))
    with ThreadPoolExecutor() as pool:
        for some in [area[at : at + part] for at in range(0, nbytes, part)]:
            pool.submit(ctypes.memset, address(some), 1, len(some))
    return f"{nbytes:,} bytes were touched and given back, in {time.monotonic() - began:.1f} s"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
