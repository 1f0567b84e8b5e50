"""`nox -s bench-decode`: tokens a second, of short answers with all that comes before them, and of long ones without.

    python -m benchmarks.decode [--model DIR] [--drive NAME=PATH …] [--lengths 17,128,512] [--versus OPTIONS] …

One prompt, several lengths: 17 tokens, as published ladders have it; 128, a short answer; 512, for the steady rate.
With `--versus` or `--versus-checkout` every arm has a partner, and the comparison ends in a verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.arms import interleave, spread
from benchmarks.records import failed, parser, pm, session
from benchmarks.speed import add_run_options, describe, finish, make_arm, place, variants
from benchmarks.verdict import compare_arms
from runtime.errors import ExpertstreamError, UsageError

PROMPT = "The capital of France is"
LENGTHS = "17,128,512"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("decode", __doc__, rounds=3)
    add_run_options(options)
    options.add_argument("--prompt", default=PROMPT, help=f"[{PROMPT!r}]")
    options.add_argument("--prompt-ids", metavar="1,2,3", help="instead, for a checkpoint without a tokenizer")
    options.add_argument("--lengths", default=LENGTHS, metavar="N,…", help=f"tokens of the answers [{LENGTHS}]")
    asked = options.parse_args(arguments)
    try:
        record = session(asked, "decode", "whole runs of this program")
        describe(asked, record)
        lengths = ["17"] if asked.smoke else asked.lengths.split(",")
        if not all(length.isdecimal() and int(length) > 1 for length in lengths):
            raise UsageError(f"--lengths {asked.lengths!r}: write numbers of tokens, of at least 2, such as {LENGTHS}")
        prompt = ["--prompt-ids", asked.prompt_ids] if asked.prompt_ids else ["--prompt", asked.prompt]
        arms = [
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
        names = [arm.name for arm in arms]
        with place(asked, "decode", arms) as where:
            record["arms"] = results = interleave(arms, asked.rounds, where)
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)
    record["comparisons"] = [
        compare_arms(results, name, f"versus {name}", figure, more_is_better=True)
        for name in names
        if f"versus {name}" in names
        for figure in ("inclusive_tokens_per_s", "steady_tokens_per_s")
    ]
    record["shown"] = ["inclusive_tokens_per_s", "steady_tokens_per_s", "first_token_s"]
    rows = []
    for name in names:
        mine = [r for r in results if r["arm"] == name]
        tokens = sorted({str(r["figures"]["tokens"]) for r in mine if not r["void"]})
        rows.append([name, "/".join(tokens) or "–", *(pm(spread(mine, figure)) for figure in record["shown"])])
    head = ["arm", "generated", "inclusive tokens/s", "steady tokens/s", "first token, s"]
    return finish(
        asked.out, where.scratch, record, head, rows, (names, "steady_tokens_per_s", "tokens/s, steady", "Decode")
    )


if __name__ == "__main__":
    sys.exit(main())
