"""What a probe found out about drives, kept for later runs in `home()/drives.json`.

A drive is known by what it says of itself: model, serial number and the UUID of its file system, all that can be
read, and by how its bytes come (`direct`, `nocache`, `buffered`); never by its name or mount path. One that says
nothing of itself is not remembered, nor is a simulated one.

What is remembered is where learning starts, not what is believed: a drive that has changed since is known better
after a few reads (`rates.py`). A file that cannot be read as what it should be is not used, and a note says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.config import no_file
from runtime.drives.identity import UNKNOWN, Identity, same_device
from runtime.drives.probe import Findings
from runtime.home import home, write_whole

SCHEMA = "expertstream.drives/1"
MOST_DEPTH = 256
LONGEST_LATENCY_S = 10.0
RATES = (1e4, 1e13)
"""Bytes/s; what lies outside was not measured on a drive."""


@dataclass(frozen=True, slots=True)
class Known:
    """One drive: bytes/s, the depth for runs, the shortest read of a block; when, as ISO 8601 in UTC."""

    bytes_per_s: float
    depth: int
    latency_s: float
    at: str

    def __post_init__(self) -> None:
        if not RATES[0] <= self.bytes_per_s <= RATES[1] or not 0 <= self.latency_s <= LONGEST_LATENCY_S:
            raise ValueError(f"{self.bytes_per_s} bytes/s after {self.latency_s} s")
        if type(self.depth) is not int or not 1 <= self.depth <= MOST_DEPTH:
            raise ValueError(f"a depth of {self.depth!r}")
        datetime.fromisoformat(self.at)


def key_of(identity: Identity, mode: str) -> str | None:
    """What a drive is known by; None when it says nothing of itself."""
    if identity.serial == identity.uuid == UNKNOWN:
        return None
    return " / ".join((identity.model, identity.serial, identity.uuid, mode.partition(":")[0]))


@dataclass
class Remembered:
    """The file's contents. drives: by key; uplinks: bytes/s that a set of keys reaches together, sharing something."""

    drives: dict[str, Known] = field(default_factory=dict)
    uplinks: dict[frozenset[str], float] = field(default_factory=dict)
    note: str = ""

    @staticmethod
    def path() -> Path:
        """Where it is kept."""
        return home() / "drives.json"

    @classmethod
    def load(cls) -> Remembered:
        """What is known; nothing, with a `note`, where the file is damaged. Never raises."""
        path = cls.path()
        try:
            if other := no_file(path):
                return cls(note=f"{path} cannot be read, drives are learned anew: it is {other}")
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except OSError as error:
            return cls(note=f"{path} cannot be read, drives are learned anew: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            return cls(note=f"{path} is damaged, drives are learned anew: it is not JSON: {error}")
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is {data['schema']!r}, not {SCHEMA!r}")
            drives = {str(key): Known(**known) for key, known in data["drives"].items()}
            return cls(drives, {frozenset(u["drives"]): _rate(u["bytes_per_s"]) for u in data["uplinks"]})
        except (AttributeError, KeyError, TypeError):
            return cls(note=f"{path} is damaged, drives are learned anew: it has not the keys and values of {SCHEMA}")
        except ValueError as error:
            return cls(note=f"{path} is damaged, drives are learned anew: {error}")

    def learn(self, findings: Findings, identities: Mapping[str, Identity], at: datetime | None = None) -> list[str]:
        """Take over what was found of these drives; returns the names of those that are remembered now.

        What older probes found of drives that were measured together now is forgotten.
        """
        moment = (at or datetime.now(UTC)).isoformat(timespec="seconds")
        keys = {name: key_of(identity, findings.modes[name]) for name, identity in identities.items()}
        learned = []
        for name, key in keys.items():
            best, depth = findings.best(name), findings.run_depth(name)
            if key is not None and depth is not None and best is not None and best.rate is not None:
                latency = min(findings.latency_s[name], LONGEST_LATENCY_S)
                self.drives[key] = Known(best.rate, depth, latency, moment)
                learned.append(name)
        for together in findings.together:
            measured = {keys.get(name) for name in together.drives}
            self.uplinks = {group: rate for group, rate in self.uplinks.items() if not group <= measured}
        for together in findings.uplinks():
            group = {key for name in together.drives if (key := keys.get(name)) is not None}
            if len(group) == len(together.drives):
                self.uplinks[frozenset(group)] = together.rate
        return learned

    def save(self) -> None:
        """Write the file, whole. Raises OSError."""
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "drives": {key: asdict(known) for key, known in sorted(self.drives.items())},
            "uplinks": [{"drives": sorted(group), "bytes_per_s": rate} for group, rate in self.uplinks.items()],
        }
        write_whole(self.path(), (json.dumps(record, indent=1) + "\n").encode())


@dataclass(frozen=True, slots=True)
class Recalled:
    """What is known of some drives, by the names they have now.

    groups: drives that hold each other up, and the bytes/s they give together where that is known.
    """

    known: dict[str, Known]
    groups: dict[str, tuple[tuple[str, ...], float | None]]
    notes: list[str]

    def group_of(self, name: str) -> str | None:
        """The group the drive is in."""
        return next((group for group, (names, _) in self.groups.items() if name in names), None)


def recall(identities: Mapping[str, Identity], modes: Mapping[str, str]) -> Recalled:
    """Look up drives, by name what each is and how its bytes come. Never raises."""
    remembered = Remembered.load()
    notes = [remembered.note] if remembered.note else []
    one_device = same_device(identities)
    notes += [f"drives {' and '.join(g)} are one device, and give no more than one" for g in one_device]
    keys = {name: key for name, identity in identities.items() if (key := key_of(identity, modes[name]))}
    known = {name: remembered.drives[key] for name, key in keys.items() if key in remembered.drives}
    return Recalled(known, _groups(one_device, keys, known, remembered.uplinks), notes)


def _groups(
    one_device: Sequence[tuple[str, ...]],
    keys: Mapping[str, str],
    known: Mapping[str, Known],
    uplinks: Mapping[frozenset[str], float],
) -> dict[str, tuple[tuple[str, ...], float | None]]:
    """Names that hold each other up, and what they give together, where that is known: by a name for the uplink."""
    found: list[tuple[tuple[str, ...], float | None]] = []
    for names in one_device:
        rates = [known[name].bytes_per_s for name in names if name in known]
        found.append((names, max(rates, default=None)))
    taken = {name for names, _ in found for name in names}
    for shared, rate in uplinks.items():
        names = tuple(name for name, key in keys.items() if key in shared and name not in taken)
        if len(names) > 1:
            found.append((names, rate if len(names) == len(shared) else None))
            taken.update(names)
    return {f"uplink {number}": group for number, group in enumerate(found, 1)}


def _rate(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(rate := float(value)) or not RATES[0] <= rate <= RATES[1]:  # type: ignore[arg-type]
        raise ValueError(f"{value!r} bytes/s")
    return rate
