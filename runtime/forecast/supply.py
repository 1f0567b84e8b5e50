"""The drives of a forecast: what each can do, and of which experts it has a copy.

A real drive's copies are those that were found on it. Those of a drive that exists as numbers are drawn: for a share,
each expert is there or not by chance, independently of the others and of other drives, and the same share of the
same drive is always the same copies; for a count, the most used experts are there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.inventory import expert_file
from runtime.checkpoint.manifest import Table
from runtime.drives.figures import is_name, parse_figures
from runtime.drives.jobs import DEPTH, Span
from runtime.errors import UsageError
from runtime.units import parse_latency, parse_rate

DEPTHS = (1, 64)
ABILITIES = ("latency", "depth", "group")
HOLDINGS = ("share", "holds")
FORM = "NAME=7.1GB/s[,latency=0.2ms][,depth=4][,group=hub:7.1GB/s][,share=0.9|rest][,holds=50000]"
RUNG_FORM = "NAME,NAME:SHARE,…"

Share = float | Literal["rest"]


class Held(Protocol):
    """The experts a drive holds. `here`: which."""

    here: Table

    def span(self, layer: int, expert: int) -> Span:
        """Where the copy of an expert that is here lies; `layer` is the model's number of it."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """What a drive can do: bytes/s, seconds to the first byte, reads in flight, and the uplink it shares."""

    name: str
    rate: float
    latency_s: float = 0.0
    depth: int = DEPTH
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Which experts a drawn drive has: those of a share of the reads, what no other drive has, or the most used."""

    share: Share = 1.0
    most_used: int | None = None

    def __str__(self) -> str:
        if self.most_used is not None:
            return f"the {self.most_used:,} most used"
        if self.share == "rest":
            return "what no other has"
        return f"{self.share:.1%} by chance" if self.share < 1 else "all"


@dataclass(frozen=True, slots=True)
class Supply:
    """A drive of a rung."""

    figures: Figures
    copies: Held

    @property
    def name(self) -> str:
        return self.figures.name


class Drawn:
    """Copies that exist as a table. All begin at the same phase, as files of their own do."""

    def __init__(self, name: str, here: Table, nbytes: int) -> None:
        self.name, self.here, self._nbytes = name, here, nbytes

    def span(self, layer: int, expert: int) -> Span:
        return Span(self.name, expert_file(layer, expert), 0, self._nbytes)


class Uplinks:
    """What groups of drives can move together, bytes/s, as the drives' texts give it."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}
        self._named: dict[str, str] = {}

    def name(self, text: str, drive: str) -> str:
        """Take `hub:7.1GB/s`, or `hub` where another drive gives the rate; the group's name. Raises UsageError."""
        group, colon, rate_text = (part.strip() for part in text.partition(":"))
        if not is_name(group) or (colon and not rate_text):
            raise UsageError(f"group {text[:40]!r} is not understood")
        self._named.setdefault(group, drive)
        if rate_text:
            rate = parse_rate(rate_text)
            if self.rates.setdefault(group, rate) != rate:
                raise UsageError(f"group {group!r} has two rates")
        return group

    def check(self) -> None:
        """Raise UsageError for a group that nobody gave a rate."""
        for group, drive in self._named.items():
            if group not in self.rates:
                raise UsageError(f"drive {drive!r}: the group {group!r} has no rate; write group={group}:7.1GB/s once")


def parse_figured(text: str, uplinks: Uplinks, option: str, *, held: bool = True) -> tuple[Figures, Holding]:
    """A drive from `NAME=RATE,…`; with `held`, also what it holds. Raises UsageError."""
    name, _, rest = (part.strip() for part in text.partition("="))
    try:
        if not is_name(name):
            raise UsageError(f"{name[:40]!r} is no name of ASCII letters, digits, '.', '_' and '-'")
        rate, options = parse_figures(rest, ABILITIES + HOLDINGS * held)
        if len(options.keys() & set(HOLDINGS)) > 1:
            raise UsageError("share and holds both say what it holds")
        figures = Figures(
            name,
            rate,
            parse_latency(options.get("latency", "0s")),
            _integer(options.get("depth", str(DEPTH)), "depth", *DEPTHS),
            uplinks.name(options["group"], name) if "group" in options else None,
        )
        most_used = _integer(options["holds"], "holds", 1, 1 << 31) if "holds" in options else None
        return figures, Holding(parse_share(options.get("share", "1")), most_used)
    except UsageError as error:
        raise UsageError(f"{option} {text[:80]!r}: {error}; write {FORM}") from None


def _integer(text: str, what: str, least: int, most: int) -> int:
    if not text.isdecimal() or not text.isascii() or not least <= int(text[:12]) <= most:
        raise UsageError(f"{what} {text[:40]!r} is no integer from {least:,} to {most:,}")
    return int(text)


def parse_share(text: str) -> Share:
    """Above 0 and at most 1, or `rest`. Raises UsageError."""
    if text == "rest":
        return "rest"
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"share {text[:40]!r} is neither above 0 and at most 1, nor 'rest'")
    return share


def parse_rung(text: str, names: Iterable[str]) -> dict[str, Share | None]:
    """The drives of a rung, in order, with another share where one is given. Raises UsageError."""
    known, rung = list(names), dict[str, Share | None]()
    for part in text.split(","):
        name, colon, share = (piece.strip() for piece in part.partition(":"))
        if name not in known:
            raise UsageError(
                f"--rung {text[:80]!r}: {name!r} is not one of the drives {', '.join(known)}; write {RUNG_FORM}"
            )
        if name in rung:
            raise UsageError(f"--rung {text[:80]!r}: {name!r} is named twice")
        try:
            rung[name] = parse_share(share) if colon else None
        except UsageError as error:
            raise UsageError(f"--rung {text[:80]!r}: {error}; write {RUNG_FORM}") from None
    return rung


def draw(
    holdings: Mapping[str, Holding], found: Sequence[Table], usage: npt.NDArray[np.float64], seed: int
) -> dict[str, Table]:
    """The copies of the drawn drives of one rung, beside those `found` on real ones.

    usage [MoE layers, experts]: how much each expert is used, which ranks the experts of a drive that holds a number
    of them. Raises UsageError when two drives hold the rest, or one more experts than there are.
    """
    tables: dict[str, Table] = {}
    rest = [name for name, holding in holdings.items() if holding.share == "rest"]
    if len(rest) > 1:
        raise UsageError(f"drives {' and '.join(rest)} both hold the rest: only one can")
    for name, holding in holdings.items():
        if holding.most_used is not None:
            if holding.most_used > usage.size:
                raise UsageError(f"drive {name!r} holds {holding.most_used:,} experts, but there are {usage.size:,}")
            tables[name] = np.zeros(usage.shape, np.bool_)
            tables[name].flat[np.argsort(-usage, axis=None, kind="stable")[: holding.most_used]] = True
        elif holding.share != "rest":
            chance = np.random.default_rng([seed, 2, zlib.crc32(name.encode())]).random(usage.shape)
            tables[name] = chance < holding.share
    for name in rest:
        tables[name] = ~np.logical_or.reduce([*tables.values(), *found, np.zeros(usage.shape, np.bool_)])
    return tables


def with_share(holding: Holding, share: Share | None) -> Holding:
    """The holding, or where a rung says so another share."""
    return holding if share is None else replace(holding, share=share, most_used=None)
