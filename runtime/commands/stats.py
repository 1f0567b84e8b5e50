"""`--stats`: a line per token, and a table when the answer is complete."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from runtime.drives.report import FATES
from runtime.drives.waits import TRUNK
from runtime.generate import Engine, Session, Step
from runtime.generate.record import peak_rss_bytes, precision, timing, waiting
from runtime.units import size
from runtime.weights.layout import Drives
from runtime.weights.prefetch import PREDICTORS

AWAITED = {"demand_s": "experts", "late_s": "experts guessed late", "trunk_s": "the trunk"}
"""What is waited for, as `Waited` names it."""


def token_line(number: int, step: Step, piece: str) -> str:
    """What one token took. The first one's time is that of the whole prompt."""
    return (
        f"{number:5} {step.token_id:7} {step.seconds * 1000:10.1f} ms  "
        f"{step.expert_hits:5} hits  {step.expert_misses:5} misses  {step.bytes_read / 1e6:9.2f} MB  {piece!r}"
    )


def read_lines(engine: Engine) -> list[tuple[str, str]]:
    """What was read of the trunk, and from each drive."""
    if engine.drives is None:
        return [("read in all", f"{size(engine.checkpoint.bytes_read)} in {engine.checkpoint.reads:,} reads")]
    by_drive, by_kind, _ = engine.drives.counts()
    lines = [("trunk", f"{size(c.requested_bytes)} in {c.reads:,} reads") for k, c in by_kind.items() if k == TRUNK]
    for name, counts in by_drive.items():
        trouble = f", {counts.errors:,} failed" if counts.errors else ""
        lines.append((f"drive {name}", f"{size(counts.requested_bytes)} in {counts.reads:,} reads{trouble}"))
    return lines + _kernel_lines(engine.drives)


def _kernel_lines(drives: Drives) -> list[tuple[str, str]]:
    """What the system counted meanwhile, of this process and of the disks below the drives, whoever used them."""
    process, disks = drives.witnessed()
    lines = [] if process is None else [("by the kernel", f"{size(process)} fetched from storage by this process")]
    for disk, (above, done) in disks.items():
        below = f", below {' and '.join(above)}" if above else ""
        lines.append(
            (f"disk {disk}", f"{size(done.read_bytes)} read, {size(done.written_bytes)} written by all{below}")
        )
    return lines


def prefetch_lines(engine: Engine) -> list[tuple[str, str]]:
    """What became of guesses, and how good they were in which layers; nothing when there were none."""
    prefetch, guesses = engine.model.prefetch, engine.experts.stats.guesses
    if prefetch is None:
        return []
    fates = ", ".join(f"{size(getattr(guesses, fate))} {fate.replace('_', ' ')}" for fate in FATES)
    lines = [("prefetch", f"{size(guesses.issued)} guessed: {fates}")]
    for predictor in PREDICTORS:
        recalls = dict(prefetch.recalls(predictor))
        if recalls:
            mean = statistics.mean(recalls.values())
            worst, best = min(recalls, key=recalls.__getitem__), max(recalls, key=recalls.__getitem__)
            ends = f"layer {worst} {recalls[worst]:.0%}, layer {best} {recalls[best]:.0%}"
            lines.append((f"  {predictor}", f"named {mean:.0%} of what was routed; {ends}"))
    return lines


def waiting_line(steps: Sequence[Step]) -> str:
    """The share of the time of these that went by with waiting for reads, and for which."""
    told = waiting(steps)
    total = sum(step.seconds for step in steps) or 1.0
    for_which = ", ".join(f"{words} {(told[what] or 0.0) / total:.0%}" for what, words in AWAITED.items())
    return f"for reads {told['share'] or 0.0:.0%} of the time: {for_which}"


def table(session: Session, steps: Sequence[Step]) -> str:
    """The run in a few rows: prompt, tokens, experts, memory."""
    from tabulate import tabulate

    engine, prefill, decoded = session.engine, session.prefill, steps[1:]
    stats, plan = engine.experts.stats, engine.plan
    times = timing(engine, prefill, steps)
    rows = [
        ("precision", precision(engine)),
        ("load", f"{times['load_s']:.2f} s"),
        ("prompt", f"{prefill.rows:,} tokens in {prefill.seconds:.3f} s, {prefill.expert_reads:,} experts read"),
        ("first token", f"{times['ttft_s']:.3f} s"),
        ("  waiting", waiting_line(steps[:1])),
    ]
    if decoded:
        ms = sorted(step.seconds * 1000 for step in decoded)
        rate = f"{times['decode_tokens_per_s']:.2f} tokens/s"
        rows += [
            ("decode", f"{len(decoded):,} tokens in {times['decode_s']:.3f} s, {rate}"),
            ("per token", f"{statistics.median(ms):.1f} ms median, {ms[0]:.1f} to {ms[-1]:.1f}"),
            ("  waiting", waiting_line(decoded)),
            ("read per token", size(sum(step.bytes_read for step in decoded) // len(decoded))),
        ]
    rows += [
        ("experts", f"{stats.hits:,} hits, {stats.misses:,} misses, {stats.evictions:,} evictions"),
        *prefetch_lines(engine),
        ("expert cache", f"{size(stats.peak_bytes)} at most, of {size(engine.experts.budget_bytes)}"),
        *read_lines(engine),
        ("memory", f"{size(peak_rss_bytes())} at most, {size(plan.total)} planned, of {size(plan.limit.nbytes)}"),
    ]
    return str(tabulate(rows, tablefmt="plain", disable_numparse=True))
