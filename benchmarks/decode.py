"""`nox -s bench-decode`: tokens a second, of short answers with all that comes before them, and of long ones without.

    python -m benchmarks.decode [--model DIR] [--drive NAME=PATH …] [--lengths 17,128,512] [--versus OPTIONS] …

One prompt, several lengths: 17 tokens, as published ladders have it; 128, a short answer; 512, for the steady rate.
With `--versus` or `--versus-checkout` every arm has a partner, and the comparison ends in a verdict.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.arms import Arm, Record, spread
from benchmarks.records import parser, pm
from benchmarks.speed import Shown, add_run_options, conduct, make_arm, results_of, variants, versus
from runtime.cli.ending import end
from runtime.errors import UsageError

PROMPT = "The capital of France is"
LENGTHS = "17,128,512"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("decode", __doc__, rounds=3)
    add_run_options(options)
    options.add_argument("--prompt", default=PROMPT, help=f"[{PROMPT!r}]")
    options.add_argument("--prompt-ids", metavar="1,2,3", help="instead, for a checkpoint without a tokenizer")
    options.add_argument("--lengths", default=LENGTHS, metavar="N,…", help=f"tokens of the answers [{LENGTHS}]")
    return conduct(options.parse_args(arguments), "decode", "whole runs of this program", _arms, _show)


def _arms(asked: argparse.Namespace, record: Record) -> list[Arm]:
    lengths = ["17"] if asked.smoke else asked.lengths.split(",")
    if not all(length.isdecimal() and int(length) > 1 for length in lengths):
        raise UsageError(f"--lengths {asked.lengths!r}: write numbers of tokens, of at least 2, such as {LENGTHS}")
    prompt = ["--prompt-ids", asked.prompt_ids] if asked.prompt_ids else ["--prompt", asked.prompt]
    return [
        make_arm(
            asked,
            f"{variant}{length} tokens",
            [*prompt, "--max-new", length, *words],
            checkout,
            partners=length,
            settings={"max_new": int(length)},
        )
        for length in lengths
        for variant, (words, checkout) in variants(asked).items()
    ]


def _show(asked: argparse.Namespace, record: Record, names: Sequence[str]) -> Shown:
    figures = ("inclusive_tokens_per_s", "steady_tokens_per_s")
    record["comparisons"] = versus(record, names, *figures, more_is_better=True)
    record["shown"] = [*figures, "first_token_s"]
    rows = []
    for name in names:
        mine = results_of(record, name)
        tokens = sorted({str(r["figures"]["tokens"]) for r in mine if not r["void"]})
        rows.append([name, "/".join(tokens) or "–", *(pm(spread(mine, figure)) for figure in record["shown"])])
    head = ["arm", "generated", "inclusive tokens/s", "steady tokens/s", "first token, s"]
    return Shown(head, rows, ("steady_tokens_per_s", "tokens/s, steady", "Decode"))


if __name__ == "__main__":
    sys.exit(end(main))
