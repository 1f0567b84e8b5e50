"""Charts of results, as SVG and PNG. Without matplotlib (extra `bench`) there are none, and a line says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.home import whole
from runtime.units import per_second

Record = dict[str, Any]

INK, QUIET, BAR, POINT, BOUND = "#1f2933", "#7b8794", "#3b7dd8", "#12355b", "#d9822b"


def ladder(record: Record, path: Path) -> str:
    """Tokens a second by rung: the median as a bar, every arm as a point, fluid bound and forecast as marks."""
    rungs = record["rungs"]
    figure, axes = _canvas(1.7 * len(rungs) + 2.6)
    if figure is None:
        return ", no chart: matplotlib is not there"
    top = 0.0
    for x, rung in enumerate(rungs):
        steady = rung["steady_tokens_per_s"]
        arms = _values(record, rung["rung"], "steady_tokens_per_s")
        bound = rung["tokens"] / rung["bound_s"] if steady else None
        forecast = rung["forecast_tokens_per_s"]
        top = max(top, forecast, bound or 0, *arms)
        if steady:
            axes.bar(x, steady["median"], 0.52, color=BAR, zorder=2, label="median of arms" if not x else None)
            axes.hlines(
                bound, x - 0.36, x + 0.36, color=BOUND, lw=2.2, zorder=4, label="fluid bound" if not x else None
            )
            axes.text(
                x,
                steady["median"] / 2,
                f"{rung['of_last']:.0%}",
                color="white",
                ha="center",
                va="center",
                size=13,
                weight="bold",
                zorder=5,
            )
            axes.text(
                x,
                steady["median"] * 0.06,
                f"{rung['of_bound']:.0%} of bound",
                color="white",
                ha="center",
                va="bottom",
                size=8,
                zorder=5,
            )
        axes.scatter([x + 0.31] * len(arms), arms, s=16, color=POINT, zorder=5, label="each arm" if not x else None)
        axes.scatter(
            x - 0.31,
            forecast,
            s=34,
            marker="D",
            facecolor="white",
            edgecolor=INK,
            lw=1.3,
            zorder=6,
            label="forecast, made before" if not x else None,
        )
    names = []
    for rung in rungs:
        *others, last = rung["drives"]
        what = f"{last}  {per_second(record['drives'][last]['rate_bytes_per_s'])}"
        names.append(f"{_count(len(rung['drives']))}\n+ {what}" if others else f"one drive\n{what}")
    axes.set_xticks(range(len(rungs)), names)
    axes.set_ylim(0, top * 1.12)
    axes.set_ylabel("tokens/s, steady")
    _titles(axes, "The drive ladder", [record["kind"], _made_by(record), "large figures: part of the last rung's rate"])
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)
    return _save(figure, path)


def bars(record: Record, path: Path, names: Sequence[str], key: str, unit: str, title: str) -> str:
    """A figure by arm: the median as a bar, every arm as a point."""
    figure, axes = _canvas(1.5 * len(names) + 2.6)
    if figure is None:
        return ", no chart: matplotlib is not there"
    top = 0.0
    for x, name in enumerate(names):
        values = sorted(_values(record, name, key))
        if not values:
            continue
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        top = max(top, *values)
        axes.bar(x, middle, 0.52, color=BAR, zorder=2)
        axes.scatter([x + 0.31] * len(values), values, s=16, color=POINT, zorder=5)
        axes.text(
            x, middle / 2, f"{middle:.3g}", color="white", ha="center", va="center", size=12, weight="bold", zorder=5
        )
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, (top or 1) * 1.12)
    axes.set_ylabel(unit)
    _titles(axes, title, [record["kind"], _made_by(record)])
    return _save(figure, path)


def _canvas(width: float) -> tuple[Any, Any]:
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return None, None
    mpl.rcParams["svg.hashsalt"] = "expertstream"
    figure, axes = plt.subplots(figsize=(max(6.4, width), 4.8), layout="constrained")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.tick_params(length=0, colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e4e7eb", zorder=0)
    axes.yaxis.label.set(color=QUIET, size=9)
    return figure, axes


def _titles(axes: Any, title: str, lines: Sequence[str]) -> None:
    axes.set_title(title, loc="left", size=13, weight="bold", color=INK, pad=14 + 12 * len(lines))
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        xytext=(0, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        va="bottom",
        size=8.5,
        color=QUIET,
    )


def _save(figure: Any, path: Path) -> str:
    from matplotlib import pyplot as plt

    with whole(path.with_suffix(".svg")) as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
    with whole(path.with_suffix(".png")) as file:
        figure.savefig(file, format="png", dpi=160)
    plt.close(figure)
    return ", .svg, .png"


def _values(record: Record, name: str, key: str) -> list[float]:
    arms = [arm for arm in record["arms"] if arm["arm"] == name and not arm["void"]]
    return [arm["figures"][key] for arm in arms if arm["figures"].get(key) is not None]


def _made_by(record: Record) -> str:
    processor, n = record["machine"]["processor"], record["machine"]["processors"]
    smoke = "SMOKE, means nothing · " if record["smoke"] else ""
    commit = (record["source"]["commit"] or "unknown")[:9]
    return f"{smoke}{processor}, {n} processors · {record['started'][:10]} · commit {commit}"


def _count(n: int) -> str:
    return ("no", "one", "two", "three", "four", "five", "six")[n] + " drives" if n < 7 else f"{n} drives"
