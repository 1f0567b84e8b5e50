"""A timeline as a picture: a strip for each layer, what was computed above, what was read below, on one scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape

from runtime.commands.svg import COLOURS, ELSEWHERE, LAST, LEFT, RIGHT, WIDTH, packed, page, text, ticks
from runtime.commands.timeline import Shown, waiting
from runtime.config import ModelConfig
from runtime.drives.trace import Read
from runtime.drives.waits import DEMAND, LATE, TRUNK
from runtime.model import timeline as phases
from runtime.model.timeline import Span
from runtime.units import size

MOST = 12
"""Passes in one picture."""
COMPUTE, LANE, GAP, HEAD, FOOT = 13, 12, 7, 72, 40
"""Heights: of what is computed, of a drive's reads, between layers, above and below the layers of a pass."""
THIN = 0.35
"""Neighbours of one colour closer than so many pixels are drawn as one."""

BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN, YELLOW, GREY = COLOURS
FILLS = {
    phases.ATTENTION: BLUE,
    phases.ROUTING: PURPLE,
    phases.SHARED: GREEN,
    phases.LATENT: TEAL,
    phases.EXPERT: ORANGE,
    phases.DENSE: BROWN,
    phases.LOOK_AHEAD: YELLOW,
    phases.HEAD: "#2f4b6e",
    phases.STORE: GREY,
    phases.RESIDUAL: "#b9bec7",
    DEMAND: "#f3b6bc",
    LATE: "#f8dcae",
    TRUNK: "#dccbe3",
}
"""By phase, and of waiting by what for."""
OTHER_EXPERT = "#d98526"
WORDS = {
    phases.SHARED: "shared experts",
    phases.EXPERT: "experts",
    phases.LATENT: "latent projections",
    phases.DENSE: "dense MLP",
    DEMAND: "waiting for experts",
    LATE: "waiting for late guesses",
    TRUNK: "waiting for the trunk",
}
READS = {"demand": "#5c6672", "prefetch": "#a9c4e4", "trunk": "#c39bd3"}


def draw(shown: Sequence[Shown], config: ModelConfig, about: dict[str, Any]) -> str:
    """The passes, one below the other."""
    model = str((about.get("model") or {}).get("fingerprint"))[:16]
    body = [text(LEFT, 28, "What was computed, read and waited for", "h")]
    body += [text(WIDTH - RIGHT, 28, f"model {model}", "f e")]
    y = 58.0
    for each in shown:
        panel = _Panel(each, config, y)
        body += panel.lines()
        y = panel.bottom
    if not shown:
        body.append(text(LEFT, y, "no pass was complete", "f"))
    return page(body, y, ".s{font-size:10px}")


class _Panel:
    """A pass."""

    def __init__(self, shown: Shown, config: ModelConfig, top: float) -> None:
        self.shown, self.config, self.top = shown, config, top
        self.layers = [(layer, list(spans)) for layer, spans in groupby(shown.of.spans, key=lambda span: span.layer)]
        self.drives = list(dict.fromkeys(sorted(read.drive for read in shown.reads)))
        self.longest = max((spans[-1].ended - spans[0].began for _, spans in self.layers), default=1.0)
        self.pitch = COMPUTE + LANE * len(self.drives) + GAP
        self.first = top + HEAD + 18 * (len(self._legend()) > 1)
        self.foot = self.first + self.pitch * len(self.layers)

    @property
    def bottom(self) -> float:
        return self.foot + FOOT

    def lines(self) -> Iterator[str]:
        of = self.shown.of
        yield text(LEFT, self.top, self.shown.name, "t")
        waited = self.shown.share(waiting)
        yield text(WIDTH - RIGHT, self.top, f"{of.seconds * 1e3:,.1f} ms, waiting for reads {waited:.0%}", "f e")
        yield from self._shares()
        for row, line in enumerate(self._legend()):
            yield from self._marks(line, self.top + 44 + 18 * row)
        yield from self._grid()
        for number, (layer, spans) in enumerate(self.layers):
            yield from self._layer(layer, spans, self.first + number * self.pitch)

    def _sums(self) -> dict[str, float]:
        """Seconds by what FILLS names, in its order."""
        sums = dict.fromkeys(FILLS, 0.0)
        for span in self.shown.of.spans:
            sums[span.awaited or span.phase] += span.seconds
        return {name: seconds for name, seconds in sums.items() if seconds}

    def _shares(self) -> Iterator[str]:
        """The whole pass in one bar, sorted."""
        x, scale = float(LEFT), (WIDTH - LEFT - RIGHT) / (self.shown.of.seconds or 1.0)
        for name, seconds in self._sums().items():
            yield _rect(x, self.top + 10, seconds * scale, 12, FILLS[name])
            x += seconds * scale

    def _legend(self) -> list[list[tuple[str, str]]]:
        """(colour, words), a list for each line."""
        total = self.shown.of.seconds or 1.0
        marks = [(FILLS[n], f"{WORDS.get(n, n)} {seconds / total:.1%}") for n, seconds in self._sums().items()]
        marks += [(READS[kind], f"{kind} reads") for kind in READS if any(r.kind == kind for r in self.shown.reads)]
        lines: list[list[tuple[str, str]]] = [[]]
        x = 0.0
        for mark in marks:
            x += _advance(mark[1])
            if x > WIDTH - LEFT - RIGHT:
                lines.append([])
                x = _advance(mark[1])
            lines[-1].append(mark)
        return lines

    @staticmethod
    def _marks(line: Iterable[tuple[str, str]], y: float) -> Iterator[str]:
        x = float(LEFT)
        for fill, words in line:
            yield _rect(x, y - 8, 10, 9, fill)
            yield text(round(x + 14), y, words, "f")
            x += _advance(words)

    def _grid(self) -> Iterator[str]:
        top, height = self.first - 4, self.foot - self.first
        for tick in ticks(0.0, self.longest * 1e3):
            x = LEFT + (WIDTH - LEFT - RIGHT) * tick / 1e3 / self.longest
            yield f'<path d="M{x:.1f} {top:.0f}v{height:.0f}" stroke="{ELSEWHERE}" stroke-width="0.8"/>'
            yield text(round(x, 1), round(self.foot + 12), f"{tick:g}" if tick else "0 ms", "f m")

    def _layer(self, layer: int, spans: Sequence[Span], y: float) -> Iterator[str]:
        begin, end = spans[0].began, spans[-1].ended
        name = "head"
        if layer >= 0:
            name = f"{layer} {'KDA' if self.config.is_kda(layer) else 'MLA'}"
        yield text(LEFT - 12, y + 11, name, "e")
        bars = []
        for span in spans:
            fill = FILLS[span.awaited or span.phase]
            if span.phase == phases.EXPERT and span.expert % 2:
                fill = OTHER_EXPERT
            bars.append((span.began, span.ended, fill, _told(span)))
        yield from self._bars(bars, begin, y, COMPUTE)
        for number, drive in enumerate(self.drives):
            lane = y + COMPUTE + 1 + number * LANE
            if len(self.drives) > 1:
                yield text(LEFT - 12, lane + 9, drive, "f e s")
            reads = [r for r in self.shown.reads if r.drive == drive and r.landed > begin and r.started < end]
            places = packed([(r.started, r.landed) for r in reads])
            height = (LANE - 2) / (max(places, default=0) + 1)
            for place in sorted({*places}):
                row = [r for r, p in zip(reads, places, strict=True) if p == place]
                marks = [
                    (max(begin, r.started), min(end, r.landed), LAST if r.fault else READS[r.kind], _read(r))
                    for r in row
                ]
                yield from self._bars(marks, begin, lane + place * height, height - min(0.6, height / 4))

    def _bars(
        self, bars: Sequence[tuple[float, float, str, str]], begin: float, y: float, height: float
    ) -> Iterator[str]:
        """(began, ended, fill, words) of each, in order; those that nobody could tell apart are one."""
        scale = (WIDTH - LEFT - RIGHT) / self.longest
        held: tuple[float, float, str, str] | None = None
        for began, ended, fill, words in bars:
            x, until = LEFT + (began - begin) * scale, LEFT + (ended - begin) * scale
            if held is not None and held[2] == fill and until - held[0] < 2 * THIN and x - held[1] < THIN:
                held = (held[0], until, fill, "")
                continue
            if held is not None:
                yield _rect(held[0], y, held[1] - held[0], height, held[2], held[3])
            held = (x, until, fill, words)
        if held is not None:
            yield _rect(held[0], y, held[1] - held[0], height, held[2], held[3])


def _rect(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    """A bar; what it is, when there is enough of it to point at."""
    said = f"><title>{escape(words)}</title></rect>" if words and width >= 1 else "/>"
    where = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.2, width):.1f}" height="{height:.1f}"'
    return f'<rect {where} fill="{fill}"{said}'


def _told(span: Span) -> str:
    name = span.awaited or span.phase
    words = WORDS.get(name, name)
    if span.phase == phases.EXPERT:
        words = f"expert {span.expert}"
    elif span.awaited and span.expert >= 0:
        words += f", of which {span.expert} came first"
    return f"{words}: {span.seconds * 1e3:.2f} ms"


def _read(read: Read) -> str:
    what = read.what or f"layer {read.layer} expert {read.expert}"
    took = f"{(read.landed - read.started) * 1e3:.2f} ms"
    return f"{what}, {size(read.nbytes)} from {read.drive}, {read.kind}{f', {read.fault}' * bool(read.fault)}: {took}"


def _advance(words: str) -> float:
    """Room for a mark and its words in the legend."""
    return 30 + 6.3 * len(words)
