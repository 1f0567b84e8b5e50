"""What the sessions have in common: options, the record that ends up in a file, tables, and how they end.

A result is one JSON object, schema `expertstream.bench/1` (docs/benchmarks.md), beside it the table as text, a report
to send, and the chart as SVG and PNG.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import arms, surroundings
from runtime.errors import ExpertstreamError, NotKept, UsageError
from runtime.home import write_whole

SCHEMA = "expertstream.bench/1"
OUT = Path("bench-results")

Record = dict[str, Any]

KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": str,
    "session": str,
    "kind": str,
    "smoke": bool,
    "started": str,
    "options": dict,
    "source": dict,
    "versions": dict,
    "machine": dict,
    "definitions": dict,
    "void_above": dict,
    "arms": list,
}
"""What every result has."""
ARM_KEYS = ("arm", "round", "command", "page_cache", "status", "events", "run", "figures", "void", "output_sha256")


def tell(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def parser(name: str, text: str | None, rounds: int) -> argparse.ArgumentParser:
    """With the options that every session has."""
    first = (text or "").partition("\n\n")[0]
    options = argparse.ArgumentParser(prog=f"bench-{name}", description=first, allow_abbrev=False)
    add = options.add_argument
    add("--model", type=Path, metavar="DIR", help="checkpoint directory")
    add("--rounds", type=count, default=None, help=f"how often every arm runs [{rounds}, with --smoke 1]")
    add("--out", type=Path, default=OUT, metavar="DIR", help=f"where results go [{OUT}]")
    add("--work", type=directory, metavar="DIR", help="where temporary files go [the system's place]")
    add("--smoke", action="store_true", help="something small, to see that it works: its numbers mean nothing")
    options.set_defaults(usual_rounds=rounds)
    return options


def directory(text: str) -> Path:
    """One that is there, named."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty: name a directory")
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such directory: name another")
    return Path(text)


def count(text: str) -> int:
    """Of what is done, or made, as often as is said."""
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError("a number from 1 to 1000 was expected")
    return int(text)


def split(text: str, option: str, shown: str | None = None) -> list[str]:
    """Options or a command in one string, as a shell has them. Raises UsageError, which shows all that was given."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {shown or text!r}: {error}: close what is open") from None


def session(options: argparse.Namespace, name: str, kind: str) -> Record:
    """The record as it is before anything was measured. Resolves `--rounds`; makes the directory of results."""
    if options.rounds is None:
        options.rounds = 1 if options.smoke else options.usual_rounds
    if options.model is not None and not options.model.is_dir():
        raise UsageError(f"--model {options.model}: there is no such directory")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {options.out}: {error.strerror}") from None
    said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {
        "schema": SCHEMA,
        "session": name,
        "kind": kind,
        "smoke": options.smoke,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {key: value for key, value in said.items() if key != "usual_rounds"},
        "source": surroundings.commit(arms.ROOT),
        "versions": surroundings.versions(),
        "machine": surroundings.machine(),
        "definitions": arms.DEFINITIONS,
        "void_above": {
            "swap_bytes": arms.SWAP_BYTES,
            "foreign_bytes": arms.FOREIGN_BYTES,
            "foreign_part": arms.FOREIGN_PART,
        },
        "arms": [],
    }


def portable(value: Any, names: Mapping[str, str]) -> Any:
    """The same with these beginnings of paths replaced, so that it can be sent, and names nobody's home."""
    if isinstance(value, str):
        for path, name in names.items():
            value = re.sub(re.escape(path) + r"(?![\w.-])", name, value)
        return value
    if isinstance(value, Mapping):
        return {portable(key, names): portable(item, names) for key, item in value.items()}
    return [portable(item, names) for item in value] if isinstance(value, list | tuple) else value


def paths(scratch: Path) -> dict[str, str]:
    """What is replaced in a session's result; what lies inside of another one comes first."""
    home = str(Path.home())
    replaced = {str(scratch): "$SCRATCH", str(arms.ROOT): "$CHECKOUT", sys.executable: "python", sys.prefix: "$PYTHON"}
    replaced |= {} if home == "/" else {home: "~"}
    return dict(sorted(replaced.items(), key=lambda item: -len(item[0])))


def check(record: object) -> Record:
    """The record, if it is one of our schema. Raises UsageError with what is wrong."""
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise UsageError(f"this is no result of schema {SCHEMA}")
    for key, kind in KEYS.items():
        if not isinstance(record.get(key), kind):
            raise UsageError(f"the result's {key!r} is missing, or not what it should be")
    for arm in record["arms"]:
        if missing := [key for key in ARM_KEYS if key not in arm]:
            raise UsageError(f"an arm of the result has no {missing[0]!r}")
    return record


def load(path: Path) -> Record:
    """A result that was written before. Raises UsageError."""
    try:
        return check(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def save(folder: Path, record: Record) -> Path:
    """Write it, whole; the path. One arm a line, so that it can be read and compared."""
    path = folder / f"{record['session']}.json"
    head = {key: value for key, value in record.items() if key != "arms"}
    lines = ",\n".join(json.dumps(arm) for arm in check(record)["arms"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "arms": [\n{lines}\n ]\n}}\n'
    write_whole(path, text.encode())
    return path


@contextmanager
def written(option: str, place: Path) -> Iterator[None]:
    """What the block writes is what an option asks for; the table is printed all the same. Raises NotKept."""
    try:
        yield
    except OSError as error:
        raise NotKept(f"{option} {place} could not be written: {error.strerror or error}") from None


def keep(file: Path, record: Record) -> None:
    """Write what --json asks for. Raises NotKept."""
    with written("--json", file):
        write_whole(file, (json.dumps(record, indent=1) + "\n").encode())


def top_lines(record: Record) -> list[str]:
    """What made the numbers: stands above every table."""
    machine, source, model = record["machine"], record["source"], record.get("model") or {}
    commit = (source["commit"] or "unknown")[:12] + (", with changes" if source["dirty"] else "")
    load_average = "/".join(f"{value:.1f}" for value in machine["load_average"])
    lines = [
        f"kind     {record['kind']}",
        f"machine  {machine['processor']}, {machine['processors']} processors, load {load_average} at the start",
        f"source   commit {commit}, {record['started']}",
    ]
    if record.get("why"):
        lines.insert(1, f"         because: {record['why']}")
    if record["smoke"]:
        lines.insert(0, "SMOKE    something small, to see that it works: these numbers mean nothing")
    if model:
        lines.append(f"model    {model['path']}, fingerprint {model['fingerprint'][:16]}")
    return lines


def voids(record: Record) -> list[str]:
    """The arms that count nowhere, and why."""
    return [
        f"void     {arm['arm']}, round {arm['round'] + 1}: {'; '.join(arm['void'])}"
        for arm in record["arms"]
        if arm["void"]
    ]


def exit_status(record: Record) -> int:
    """0, or 1 when no arm counts: then nothing was measured."""
    if any(not arm["void"] for arm in record["arms"]):
        return 0
    tell("error: every arm is void, so nothing was measured")
    return 1


def pm(figure: Record | None, digits: int = 3) -> str:
    """A median with its least and most."""
    if figure is None:
        return "–"
    text = f"{figure['median']:.{digits}f}"
    return text if figure["arms"] < 2 else f"{text} ({figure['least']:.{digits}f}–{figure['most']:.{digits}f})"


def failed(error: BaseException) -> int:
    """Say why a session ended early; the exit status."""
    if isinstance(error, ExpertstreamError):
        tell(f"error: {error}")
        return error.exit_code
    tell("interrupted: nothing was kept, and what was set up is undone")
    return 130
