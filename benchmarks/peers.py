"""`nox -s bench-peers`: other engines on the same checkpoint, in the same session, by turns with this one.

    python -m benchmarks.peers [--model DIR] [--engine 'NAME=command {model} {ids} {max_new}' …] …

mlx-lm runs where it is installed, knows the architecture and has room for the whole checkpoint. Any other engine is a
command, in which {model}, {prompt}, {ids} and {max_new} are put in; of it only the time of the whole process is known,
and what it printed is kept. Engines round differently: whether one generates the same tokens as this program is said,
and only an engine that disagrees with itself is void.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.arms import ROOT, Arm, Record, spread
from benchmarks.records import count, parser, pm, split
from benchmarks.speed import Shown, add_run_options, conduct, make_arm, results_of, variants
from benchmarks.ttft import prompt_ids
from benchmarks.verdict import compare_arms
from runtime.cli.ending import end
from runtime.errors import UsageError
from runtime.generate import embedded_model
from runtime.units import size

OURS = "expertstream"
ROOM = 1.6
"""Memory over the size of a checkpoint with which an engine that loads all of it is tried."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("peers", __doc__, rounds=3)
    add_run_options(options)
    options.add_argument("--engine", action="append", default=[], metavar="NAME=COMMAND", help="another one; repeat")
    options.add_argument("--max-new", type=count, help="tokens of the answer [17, with --smoke 4]")
    kind = "whole processes of several engines on one checkpoint"
    return conduct(options.parse_args(arguments), "peers", kind, _arms, _show)


def _arms(asked: argparse.Namespace, record: Record) -> list[Arm]:
    model, max_new = asked.model or embedded_model(), asked.max_new or (4 if asked.smoke else 17)
    ids = ",".join(map(str, prompt_ids(model, 6)))
    words = ["--prompt-ids", ids, "--max-new", str(max_new), *variants(asked)[""][0]]
    ours = make_arm(asked, OURS, words, partners=OURS)
    peers, record["not_run"] = _mlx_lm(model, ids, max_new, ours)
    return [ours, *peers, *(engine(text, model, ids, max_new, ours) for text in asked.engine)]


def _show(asked: argparse.Namespace, record: Record, names: Sequence[str]) -> Shown:
    others = names[1:]
    record["same_tokens"] = {name: _agrees(record, name) for name in others}
    figures = ("first_token_s", "steady_tokens_per_s")
    record["comparisons"] = [
        compare_arms(record["arms"], name, OURS, figure, more_is_better=figure != "first_token_s")
        for name in others
        for figure in figures
    ]
    record["shown"] = ["elapsed_s", *figures]
    rows = []
    for name in names:
        mine = results_of(record, name)
        same = {True: "yes", False: "no", None: "–"}[record["same_tokens"].get(name, True)]
        rows.append([name, same, *(pm(spread(mine, figure)) for figure in record["shown"])])
    rows += [[f"{name}: not run, {why}", *[""] * 4] for name, why in record["not_run"].items()]
    head = ["engine", "our tokens", "whole process, s", "first token, s", "steady tokens/s"]
    return Shown(head, rows, ("elapsed_s", "seconds, whole process", "Engines on one checkpoint"))


def _mlx_lm(model: Path, ids: str, max_new: int, ours: Arm) -> tuple[list[Arm], dict[str, str]]:
    """Its arm, or why there is none."""
    if importlib.util.find_spec("mlx_lm") is None:
        return [], {"mlx-lm": "it is not installed"}
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if nbytes * ROOM > free:
        return [], {"mlx-lm": f"it loads all of {size(nbytes)}, and {size(free)} are free"}
    command = (sys.executable, "-m", "benchmarks.peer_mlx_lm", str(model), ids, str(max_new))
    return [Arm("mlx-lm", partners="mlx-lm", exact=False, command=command, cold=ours.cold, files=ours.files)], {}


def engine(text: str, model: Path, ids: str, max_new: int, ours: Arm) -> Arm:
    """From NAME=COMMAND. Raises UsageError."""
    name, words = named_command(text)
    values = {"model": str(model), "ids": ids, "max_new": str(max_new), "prompt": _prompt(model, ids)}
    try:
        command = tuple(word.format(**values) for word in words)
    except (KeyError, IndexError, ValueError) as error:
        raise UsageError(f"--engine {text!r}: {error!r}: in a command are {{{'}, {'.join(values)}}}") from None
    found = ROOT / command[0] if os.sep in command[0] else command[0]  # arms run there
    if shutil.which(found) is None:
        raise UsageError(f"--engine {text!r}: there is no command {command[0]}")
    return Arm(name, partners=name, exact=False, command=command, cold=ours.cold, files=ours.files)


def named_command(text: str) -> tuple[str, list[str]]:
    """Name and words of NAME=COMMAND. Raises UsageError."""
    name, _, command = text.partition("=")
    found = split(command, "--engine", text)
    if not name.strip() or not found:
        raise UsageError(f"--engine {text!r}: write NAME=COMMAND")
    return name.strip(), found


def _prompt(model: Path, ids: str) -> str:
    """The text of the ids; empty for a checkpoint without a tokenizer."""
    from runtime.text.tokenizer import Tokenizer

    if not (model / "tiktoken.model").exists():
        return ""
    return Tokenizer.load(model).decode(json.loads(f"[{ids}]"))


def _agrees(record: Record, name: str) -> bool | None:
    """Whether the engine generated our tokens; None when it did not say which."""
    said, own = ({r["tokens_sha256"] for r in results_of(record, each) if not r["void"]} for each in (name, OURS))
    return None if said <= {None} or not own else said == own


if __name__ == "__main__":
    sys.exit(end(main))
