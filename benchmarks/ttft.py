"""`nox -s bench-ttft`: seconds to the first token, by the length of the prompt, and the rate at which prompts are read.

    python -m benchmarks.ttft [--model DIR] [--drive NAME=PATH …] [--prompts 6,37,128,512] [--versus OPTIONS] …

Prompts are the first tokens of one text (benchmarks/prompt.txt); for a checkpoint without a tokenizer they are ids that
are spread over the vocabulary. The prefill rate is between the shortest and the longest, so that loading is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arms import Arm, Record, spread
from benchmarks.records import parser, pm
from benchmarks.speed import Shown, add_run_options, conduct, make_arm, results_of, variants, versus
from runtime.cli.ending import end
from runtime.config import ModelConfig
from runtime.errors import UsageError
from runtime.generate import embedded_model
from runtime.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("prompt.txt")
PROMPTS = "6,37,128,512"
PRIME = 7919


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("ttft", __doc__, rounds=3)
    add_run_options(options)
    options.add_argument("--prompts", default=PROMPTS, metavar="N,…", help=f"their lengths in tokens [{PROMPTS}]")
    kind = "whole runs of this program, of one new token each"
    return conduct(options.parse_args(arguments), "ttft", kind, _arms, _show)


def _lengths(asked: argparse.Namespace) -> list[int]:
    texts = ["6", "37"] if asked.smoke else asked.prompts.split(",")
    if not all(text.isdecimal() and int(text) for text in texts):
        raise UsageError(f"--prompts {asked.prompts!r}: write numbers of tokens, such as {PROMPTS}")
    return sorted({int(text) for text in texts})


def _arms(asked: argparse.Namespace, record: Record) -> list[Arm]:
    lengths = _lengths(asked)
    ids = prompt_ids(asked.model or embedded_model(), lengths[-1])
    return [
        make_arm(
            asked,
            f"{variant}{length} tokens",
            ["--prompt-ids", ",".join(map(str, ids[:length])), "--max-new", "1", *words],
            checkout,
            partners=str(length),
            settings={"max_new": 1},
        )
        for length in lengths
        for variant, (words, checkout) in variants(asked).items()
    ]


def _show(asked: argparse.Namespace, record: Record, names: Sequence[str]) -> Shown:
    lengths = _lengths(asked)
    record["prefill_tokens_per_s"] = {v: prefill_rate(record["arms"], v, lengths) for v in variants(asked)}
    record["comparisons"] = versus(record, names, "first_token_s")
    record["shown"] = ["first_token_s", "prompt_s", "prefill_tokens_per_s"]
    rows = []
    for name in names:
        mine = results_of(record, name)
        reads = sorted({_reads(r) for r in mine if not r["void"]})
        rows.append([name, pm(spread(mine, "first_token_s")), pm(spread(mine, "prompt_s")), "/".join(reads)])
    for variant, rate in record["prefill_tokens_per_s"].items():
        if rate is not None:
            rows.append([f"{variant}prefill, {lengths[0]} to {lengths[-1]} tokens", f"{rate:.1f} tokens/s", "", ""])
    head = ["prompt", "first token, s", "of it the prompt, s", "experts read"]
    return Shown(head, rows, ("first_token_s", "seconds to the first token", "First token"))


def prompt_ids(model: Path, length: int) -> list[int]:
    """The first so many tokens of the text. Raises UsageError when it has fewer."""
    if not (model / "tiktoken.model").exists():
        vocabulary = ModelConfig.load(model / "config.json").vocab_size
        return [1 + n * PRIME % (vocabulary // 2) for n in range(length)]
    ids = Tokenizer.load(model).encode(TEXT.read_text())
    if len(ids) < length:
        raise UsageError(f"--prompts: the text has {len(ids):,} tokens for this model, and {length:,} are wanted")
    return ids[:length]


def prefill_rate(results: Sequence[Record], variant: str, lengths: Sequence[int]) -> float | None:
    """Tokens/s between the shortest and the longest prompt: the median of rounds in which neither arm is void."""
    short, long = (
        {
            r["round"]: r["figures"]["first_token_s"]
            for r in results
            if r["arm"] == f"{variant}{n} tokens" and not r["void"]
        }
        for n in (lengths[0], lengths[-1])
    )
    more = [long[number] - short[number] for number in short.keys() & long.keys()]
    middle = statistics.median(more) if more else 0.0
    return (lengths[-1] - lengths[0]) / middle if middle > 0 else None


def _reads(result: Record) -> str:
    prefill = result["run"]["prefill"]
    return f"{prefill['expert_reads']:,}"


if __name__ == "__main__":
    sys.exit(end(main))
