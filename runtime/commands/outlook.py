"""What a forecast says: two tables and what they assume, or one record (docs/forecast.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import runtime
from runtime.commands.tables import table
from runtime.errors import UsageError
from runtime.forecast import Figures, Holding, Reads, RungForecast, Window, served
from runtime.forecast.routes import CARRIED, FIRST_SIGMA, SIGMA
from runtime.units import per_second, size
from runtime.weights.placement import Holder

SCHEMA = "expertstream.forecast/1"

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What is simulated. fixed_s: seconds a token beside the reads; routes: a file, or None for drawn ones."""

    routes: Path | None
    tokens: int
    fixed_s: float
    prompt: int
    prefill_chunk: int
    seed: int

    def check(self) -> None:
        """Raise UsageError for numbers that make no forecast."""
        for option, value, least, most in (
            ("--tokens", self.tokens, 1, 1000),
            ("--prompt", self.prompt, 0, 1 << 20),
            ("--prefill-chunk", self.prefill_chunk, 1, 4096),
            ("--fixed-s", self.fixed_s, 0, 3600),
            ("--seed", self.seed, 0, 1 << 63),
        ):
            if not least <= value <= most:
                raise UsageError(f"{option} {value}: a number from {least} to {most:,} was expected")


@dataclass(frozen=True)
class Facts:
    """What a forecast needs of a model. layers: the numbers of its MoE layers; k of `experts` are routed."""

    name: str
    layers: tuple[int, ...]
    experts: int
    k: int
    expert_nbytes: int
    trunk_nbytes: int


@dataclass(frozen=True)
class Fleet:
    """The drives, in order. found: the copies of those that are directories; holdings: of those that are drawn.

    probed: when a probe found what a drive can do, where that is what is known of it.
    """

    figures: dict[str, Figures]
    holdings: dict[str, Holding]
    found: dict[str, Holder]
    uplinks: dict[str, float]
    probed: dict[str, str]
    notes: list[str]

    def holds(self, name: str) -> str:
        """What the drive has, for people."""
        if name in self.holdings:
            return str(self.holdings[name])
        here = self.found[name].here
        return f"{np.count_nonzero(here):,} of {here.size:,} experts"


@dataclass(frozen=True)
class Outlook:
    """All there is to print. slots: of the cache; positions: recorded ones, None when drawn; passes: of the prompt."""

    settings: Settings
    facts: Facts
    fleet: Fleet
    slots: int
    window: Window
    positions: int | None
    passes: Sequence[tuple[int, Reads]]
    forecasts: Sequence[RungForecast]

    @property
    def distinct(self) -> float:
        """Mean experts a layer and pass of the prompt reads."""
        reads = sum(times * sum(map(len, layers)) for times, layers in self.passes)
        return reads / (sum(times for times, _ in self.passes) * len(self.facts.layers))

    def first_token(self, one: RungForecast) -> Record | None:
        """Seconds of each part: the trunk from the rung's first drive, the prompt's reads, a fixed time a pass."""
        if one.prefill is None:
            return None
        parts = {
            "load_s": self.facts.trunk_nbytes / one.rung.drives[0].figures.rate,
            "reads_s": one.prefill.reads_s,
            "fixed_s": sum(times for times, _ in self.passes) * self.settings.fixed_s,
        }
        return {"total_s": sum(parts.values()), **parts}

    def seconds(self, one: RungForecast) -> Record | None:
        """Of a token, on the average; `at_best` is the reads' fluid bound."""
        if one.decode is None:
            return None
        token_s, fixed_s = one.decode.token_s, self.settings.fixed_s
        at_best = one.decode.bound_s / len(token_s)
        total = one.decode.reads_s + fixed_s
        return {
            "total": total,
            "lowest": min(token_s) + fixed_s,
            "highest": max(token_s) + fixed_s,
            "reads": one.decode.reads_s,
            "at_best": at_best,
            "fixed": fixed_s,
            "tokens_per_s": 1 / total if total else None,
            "reads_over_at_best": one.decode.reads_s / at_best if at_best else None,
        }

    def assumptions(self) -> list[str]:
        """Sentences without which the numbers mean nothing."""
        s, f, w = self.settings, self.facts, self.window
        said = []
        if self.positions is None:
            said.append(
                f"routes are drawn: lognormal weights, σ {SIGMA}, in the first MoE layer {FIRST_SIGMA}; "
                f"{CARRIED:.0%} of a token's experts from the one before; seed {s.seed}"
            )
        else:
            said.append(f"routes are the last {len(w.reads)} of {self.positions} positions of {s.routes}")
        said.append(f"{len(w.reads)} tokens are simulated, each the same on every rung; the range is over tokens")
        if self.slots:
            full = "" if w.full else ", which did not fill it: more tokens would find more"
            said.append(
                f"a cache of {self.slots:,} experts, kept as runs keep them that have learned nothing, has "
                f"{w.hit_rate:.1%} of what is wanted, after {w.warm} tokens{full}"
            )
        else:
            said.append("no expert is kept between tokens")
        if s.fixed_s:
            said.append(
                f"{s.fixed_s:g} s a token, and a pass of the prompt, beside the reads; no part of them overlaps"
            )
        else:
            said.append(
                "reads alone: the arithmetic counts as nothing (--fixed-s; 0.30 fits published runs on an M5 Max)"
            )
        if any(h.most_used for h in self.fleet.holdings.values()):
            said.append(
                "the most used experts are those of these very routes, which flatters the drives that hold them"
            )
        said.append("the scheduler knows the rates; drives keep them, and share them evenly among reads in flight")
        said.append("prefetch is not modelled")
        if self.passes:
            said.append(
                f"first token: {size(f.trunk_nbytes)} of trunk from the rung's first drive; {s.prompt:,} tokens in "
                f"passes of at most {s.prefill_chunk:,}, each distinct expert of a layer read once a pass, "
                f"{self.distinct:.0f} of {f.experts}; arithmetic beyond a token's is not counted"
            )
        return said


def _names(one: RungForecast) -> str:
    return " + ".join(one.rung.names)


def text(outlook: Outlook) -> str:
    """The forecast for people."""
    facts, fleet = outlook.facts, outlook.fleet
    lines = [
        f"model    {facts.name}: {len(facts.layers)} MoE layers, {facts.k} of {facts.experts} experts a token, "
        f"{size(facts.expert_nbytes)} each; {size(len(facts.layers) * facts.k * facts.expert_nbytes)} a token"
    ]
    for number, (name, d) in enumerate(fleet.figures.items()):
        group = f", in group {d.group} of {per_second(fleet.uplinks[d.group])}" if d.group else ""
        probed = f" by probe of {fleet.probed[name][:10]}" if name in fleet.probed else ""
        latency = f", latency {d.latency_s * 1e3:g} ms" if d.latency_s else ""
        lines.append(
            f"{'' if number else 'drives':8} {name}: {per_second(d.rate)}{probed}{latency}, depth {d.depth}{group}, "
            f"holds {fleet.holds(name)}"
        )
    done = [one for one in outlook.forecasts if one.decode]
    tables = [
        table(
            ["drives", "GB/s", "at best, s", "reads, s", "×", "s/token", "range", "tokens/s", "of last"],
            [_row(outlook, one) for one in outlook.forecasts],
        ),
        table(("drives", "bytes from", "layers that waited for"), [_shares(one) for one in done], "left"),
    ]
    if outlook.passes:
        tables.append(
            table(
                ("drives", "load, s", "prompt's reads, s", "fixed, s", "first token, s"),
                [_first_row(outlook, one) for one in done],
            )
        )
    homeless = [
        f"{_names(one)}: no forecast, {one.homeless:,} experts have no holder"
        for one in outlook.forecasts
        if one.homeless
    ]
    tables[0] = "\n".join([tables[0], *homeless])
    assumed = [f"{'' if n else 'assumed':8} {line}" for n, line in enumerate(outlook.assumptions())]
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n\n" + "\n".join(assumed) + "\n"


def _row(outlook: Outlook, one: RungForecast) -> tuple[str, ...]:
    name, rate, seconds = _names(one), f"{one.rung.rate / 1e9:.3g}", outlook.seconds(one)
    if seconds is None:
        return (name, rate, *["–"] * 7)
    final = outlook.seconds([other for other in outlook.forecasts if other.decode][-1])
    return (
        name,
        rate,
        f"{seconds['at_best']:.3f}",
        f"{seconds['reads']:.3f}",
        _figure(seconds["reads_over_at_best"]),
        f"{seconds['total']:.3f}",
        f"{seconds['lowest']:.3f}–{seconds['highest']:.3f}",
        _figure(seconds["tokens_per_s"]),
        f"{final['total'] / seconds['total']:.0%}" if final and seconds["total"] else "–",
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _first_row(outlook: Outlook, one: RungForecast) -> tuple[str, ...]:
    parts = outlook.first_token(one) or {}
    return (_names(one), *(f"{parts[key]:.1f}" for key in ("load_s", "reads_s", "fixed_s", "total_s")))


def _shares(one: RungForecast) -> tuple[str, ...]:
    """What part of the bytes each drive read, and of how many layers its read was the last."""
    assert one.decode is not None
    listed = []
    for counts in (one.decode.read_bytes, one.decode.landed_last):
        listed.append(", ".join(f"{name} {n / counts.total():.0%}" for name, n in counts.most_common()) or "–")
    return (_names(one), *listed)


def record(outlook: Outlook) -> Record:
    """The forecast as one object, schema `expertstream.forecast/1`."""
    s, f, fleet, window = outlook.settings, outlook.facts, outlook.fleet, outlook.window
    drawn = outlook.positions is None
    return {
        "schema": SCHEMA,
        "model": {
            "name": f.name,
            "moe_layers": len(f.layers),
            "experts": f.experts,
            "experts_per_token": f.k,
            "expert_bytes": f.expert_nbytes,
            "trunk_bytes": f.trunk_nbytes,
        },
        "drives": {
            name: {
                "rate_bytes_per_s": d.rate,
                "latency_s": d.latency_s,
                "depth": d.depth,
                "group": d.group,
                "holds": fleet.holds(name),
                "real": name in fleet.found,
                "probed": fleet.probed.get(name),
            }
            for name, d in fleet.figures.items()
        },
        "groups": fleet.uplinks,
        "routes": {
            "source": "drawn" if drawn else str(s.routes),
            "positions": outlook.positions,
            "seed": s.seed,
            "sigma": SIGMA if drawn else None,
            "first_sigma": FIRST_SIGMA if drawn else None,
            "carried": CARRIED if drawn else None,
            "tokens": len(window.reads),
            "warm_tokens": window.warm,
        },
        "cache": {"experts": outlook.slots, "hit_rate": window.hit_rate, "filled": window.full},
        "settings": {"fixed_s": s.fixed_s, "prompt": s.prompt, "prefill_chunk": s.prefill_chunk},
        "rungs": [_rung_record(outlook, one) for one in outlook.forecasts],
        "assumptions": outlook.assumptions(),
        "versions": {"expertstream": runtime.__version__, "numpy": np.__version__},
    }


def _rung_record(outlook: Outlook, one: RungForecast) -> Record:
    decode, prefill, reads = one.decode, one.prefill, outlook.window.reads
    shared: Record = {
        "drives": list(one.rung.names),
        "rate_bytes_per_s": one.rung.rate,
        "without_holder": one.homeless,
        "could_serve": {d.name: served(d.copies.here, reads) for d in one.rung.drives},
    }
    if decode is None:
        return shared | {"seconds_per_token": None, "barriers": None, "read_bytes": None, "first_token": None}
    first = outlook.first_token(one)
    if first is not None and prefill is not None:
        first |= {
            "reads_at_best_s": prefill.bound_s,
            "reads": prefill.reads,
            "simulated_reads": prefill.simulated,
            "passes": sum(times for times, _ in outlook.passes),
            "distinct_per_layer": outlook.distinct,
        }
    names = one.rung.names
    return shared | {
        "seconds_per_token": outlook.seconds(one),
        "barriers": {"count": decode.landed_last.total(), "landed_last": {n: decode.landed_last[n] for n in names}},
        "read_bytes": {name: decode.read_bytes[name] for name in names},
        "first_token": first,
    }
