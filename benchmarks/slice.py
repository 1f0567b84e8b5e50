"""`nox -s bench-slice`: how near runs at the released dimensions come to what the machine could do.

    python -m runtime synth --shape slice --layers 2 --out DIR
    python -m benchmarks.slice --model DIR [--drive NAME=PATH …] [--memory 12G] [--engine NAME=COMMAND] …

Arms are whole runs in fresh processes, interleaved; before and after each, readers that do nothing else find the
ceiling of the same drives on the same experts, on an idle machine and beside threads that only multiply, since on a
virtual machine the drive, too, may take processors; and in each round the kernels and the read roof are measured. Every
ratio is of neighbours; what is shown is the median of the rounds with the least and the most. Where the time of an arm
went is told by its timeline. What it is compared with: `benchmarks.bounds`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.arms import Arm, Place, Record, brief, judge, run_arm
from benchmarks.bounds import Kernels, Rates, Work
from benchmarks.peers import engine, named_command
from benchmarks.records import failed, parser, session, tell
from benchmarks.replay import Replay, Routes
from benchmarks.speed import Shown, add_run_options, describe, finish, make_arm, place, variants
from benchmarks.stages import synthetic
from benchmarks.ttft import prompt_ids
from runtime.checkpoint import Checkpoint
from runtime.cli.ending import end
from runtime.commands.drives import parse_drives
from runtime.drives.probe import DEPTHS
from runtime.errors import ExpertstreamError, UsageError
from runtime.generate.engine import default_threads
from runtime.units import parse_size, per_second

NO_CACHE, CACHE, STREAMED = "no cache", "cache", "streamed trunk"
LONG, LONG_CACHE = "long prompt", "long prompt, cache"
PROMPT, LONG_PROMPT = 64, 512
CEILING_S, SMOKE_S = 1.0, 0.1
"""How long the drives are measured before and after an arm, and in a smoke."""
STEADY = 1.5
"""An arm is void when one of its two ceilings is more than so many times the other: nobody knows then what it had."""


@dataclass(frozen=True)
class Round:
    """An arm beside what was measured around it: ceiling, `busy` ceiling beside threads that multiply, roof, and
    memory never had before in bytes/s."""

    result: Record
    ceiling: float
    busy: float
    roof: float
    kernels: Kernels
    fresh: float

    @property
    def run(self) -> Record:
        """The arm's record."""
        run: Record = self.result["run"]
        return run

    @property
    def token_s(self) -> float:
        """Seconds a token, the first one aside."""
        return float(self.run["timing"]["decode_s"]) / (len(self.run["token_ids"]) - 1)

    @property
    def token_bytes(self) -> float:
        """Bytes that were read for one."""
        return float(self.result["timeline"]["decode_bytes"]) / (len(self.run["token_ids"]) - 1)

    @property
    def prompt_bytes(self) -> float:
        """Bytes of the experts that the prompt was routed to, each once."""
        return float(self.run["prefill"]["distinct_experts"]) * self.result["timeline"]["expert_bytes"]


Ratio = Callable[[Round, Work], float | None]
Ceiling = Callable[[Round], float]


@dataclass(frozen=True)
class Figure:
    """A row of the table: of which arm, what is divided by what, and what is to be reached."""

    name: str
    arm: str
    ratio: Ratio
    target: str
    of: str


def _streaming(ceiling: Ceiling) -> Ratio:
    def ratio(at: Round, work: Work) -> float | None:
        streamed = at.result["timeline"]["streaming_bytes_per_s"]
        return None if streamed is None else streamed / ceiling(at)

    return ratio


def _streamed_trunk(ceiling: Ceiling) -> Ratio:
    def ratio(at: Round, work: Work) -> float | None:
        if not at.result["timeline"]["decode_trunk_bytes"]:
            return None
        return at.token_s / (at.token_bytes / ceiling(at))

    return ratio


def _prefill(rows: int, bound: Callable[[Work, int, float, float, Kernels], float]) -> Ratio:
    def ratio(at: Round, work: Work) -> float:
        seconds: float = at.run["timing"]["prefill_s"]
        return seconds / bound(work, rows, at.prompt_bytes, at.ceiling, at.kernels)

    return ratio


IDLE, BUSY = attrgetter("ceiling"), attrgetter("busy")

FIGURES = (
    Figure("reads with compute", NO_CACHE, _streaming(IDLE), "≥ 0.95", "the drives alone, from asked for to landed"),
    Figure("the same", NO_CACHE, _streaming(BUSY), "≥ 0.95", "the drives beside threads that only multiply"),
    Figure(
        "token, trunk resident, no cache",
        NO_CACHE,
        lambda at, work: at.token_s / work.decode_s(at.token_bytes, at.ceiling, at.roof),
        "≤ 1.10",
        "its reads at the ceiling, then the serial trunk at 0.65 of the read roof",
    ),
    Figure("token, cache", CACHE, lambda at, work: at.token_s, "–", "seconds"),
    Figure("token, trunk streamed", STREAMED, _streamed_trunk(IDLE), "≤ 1.08", "all its reads at the ceiling"),
    Figure("the same, trunk", STREAMED, _streamed_trunk(BUSY), "≤ 1.08", "the same beside threads that only multiply"),
    Figure(
        f"prompt of {PROMPT}",
        NO_CACHE,
        _prefill(PROMPT, Work.prefill_s),
        "≤ 1.12",
        "its experts at the ceiling, then the serial trunk at the rate of the kernels",
    ),
    Figure(
        f"the same, prompt of {PROMPT}",
        NO_CACHE,
        _prefill(PROMPT, Work.overlapped_prefill_s),
        "≤ 1.12",
        "its experts at the ceiling or their arithmetic, whichever takes longer, then the serial trunk",
    ),
    Figure(
        f"prompt of {LONG_PROMPT}",
        LONG,
        _prefill(LONG_PROMPT, Work.long_prefill_s),
        "≤ 1.25",
        "its experts at the ceiling, or all arithmetic at the rate of the kernels",
    ),
    Figure(
        f"the same, prompt of {LONG_PROMPT}, cache",
        LONG_CACHE,
        _prefill(LONG_PROMPT, Work.long_prefill_s),
        "≤ 1.25",
        "the same; what is kept takes memory that the process never had before",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("slice", __doc__, rounds=3)
    add_run_options(options)
    add = options.add_argument
    add("--memory", default="12G", metavar="SIZE", help="of the arms with a resident trunk [12G]")
    add("--small-memory", default="4G", metavar="SIZE", help="of the arm that is to stream its trunk [4G]")
    add("--threads", type=int, default=default_threads(), help="of the arms and the kernels [all processors]")
    add("--tokens", type=int, default=9, help="of an answer, at least 2 [9]")
    add("--shared-disk", action="store_true", help="others use the disk: what they read makes no arm void")
    add("--engine", action="append", default=[], metavar="NAME=COMMAND", help="another engine; repeat")
    asked = options.parse_args(arguments)
    try:
        if asked.model is None and not asked.smoke:
            raise UsageError("--model is needed: python -m runtime synth --shape slice makes one")
        if asked.tokens < 2 or asked.threads < 1:
            raise UsageError("--tokens is 2 at least, --threads 1")
        sizes = [parse_size(getattr(asked, name), f"--{name}") for name in ("memory", "small_memory")]
        for text in asked.engine:
            named_command(text)
        record = session(asked, "slice", "whole runs at the released dimensions, beside what the machine could do")
        with ExitStack() as stack:
            if asked.model is None:
                asked.model = synthetic(
                    Path(stack.enter_context(TemporaryDirectory(dir=asked.work))) / "ladder", smoke=True
                )
            describe(asked, record)
            checkpoint = stack.enter_context(Checkpoint.open(asked.model, experts_elsewhere=bool(asked.drive)))
            work = Work.of(checkpoint)
            layout = parse_drives(asked.drive, asked.simulate_drive)
            replay = stack.enter_context(closing(Replay(checkpoint, layout, Routes(checkpoint, None))))
            arms, engines = _arms(asked, sizes)
            where = stack.enter_context(place(asked, "slice", [*arms, *engines]))
            rates = Rates(checkpoint.config, asked.threads)
            rounds = list(_rounds(asked, arms, engines, where, replay, rates))
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)
    record["arms"] = [at.result for at in rounds]
    judge(record["arms"])
    rows, record["figures"] = table(rounds, work, _engines(rounds, asked))
    record |= {"work": vars(work), "comparisons": [], "shown": ["first_token_s", "steady_tokens_per_s"]}
    record["measured"] = [
        {"arm": at.result["arm"], "round": at.result["round"]}
        | {"ceiling_bytes_per_s": at.ceiling, "busy_ceiling_bytes_per_s": at.busy}
        | {"read_roof_bytes_per_s": at.roof, "fresh_memory_bytes_per_s": at.fresh, **vars(at.kernels)}
        for at in rounds
    ]
    head = ["figure", "reached", "least", "most", "must be", "of"]
    shown = Shown(head, rows, ("steady_tokens_per_s", "tokens/s, steady", "Slice"))
    try:
        return finish(asked.out, where.scratch, record, [arm.name for arm in arms], shown)
    finally:
        print("\n".join([_measured(rounds), *_where_time_went(rounds)]))


# --- arms ---


def _arms(asked: Any, sizes: Sequence[int]) -> tuple[list[Arm], list[Arm]]:
    """Ours, and those of other engines: two of each, whose difference is its tokens."""
    ids = prompt_ids(asked.model, LONG_PROMPT)
    prompts = {n: ["--prompt-ids", ",".join(map(str, ids[:n]))] for n in (PROMPT, LONG_PROMPT)}
    memory, small = (["--memory", str(size)] for size in sizes)
    more = [*variants(asked)[""][0], "--threads", str(asked.threads), "--backend", "cpu"]
    new = ["--max-new", str(asked.tokens)]
    long = [*prompts[LONG_PROMPT], "--max-new", "1", "--prefill-chunk", str(LONG_PROMPT)]
    off = ["--expert-cache", "off"]
    words = {
        NO_CACHE: [*prompts[PROMPT], *new, *memory, *off],
        CACHE: [*prompts[PROMPT], *new, *memory],
        STREAMED: [*prompts[PROMPT], *new, *small],
        LONG: [*long, *memory, *off],
        LONG_CACHE: [*long, *memory],
    }
    ours = []
    for name, own in words.items():
        arm = make_arm(asked, name, [*own, *more], partners="long" if name in (LONG, LONG_CACHE) else "")
        used = sizes[1] if name == STREAMED else sizes[0]
        ours.append(replace(arm, shared=arm.shared or asked.shared_disk, memory=0 if asked.smoke else used))
    text = ",".join(map(str, ids[:PROMPT]))
    others = []
    for template in asked.engine:
        for count in (1, asked.tokens):
            arm = engine(template, asked.model, text, count, ours[0])
            name, partners = f"{arm.name}, {count} tokens", f"{arm.name} {count}"
            others.append(replace(arm, name=name, partners=partners, memory=ours[0].memory))
    return ours, others


def _rounds(
    asked: Any, arms: Sequence[Arm], engines: Sequence[Arm], where: Place, replay: Replay, rates: Rates
) -> Iterator[Round]:
    """Every arm once a round, each round in the other direction, between two measurements of the drives."""
    seconds = SMOKE_S if asked.smoke else CEILING_S
    depths = replay.find_depths(DEPTHS, seconds)

    def ceilings() -> tuple[float, float]:
        idle = replay.ceiling(depths, seconds)
        with rates.busy():
            return idle, replay.ceiling(depths, seconds)

    for number in range(asked.rounds):
        fresh = rates.fresh()
        roof, kernels = rates.measure()
        every = [*arms, *engines]
        before = ceilings()
        for arm in every if number % 2 == 0 else reversed(every):
            file = where.scratch / "timeline.json"
            timed = () if arm.command else ("--timeline", str(file), "--timeline-passes", "all")
            result = run_arm(replace(arm, options=(*arm.options, *timed)), number, where)
            after = ceilings()
            result["timeline"] = None
            if file.exists():
                result["timeline"] = summary(json.loads(file.read_text())) | {
                    "expert_bytes": replay.checkpoint.expert_nbytes
                }
                file.unlink()
            idle, busy = ((b + a) / 2 for b, a in zip(before, after, strict=True))
            if not asked.smoke:
                result["void"] += unsteady(before[0], after[0])
            tell(f"{arm.name:24} round {number + 1} of {asked.rounds}  {brief(result)}")
            yield Round(result, idle, busy, roof, kernels, fresh)
            before = after


def unsteady(before: float, after: float) -> list[str]:
    """Why an arm is void between two ceilings, in bytes/s, if it is."""
    if max(before, after) <= STEADY * min(before, after):
        return []
    return [f"the drives gave {per_second(before)} before it and {per_second(after)} after it"]


# --- what a timeline tells ---


def summary(timeline: Record) -> Record:
    """What is kept of it: by phase and by what was waited for, of the prompt and of the tokens after it, in seconds;
    bytes that landed for these; and the rate of reads from a layer's asking for its experts until it had them."""
    passes = timeline["passes"]
    reads = {
        tuple(row[1:]): dict(zip(timeline["reads"]["columns"], row, strict=True)) for row in timeline["reads"]["rows"]
    }
    prompt = 1 + max((n for n, of in enumerate(passes) if of["rows"] > 1), default=0)
    found: Record = {}
    for name, some in (("prompt", passes[:prompt]), ("decode", passes[prompt:])):
        for sums in ("by_phase", "waiting"):
            found[f"{name}_{sums}"] = {key: sum(of[sums][key] for of in some) for key in passes[0][sums]}
    begun = passes[prompt]["began"] if prompt < len(passes) else float("inf")
    later = [read for read in reads.values() if read["landed"] > begun]
    found["decode_bytes"] = sum(read["bytes"] for read in later)
    found["decode_trunk_bytes"] = sum(read["bytes"] for read in later if read["kind"] == "trunk")
    barriers: dict[tuple[int, int], list[Record]] = {}
    for read in later:
        if read["kind"] == "demand":
            barriers.setdefault((read["pass"], read["layer"]), []).append(read)
    seconds = sum(max(r["landed"] for r in some) - min(r["queued"] for r in some) for some in barriers.values())
    nbytes = sum(r["bytes"] for some in barriers.values() for r in some)
    found["streaming_bytes_per_s"] = nbytes / seconds if seconds else None
    return found


def _measured(rounds: Sequence[Round]) -> str:
    """What the ratios were made with: the median of the rounds, with the least and the most."""
    facts: dict[str, Sequence[float]] = {
        "ceiling of the drives": [at.ceiling / 1e9 for at in rounds],
        "beside threads that multiply": [at.busy / 1e9 for at in rounds],
        "read roof": [at.roof / 1e9 for at in rounds],
        "memory never had before": [at.fresh / 1e9 for at in rounds],
    }
    said = [f"{name} {_median(values)} GB/s" for name, values in facts.items()]
    rates = {
        "matrices": [at.kernels.matrix / 1e9 for at in rounds],
        "experts": [at.kernels.expert / 1e9 for at in rounds],
    }
    said += [f"{name} {_median(values)} GFLOP/s" for name, values in rates.items()]
    return f"measured {', '.join(said)}"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _where_time_went(rounds: Sequence[Round]) -> Iterator[str]:
    """A line for the prompt and one for the tokens of each arm."""
    for name in dict.fromkeys(at.result["arm"] for at in rounds):
        mine = [at for at in rounds if at.result["arm"] == name and not at.result["void"] and at.result["timeline"]]
        for part in ("prompt", "decode"):
            phases: dict[str, float] = {}
            for at in mine:
                for kind in ("by_phase", "waiting"):
                    for key, seconds in at.result["timeline"][f"{part}_{kind}"].items():
                        label = key if kind == "by_phase" else f"waiting for {key}"
                        phases[label] = phases.get(label, 0.0) + seconds
            total = sum(phases.values()) - phases.get("waiting", 0.0)
            if total > 0:
                shares = sorted(((s / total, key) for key, s in phases.items() if key != "waiting"), reverse=True)
                said = ", ".join(f"{key} {share:.1%}" for share, key in shares if share >= 0.002)
                yield f"time     {name}, {part}: {said}"


# --- the table ---


def table(rounds: Sequence[Round], work: Work, engines: Sequence[Figure]) -> tuple[list[list[str]], list[Record]]:
    """(for people, for the record): every figure with its values in the rounds, of arms that are not void."""
    rows, kept = [], []
    for figure in [*FIGURES, *engines]:
        mine = [at for at in rounds if at.result["arm"] == figure.arm and not at.result["void"]]
        values = [value for at in mine if (value := figure.ratio(at, work)) is not None]
        kept.append({"figure": figure.name, "arm": figure.arm, "must_be": figure.target, "values": values})
        rows.append([figure.name, *_spread(values), figure.target, figure.of])
    ours = [at for at in rounds if not at.result["void"] and at.result["timeline"]]
    peaks = [at.run["memory"]["peak_rss_bytes"] / at.run["memory"]["plan"]["total"] for at in ours]
    kept.append({"figure": "peak memory", "arm": None, "must_be": "≤ 1.02", "values": peaks})
    rows.append(["peak memory", *_spread(peaks), "≤ 1.02", "the plan"])
    return rows, kept


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return ["–", "", ""]
    return [f"{value:.3f}" for value in (statistics.median(values), min(values), max(values))]


def _engines(rounds: Sequence[Round], asked: Any) -> list[Figure]:
    """Our cached tokens over another engine's, whose tokens are what its longer arm takes longer, where neither of its
    arms was void all the time."""
    figures, counted = [], [at.result for at in rounds if not at.result["void"]]
    for template in asked.engine:
        name = template.partition("=")[0].strip()
        took = [
            [result["elapsed_s"] for result in counted if result["arm"] == f"{name}, {count} tokens"]
            for count in (1, asked.tokens)
        ]
        theirs = 0.0
        if all(took):
            theirs = (statistics.median(took[1]) - statistics.median(took[0])) / (asked.tokens - 1)
        ratio = _over(theirs) if theirs > 0 else (lambda at, work: None)
        said = f"{name}: {theirs:.3f} s a token" if all(took) else f"{name}: every arm is void"
        figures.append(Figure("token, cache", CACHE, ratio, "≤ 0.75", said))
    return figures


def _over(theirs: float) -> Ratio:
    return lambda at, work: at.token_s / theirs


if __name__ == "__main__":
    sys.exit(end(main))
