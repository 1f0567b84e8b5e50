"""`--timeline FILE`: what a run computed, read and waited for, and when, as JSON or as a picture (docs/timeline.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.commands.arguments import Passes
from runtime.config import ModelConfig
from runtime.drives.trace import Read, TraceLog
from runtime.drives.waits import WAITS
from runtime.errors import UsageError
from runtime.home import write_whole
from runtime.model.timeline import PHASES, WAITING, Pass, Span, Timeline

SCHEMA = "expertstream.timeline/1"
SPANS = ("pass", "layer", "phase", "expert", "awaited", "began", "ended")
READS = ("pass", "drive", "kind", "layer", "expert", "what", "bytes", "queued", "started", "landed", "fault")
Chosen = Passes | Literal["typical"]
FORMATS = (".json", ".svg")


@dataclass(frozen=True)
class Shown:
    """A pass that is shown in full; name: what it is, for people."""

    number: int
    name: str
    of: Pass
    reads: Sequence[Read]

    def share(self, holds: Callable[[Span], bool]) -> float:
        """The part of its time that these spans take."""
        seconds = sum(span.seconds for span in self.of.spans if holds(span))
        return seconds / self.of.seconds if self.of.seconds else 0.0


def check_format(path: Path) -> None:
    """Raise UsageError for a name that does not say what is wanted."""
    if path.suffix not in FORMATS:
        raise UsageError(f"--timeline {path}: the name must end in {' or '.join(FORMATS)}, which says what is written")


def choose(timeline: Timeline, log: TraceLog, asked: Chosen = "typical") -> list[Shown]:
    """The passes that are shown, as far as all of their spans are there: those asked for, None for all, or the last
    one over the prompt and the one of median time behind it."""
    passes = timeline.passes
    prompt = max((n for n, of in enumerate(passes) if of.rows > 1), default=0)
    whole = [n for n, of in enumerate(passes) if not of.missing and of.ended]
    later = sorted((n for n in whole if n > prompt), key=lambda n: passes[n].seconds)
    if isinstance(asked, str):
        chosen = [n for n in whole if n == prompt] + later[(len(later) - 1) // 2 :][:1]
    else:
        chosen = [n for n in whole if asked is None or any(n in some for some in asked)]
    shown = []
    for n in chosen:
        of = passes[n]
        where = f"token {of.position}" if of.rows == 1 else f"tokens {of.position} to {of.position + of.rows - 1}"
        name = f"prompt, {where}" if n <= prompt else where
        if isinstance(asked, str) and n > prompt:
            name += f", the median of {len(later)}"
        shown.append(Shown(n, name, of, log.between(of.began, of.ended)))
    return shown


def write(
    path: Path,
    timeline: Timeline,
    log: TraceLog,
    asked: Chosen,
    config: ModelConfig,
    about: dict[str, Any],
) -> str:
    """Write the file, whole or not at all; what to tell of it. Raises OSError."""
    shown = choose(timeline, log, asked)
    if path.suffix == ".svg":
        from runtime.commands.strip import MOST, draw

        said = draw(shown[:MOST], config, about)
        more = f", the first {MOST} of {len(shown)}" if len(shown) > MOST else ""
    else:
        said, more = json.dumps(record(timeline, shown, log.began, about)) + "\n", ""
    write_whole(path, said.encode())
    missing = sum(of.missing > 0 for of in timeline.passes)
    unshown = f"; there was no room for {missing:,} more" if missing else ""
    return f"{min(len(shown), MOST) if more else len(shown)} of {len(timeline.passes):,} passes{more}{unshown}"


def record(timeline: Timeline, shown: Sequence[Shown], zero: float, about: dict[str, Any]) -> dict[str, Any]:
    """The object of the JSON file: every pass in sums, the shown ones in full. zero: the moment that is 0 s."""

    def at(moment: float) -> float:
        return round(moment - zero, 7)

    return {
        "schema": SCHEMA,
        **about,
        "passes": [
            {
                "position": of.position,
                "rows": of.rows,
                "began": at(of.began),
                "seconds": round(of.seconds, 7),
                "missing": of.missing,
                "by_phase": _sums(of, PHASES, lambda span: span.phase),
                "waiting": _sums(of, WAITS, lambda span: span.awaited),
            }
            for of in timeline.passes
        ],
        "spans": {
            "columns": SPANS,
            "rows": [
                [each.number, layer, phase, expert, awaited, at(began), at(ended)]
                for each in shown
                for layer, phase, expert, awaited, began, ended in each.of.spans
            ],
        },
        "reads": {
            "columns": READS,
            "rows": [
                [each.number, *read[:6], at(read.queued), at(read.started), at(read.landed), read.fault]
                for each in shown
                for read in each.reads
            ],
        },
    }


def _sums(of: Pass, names: Sequence[str], key: Callable[[Span], str]) -> dict[str, float]:
    sums = dict.fromkeys(names, 0.0)
    for span in of.spans:
        if (name := key(span)) in sums:
            sums[name] += span.seconds
    return {name: round(seconds, 7) for name, seconds in sums.items()}


def waiting(span: Span) -> bool:
    """Whether nothing was computed in it."""
    return span.phase == WAITING
