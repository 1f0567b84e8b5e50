"""The memory plan: what the process may use, what each part takes, made and shown before anything is loaded.

Sizes are in bytes, and G in `--memory 24G` is 10⁹ bytes. The plan covers the whole process: `process` is the
interpreter with its libraries as found, plus a margin for what they allocate later.

What gets memory first saves most reads a byte. Without state and buffers nothing runs. A longer chunk saves whole
passes over the experts of a prompt; it may have a quarter of what is left. A byte of the trunk saves a byte of every
pass. A byte of the expert cache saves what its hit rate is; it has one layer's top-k before, or what was asked for.
The embedding, of which a pass reads a row a token, comes last.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import trunk_inventory
from runtime.config import ModelConfig
from runtime.errors import DoesNotFitError
from runtime.generate.limits import Limit, memory_limit
from runtime.model.state import state_nbytes
from runtime.ops import Workload, backend_type
from runtime.units import size
from runtime.weights.division import EMBEDDING, Divider, Division
from runtime.weights.experts import check_budget, staging_floor
from runtime.weights.trunk import Precision

MARGIN = 350_000_000
"""Bytes set aside beside what the process holds before loading: the compiler (260 MB, measured), libraries."""

LONGEST_CHUNK, SHORTEST_CHUNK = 8192, 64
"""Prompt tokens computed together when nothing is asked for: as many as a quarter of what is left has room for."""

STAGED_TOKENS = 2
"""Of a prompt, tokens whose experts may lie there, read and not yet computed with, where none is kept: about as many as
can be read while the shared experts of a chunk are computed."""

OPTIONAL = ("staging", "reading", "snapshots")
"""Parts that are not spoken of where there is nothing of them."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for. None: the default. Sizes in bytes, `context` and `chunk` in tokens.

    prompt: tokens of the longest prompt, None where that is not known.
    expert_cache: None lets it take what is left. snapshots: None is two conversations as long as the context, where
    that is at most a quarter of what is left. Without `reuse` the cache is one layer's top-k.
    """

    backend: str
    threads: int
    context: int
    prompt: int | None = None
    chunk: int | None = None
    memory: int | None = None
    expert_cache: int | None = None
    trunk: Precision = "bf16"
    reuse: bool = True
    snapshots: int | None = 0


@dataclass(frozen=True)
class Supply:
    """How things are read. unit_bytes: what one expert takes in the cache, when that is more than its own; reading:
    what reading needs besides. alignment and hedges of the drives' buffers; without drives nothing is streamed.
    converted: there is a converted trunk."""

    unit_bytes: int | None = None
    reading: int = 0
    drives: bool = False
    alignment: int = 1
    hedges: int = 0
    converted: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part, by name, which must stay within `limit`; `trunk` says what is resident, `chunk` how many
    prompt tokens are computed together, `advice` what would read less.

    process: as found, and what it will need beside all else. state: of one conversation. activations: what the layers
    hand on to each other; scratch: what the arithmetic needs beside them. staging: what the streamed part of the trunk
    passes through. reading: buffers of late reads, copies, checks of drives. snapshots: of earlier conversations.
    """

    limit: Limit
    parts: Mapping[str, int]
    trunk: Division
    chunk: int
    advice: str = ""

    def __getitem__(self, part: str) -> int:
        return self.parts[part]

    @property
    def total(self) -> int:
        """What the plan comes to."""
        return sum(self.parts.values())

    def as_dict(self) -> dict[str, int | str]:
        """For the run record."""
        found: dict[str, int | str] = {"limit": self.limit.nbytes, "source": self.limit.source}
        return {
            **found,
            "reserve": self.limit.reserve,
            **self.parts,
            "total": self.total,
            "trunk_read_per_token": self.trunk.read_bytes,
        }

    def __str__(self) -> str:
        return f"{size(self.total)} of {self.limit}: {said(self.parts)}"

    @property
    def streaming(self) -> str:
        """What streaming the trunk costs, for people; "" where no matrix is streamed."""
        trunk = self.trunk
        if not trunk.room_bytes:
            return ""
        resident = f"{size(trunk.resident_bytes)} of {size(trunk.whole_bytes)} resident"
        return f"{resident}, {size(trunk.read_bytes)} read per token{self.advice}"


def said(parts: Mapping[str, int]) -> str:
    """Parts for people."""
    named = {name.replace("_", " "): nbytes for name, nbytes in parts.items() if nbytes or name not in OPTIONAL}
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in named.items())


def element_size(backend: str) -> int:
    """Bytes of a number in states and activations."""
    return 8 if backend == "reference" else 4


def workload(config: ModelConfig, context: int, chunk: int) -> Workload:
    """The largest of what a pass of `chunk` tokens in a context gives to the backend."""
    shapes = {name: spec.shape for name, spec in trunk_inventory(config).items()}
    latent, inter = config.routed_expert_hidden_size, config.moe_intermediate_size
    kda = config.linear_attn_config
    return Workload(
        rows=chunk,
        widest=max(latent, inter, *(max(shape) for name, shape in shapes.items() if ".layers." in name)),
        sources=(config.num_hidden_layers // config.attn_res_block_size + 2) * config.hidden_size,
        matrix=max(math.prod(shape) for shape in shapes.values()),
        latent=latent,
        inter=inter,
        heads=config.num_attention_heads,
        context=context,
        recurrence=kda.num_heads * kda.head_dim**2,
    )


def make_plan(checkpoint: Checkpoint, wanted: Wanted, supply: Supply | None = None) -> MemoryPlan:
    """Divide the memory. Raises DoesNotFitError, with the floor, when it cannot be."""
    return _Planning(checkpoint, wanted, supply or Supply()).plan()


class _Planning:
    """One division of the memory: what is certain first, then what is left, by worth."""

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted, supply: Supply) -> None:
        self.config, self.wanted, self.supply = checkpoint.config, wanted, supply
        self.checkpoint, self.ops = checkpoint, backend_type(wanted.backend)
        self.element = element_size(wanted.backend)
        self.limit = memory_limit(wanted.memory)
        self.work = workload(self.config, wanted.context, 1)
        self.cache_floor = staging_floor(checkpoint, supply.unit_bytes)
        if wanted.expert_cache is not None:
            check_budget(wanted.expert_cache, checkpoint.config.num_experts_per_token, self.cache_floor)
        self.divider = self._divider(wanted.trunk, supply.converted)
        self.parts: dict[str, int] = {
            "process": psutil.Process().memory_info().rss + MARGIN,
            "trunk": 0,
            "staging": 0,
            # a pass writes the new state beside the old one
            "state": 2 * state_nbytes(self.config, wanted.context, self.element),
            "activations": 0,
            "scratch": 0,
            "expert_cache": 0,
            "reading": supply.reading,
            "snapshots": wanted.snapshots or 0,
        }

    def plan(self) -> MemoryPlan:
        wanted = self.wanted
        cache = self.cache_floor if wanted.expert_cache is None or not wanted.reuse else wanted.expert_cache
        least = self._least(self.divider)
        chunk = self._chunk(self._left - sum(_taken(least)) - cache)
        self.parts |= self._rows(chunk)
        if wanted.snapshots is None:  # where an answer began and where it ended, as long as the context
            both = self.parts["state"] + 2 * self.config.vocab_size * self.element
            self.parts["snapshots"] = max(0, min(both, (self._left - sum(_taken(least)) - cache) // 4))
        trunk = self.divider.divide(self._left - cache) if self.supply.drives else least
        self._take(trunk)
        if wanted.expert_cache is None or not wanted.reuse:
            cache = max(cache, min(self._useful_cache(chunk), self._left))
        self.parts["expert_cache"] = cache
        whole = self.divider.whole()
        if trunk.streamed == (EMBEDDING,) and sum(_taken(whole)) - sum(_taken(trunk)) <= self._left:
            trunk = whole
            self._take(trunk)
        plan = MemoryPlan(self.limit, dict(self.parts), trunk, chunk)
        if self._left < 0:
            self._refuse(plan)
        return replace(plan, advice=self._advice(plan))

    def _useful_cache(self, chunk: int) -> int:
        """Room for all experts; where none is kept, for those of some tokens, so that drives go on while others use
        the processors."""
        config = self.config
        count = len(config.moe_layers) * config.num_experts
        if not self.wanted.reuse:
            tokens = min(chunk, STAGED_TOKENS) if self.supply.drives else 1
            count = min(config.num_experts, tokens * config.num_experts_per_token)
        return count * (self.supply.unit_bytes or self.checkpoint.expert_nbytes)

    def _divider(self, precision: Precision, converted: bool = False) -> Divider:
        return Divider(self.checkpoint, self.ops, precision, self.supply.alignment, self.supply.hedges, converted)

    @property
    def _left(self) -> int:
        return self.limit.nbytes - sum(self.parts.values())

    def _least(self, divider: Divider) -> Division:
        """The least of a trunk that has to be in memory."""
        return divider.divide(0) if self.supply.drives else divider.whole()

    def _take(self, trunk: Division) -> None:
        self.parts["trunk"], self.parts["staging"] = _taken(trunk)

    def _rows(self, chunk: int) -> dict[str, int]:
        """What a pass of so many tokens takes."""
        config = self.config
        widths = (
            (config.num_hidden_layers // config.attn_res_block_size + 8) * config.hidden_size
            + 8 * config.kda_width
            + 2 * config.intermediate_size
            + (config.num_experts_per_token + 3) * config.routed_expert_hidden_size
        )
        work = replace(self.work, rows=chunk)
        return {
            "activations": chunk * widths * self.element + config.vocab_size * self.element,
            "scratch": self.ops.scratch_nbytes(work, self.wanted.threads),
        }

    def _chunk(self, room: int) -> int:
        """As asked for, or as many as a quarter of this room has space for."""
        if self.wanted.chunk is not None:
            return min(self.wanted.context, self.wanted.chunk)
        longest = min(self.wanted.context, self.wanted.prompt or LONGEST_CHUNK, LONGEST_CHUNK)
        fits = bisect_right(range(1, longest + 1), room // 4, key=lambda chunk: sum(self._rows(chunk).values()))
        return max(fits, min(SHORTEST_CHUNK, longest))

    def _floor(self, divider: Divider) -> int:
        """The least that all parts take together."""
        chunk = self._chunk(0)
        parts = {**self.parts, **self._rows(chunk), "snapshots": self.wanted.snapshots or 0}
        parts["trunk"], parts["staging"] = _taken(self._least(divider))
        return sum({**parts, "expert_cache": self.cache_floor}.values())

    def _refuse(self, plan: MemoryPlan) -> None:
        """Raise DoesNotFitError, with the floor."""
        least, smaller = self._floor(self.divider), self._floor(self._divider("int8"))
        advice = f". With --trunk int8, which is not weight-exact, it could run in {size(smaller)}"
        raise DoesNotFitError(
            f"this needs {size(plan.total)}, but {size(self.limit.nbytes)} is what it may have ({self.limit.source}): "
            f"{said(plan.parts)}. "
            f"The least it can run in is {size(least)}: give --memory at least that on a machine that has it, or a "
            f"smaller --context, --prefill-chunk or --expert-cache{advice if smaller < least else ''}"
        )

    def _advice(self, plan: MemoryPlan) -> str:
        """What `--trunk int8` would read less, where the trunk is streamed, and a converted one."""
        if not plan.trunk.room_bytes or self.supply.converted:
            return ""
        room = plan["trunk"] + plan["staging"]
        made, converted = (size(self._divider("int8", there).divide(room).read_bytes) for there in (False, True))
        if self.wanted.trunk == "int8":
            return f"; from a converted trunk (python -m runtime convert), {converted}"
        less = f", {converted} from a converted trunk" if converted != made else ""
        return f"; with --trunk int8, which is not weight-exact, {made}{less}"


def _taken(trunk: Division) -> tuple[int, int]:
    """(resident, staging)"""
    return trunk.resident_bytes, trunk.staging_bytes
