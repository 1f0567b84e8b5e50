"""Barriers as a picture: a lane for each drive, a bar for each read, and the one that all waited for. Plain SVG."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

from runtime.commands.svg import COLOURS, ELSEWHERE, FAINT, INK, LAST, LEFT, RIGHT, WIDTH, packed, page, ticks
from runtime.drives.report import Analysis, Barrier
from runtime.units import size

BAR, PITCH, LANE, TITLE, AXIS = 8, 10, 8, 34, 26
"""Heights: of a bar, from bar to bar, between lanes, of a title, of an axis."""
BEFORE, AFTER = 0.04, 0.06
"""Time shown before a barrier begins and after it ends, in parts of it."""


def draw(analysis: Analysis, top: int) -> str:
    """The `top` barriers with the largest gaps, worst first, and then the one of median time, for comparison."""
    worst = analysis.worst(top)
    middle = sorted(analysis.waited, key=lambda b: b.seconds)[len(analysis.waited) // 2 : len(analysis.waited) // 2 + 1]
    panels = [("", b) for b in worst] + [("the median: ", b) for b in middle if len(analysis.waited) > len(worst)]
    body, y = [_legend(analysis)], 84.0
    for name, barrier in panels:
        panel = _Panel(analysis, barrier, y)
        body += panel.lines(name)
        y = panel.bottom
    if not panels:
        body.append(f'<text x="{LEFT}" y="{y}" class="f">no barrier had to wait</text>')
    return page(body, y + 12)


def _legend(analysis: Analysis) -> str:
    """What is to be seen, in two lines."""
    model = str((analysis.trace.about.get("model") or {}).get("fingerprint"))[:16]
    words = [
        f'<text x="{LEFT}" y="28" class="h">Barriers with the largest gaps</text>',
        f'<text x="{WIDTH - RIGHT}" y="28" class="f e">model {escape(model)}</text>',
    ]
    marks = [
        (f'fill="{COLOURS[0]}"', "a read"),
        (f'fill="{COLOURS[0]}" fill-opacity="0.45"', "begun as a guess"),
        (f'fill="{COLOURS[0]}" stroke="{INK}" stroke-width="1.4"', "again: failed or late"),
        (f'fill="{ELSEWHERE}"', "elsewhere, or unused"),
        (f'fill="{LAST}"', "the last"),
        (f'fill="{LAST}" fill-opacity="0.12"', "its gap"),
        (f'fill="none" stroke="{INK}" stroke-dasharray="2 3"', "shared by all drives"),
    ]
    x = float(LEFT)
    for style, text in marks:
        words.append(f'<rect x="{x:.0f}" y="46" width="16" height="{BAR}" rx="1.5" {style}/>')
        words.append(f'<text x="{x + 21:.0f}" y="54" class="f">{text}</text>')
        x += 36 + 6.4 * len(text)
    return "\n".join(words)


class _Panel:
    """One barrier."""

    def __init__(self, analysis: Analysis, barrier: Barrier, top: float) -> None:
        self.analysis, self.barrier, self.top = analysis, barrier, top
        s = analysis.slices
        self.begin = barrier.begin_s - BEFORE * barrier.seconds
        self.end = barrier.end_s + AFTER * barrier.seconds
        self.held = set(barrier.slices.tolist())
        seen = np.flatnonzero((s["landed"] > self.begin) & (s["started"] < self.end))
        self.lanes = [_rows(analysis, seen[analysis.drive_of[seen] == d]) for d in range(len(analysis.drives))]
        self.heights = [max(1, len(rows)) * PITCH + LANE for rows in self.lanes]
        self.foot = top + TITLE + sum(self.heights)

    @property
    def bottom(self) -> float:
        return self.foot + AXIS + 14

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.begin), self.end)
        return LEFT + (WIDTH - LEFT - RIGHT) * (inside - self.begin) / (self.end - self.begin)

    def lines(self, name: str) -> Iterator[str]:
        b = self.barrier
        gap = "one drive read all" if b.gap_s != b.gap_s else f"gap {b.gap_s * 1e3:,.2f} ms"
        yield f'<text x="{LEFT}" y="{self.top + 14}" class="t">{name}layer {b.layer}, token {b.token}</text>'
        facts = f"{b.jobs} experts, {size(b.bytes)}, {b.seconds * 1e3:,.2f} ms, {gap}"
        yield f'<text x="{WIDTH - RIGHT}" y="{self.top + 14}" class="f e">{facts}</text>'
        yield from self._grid()
        y = self.top + TITLE
        for drive, rows in enumerate(self.lanes):
            middle = y + (self.heights[drive] - LANE) / 2 + 4
            yield f'<text x="{LEFT - 12}" y="{middle:.1f}" class="e">{escape(self.analysis.drives[drive])}</text>'
            for number, row in enumerate(rows):
                for n in row:
                    yield self._bar(n, drive, y + number * PITCH)
            y += self.heights[drive]

    def _grid(self) -> Iterator[str]:
        """The gap behind the next drive, lines every so many ms, and when the drives could have been through."""
        b, top, height = self.barrier, self.top + TITLE - 6, self.foot - self.top - TITLE + 6
        if b.gap_s == b.gap_s and b.gap_s > 0:
            x = self.x(b.end_s - b.gap_s)
            where = f'x="{x:.1f}" y="{top}" width="{self.x(b.end_s) - x:.1f}" height="{height}"'
            yield f'<rect {where} fill="{LAST}" fill-opacity="0.12"/>'
        for tick in ticks(*((moment - b.begin_s) * 1e3 for moment in (self.begin, self.end))):
            x = self.x(b.begin_s + tick / 1e3)
            colour = FAINT if not tick else ELSEWHERE
            yield f'<path d="M{x:.1f} {top}v{height}" stroke="{colour}" stroke-width="0.8"/>'
            label = f"{tick:g}" if tick else "0 ms"
            yield f'<text x="{x:.1f}" y="{self.foot + 14}" class="f m">{label}</text>'
        if b.fluid_s > 0 and b.begin_s + b.fluid_s < self.end:
            x = self.x(b.begin_s + b.fluid_s)
            yield f'<path d="M{x:.1f} {top}v{height}" stroke="{INK}" stroke-dasharray="2 3">'
            yield "<title>when all drives, sharing the work, would have been through</title></path>"

    def _bar(self, n: int, drive: int, y: float) -> str:
        a, b = self.analysis, self.barrier
        s, kind = a.slices[n], str(a.kind[n])
        if n not in self.held:
            style = f'fill="{ELSEWHERE}"'
        elif n == int(b.slices[-1]):
            style = f'fill="{LAST}"'
        else:
            style = f'fill="{COLOURS[drive % len(COLOURS)]}"' + ' fill-opacity="0.45"' * (kind == "prefetch")
        if kind in ("retry", "hedge"):
            style += f' stroke="{INK}" stroke-width="1.4"'
        x, end = self.x(float(s["started"])), self.x(float(s["landed"]))
        told = (
            f"layer {s['layer']} expert {s['expert']}, {size(int(s['length']))} from {a.drives[drive]}, {kind}: "
            f"waited {a.queue[n] * 1e3:.2f} ms, read in {a.service[n] * 1e3:.2f} ms"
        )
        mark = ""
        if n == int(b.slices[-1]):
            mark = f'<path d="M{end + 2:.1f} {y + BAR / 2}l7 -4v8z" fill="{LAST}"/>'
        where = f'x="{x:.1f}" y="{y:.1f}" width="{max(1.0, end - x - 0.6):.1f}" height="{BAR}" rx="1.5"'
        return f"<rect {where} {style}><title>{escape(told)}</title></rect>{mark}"


def _rows(analysis: Analysis, numbers: npt.NDArray[np.int64]) -> list[list[int]]:
    """The reads of a drive in as few rows as they need, none over another."""
    s = analysis.slices
    numbers = numbers[np.argsort(s["started"][numbers], kind="stable")]
    places = packed(s[["started", "landed"]][numbers].tolist())
    return [[n for n, place in zip(numbers.tolist(), places, strict=True) if place == row] for row in sorted({*places})]
