"""What ideas are tried on: Kimi K3's experts on the four drives of a published machine, under the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from unittest import mock

import numpy as np

from runtime.checkpoint.inventory import expert_inventory
from runtime.config import ModelConfig
from runtime.drives.virtual import World
from runtime.errors import UsageError
from runtime.forecast import Drawn, Rung, Supply, Uplinks, Usage, draw, ladder, load_routes, parse_figured
from runtime.forecast.routes import Routes
from runtime.setup.shapes import shape_config

CONFIG = ModelConfig.from_dict(shape_config("k3"))
LAYERS, EXPERTS, TOP_K = CONFIG.moe_layers, CONFIG.num_experts, CONFIG.num_experts_per_token
EXPERT_BYTES = sum(spec.nbytes for spec in expert_inventory(CONFIG).values())
MACHINE = (
    "internal=13.6GB/s,latency=0.13ms,share=0.93",
    "white=7.1GB/s,latency=0.13ms,share=0.889",
    "green=7.1GB/s,latency=0.13ms",
    "yellow=5.7GB/s,latency=0.22ms,share=0.665",
)
"""Rates, and the part of all reads that each could serve, as they were published; green holds everything."""
REST_S = 0.30 / len(LAYERS)
"""After each layer's reads: 0.30 s a token beside the reads fits the published runs."""
PROMPT = 512
"""Positions that are drawn."""
TOKENS = 1
"""Positions that are read under the virtual clock."""


@dataclass(frozen=True)
class Outcome:
    """The same work done as the project does it, and with the idea. What is counted is better the less it is."""

    counted: str
    kept: float
    rejected: float

    @property
    def ratio(self) -> float:
        """How many times as much the idea costs."""
        return self.rejected / self.kept


@dataclass(frozen=True, eq=False)
class Trial:
    """recorded: a file of routes, None for drawn ones. work: where files are made, None for the system's place."""

    recorded: Path | None = None
    work: Path | None = None

    @cached_property
    def routes(self) -> Routes:
        """[positions, MoE layers, k]. Raises UsageError for a file that does not hold such."""
        if self.recorded is not None:
            routes = load_routes(self.recorded, len(LAYERS), EXPERTS, TOP_K)
            if len(routes) <= TOKENS:
                raise UsageError(f"--routes: {self.recorded} has {len(routes)} positions; wanted {TOKENS + 1} at least")
            return routes
        tokens = Usage(len(LAYERS), EXPERTS, TOP_K).tokens(stream=0)
        return np.stack([next(tokens) for _ in range(PROMPT)])


@cache
def machine() -> Rung:
    """The four drives, their copies drawn."""
    drives = dict(parse_figured(text, Uplinks(), "MACHINE") for text in MACHINE)
    copies = draw({f.name: holding for f, holding in drives.items()}, [], np.zeros((len(LAYERS), EXPERTS)), seed=0)
    return Rung(tuple(Supply(f, Drawn(f.name, copies[f.name], EXPERT_BYTES)) for f in drives), {})


@cache
def token_s(trial: Trial, world: type[World] = World) -> float:
    """Virtual seconds a token's reads take, layer by layer, in a world of this kind."""
    with mock.patch.object(ladder, "World", world):
        reading = ladder.Reading(machine(), LAYERS)
    seconds, tokens = 0.0, trial.routes[:TOKENS].tolist()
    for token in tokens:
        for row, experts in enumerate(token):
            seconds += reading.barrier(row, experts)[0]
            reading.rest(REST_S)
    return seconds / len(tokens)
