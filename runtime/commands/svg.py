"""What our pictures have in common: a page of plain SVG, its colours, ticks, and bars in as few rows as they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 1000, 96, 24
COLOURS = ("#4e79a7", "#f0a04b", "#59a14f", "#b07aa1", "#76b7b2", "#9c755f", "#edc948", "#8c8c8c")
LAST, INK, FAINT, ELSEWHERE = "#d62839", "#2b2d33", "#8a8f98", "#d9dce1"
STYLE = (
    f"text{{font:12px system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:{INK}}}"
    f".h{{font-size:16px;font-weight:600}}.t{{font-weight:600}}.f{{fill:{FAINT}}}.e{{text-anchor:end}}"
    ".m{text-anchor:middle}"
)


def page(body: Iterable[str], height: float, style: str = "") -> str:
    """The whole file."""
    frame = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame}><style>{STYLE}{style}</style>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def text(x: float, y: float, said: str, kind: str = "") -> str:
    """Some words; kind: classes of STYLE."""
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(said)}</text>'


def ticks(begin: float, end: float) -> Iterator[float]:
    """Round numbers from begin to end, some six to twelve."""
    step = _step(end - begin)
    for tick in range(ceil(begin / step), floor(end / step) + 1):
        yield tick * step


def packed(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each (begin, end), in their order, so that none lies over another."""
    free: list[float] = []
    rows = []
    for begin, end in spans:
        row = next((n for n, until in enumerate(free) if until <= begin), len(free))
        if row == len(free):
            free.append(end)
        free[row] = end
        rows.append(row)
    return rows


def _step(span: float) -> float:
    """A round number of which some six to twelve make the span."""
    power = 10 ** floor(log10(span / 6)) if span > 0 else 1.0
    return float(next(power * n for n in (1, 2, 5, 10) if span / (power * n) <= 12))
