"""The memory plan: what the process may use, what each part takes, made and shown before anything is loaded.

Sizes are in bytes, and G in `--memory 24G` is 10⁹ bytes. The plan covers the whole process: `process` is the
interpreter with its libraries as found, plus a margin for what they allocate later.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import trunk_inventory
from runtime.config import ModelConfig
from runtime.errors import DoesNotFitError
from runtime.model.state import state_nbytes
from runtime.ops import Workload, backend_type
from runtime.weights.experts import check_budget, staging_floor
from runtime.weights.trunk import Precision, trunk_nbytes

MARGIN = 350_000_000
"""Bytes set aside beside what the process holds before loading: the compiler (260 MB, measured), libraries."""

HOST_RESERVE = 0.1
"""Share of the memory found that is left to everyone else when no limit was asked for."""


PARTS = ("process", "trunk", "state", "activations", "scratch", "expert_cache", "reading", "snapshots")
"""What the memory is divided into, as `MemoryPlan` names it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each part; `limit` is what they must stay within and `source` says where it comes from.

    `activations` are what the layers hand on to each other, `scratch` what the arithmetic needs beside them.
    """

    limit: int
    source: str
    process: int
    trunk: int
    state: int
    activations: int
    scratch: int
    expert_cache: int
    reading: int = 0
    """Beside the cache: buffers of late reads, copies, checks of drives."""
    snapshots: int = 0
    """Of earlier conversations."""

    @property
    def total(self) -> int:
        """What the plan comes to."""
        return sum(getattr(self, part) for part in PARTS)

    def as_dict(self) -> dict[str, int | str]:
        """For the run record."""
        return {**asdict(self), "total": self.total}

    def __str__(self) -> str:
        parts = [part for part in PARTS if part not in ("reading", "snapshots") or getattr(self, part)]
        listed = ", ".join(f"{part.replace('_', ' ')} {size(getattr(self, part))}" for part in parts)
        return f"{size(self.total)} of {size(self.limit)} ({self.source}): {listed}"


def element_size(backend: str) -> int:
    """Bytes of a number in states and activations."""
    return 8 if backend == "reference" else 4


def size(nbytes: int) -> str:
    """Bytes for people: 17.5 MB, 114 GB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def cgroup_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least memory limit of the process's cgroup and those above it; None when there is none.

    Looks at version 2 (memory.max) and version 1 (memory.limit_in_bytes); "max" and huge numbers are no limit.
    """
    groups = {""}
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory") or "memory" in controllers.split(","):
                parts = Path(path.strip("/")).parts
                groups.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    except (OSError, ValueError):
        pass  # no cgroups here: the root's own files decide, if there are any
    limits = []
    for group in groups:
        for file in (root / group / "memory.max", root / "memory" / group / "memory.limit_in_bytes"):
            try:
                text = file.read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def memory_limit(requested: int | None) -> tuple[int, str]:
    """(bytes the process may use, where that comes from)."""
    memory = psutil.virtual_memory()
    if requested is not None:
        return requested, "--memory" if requested <= memory.total else f"--memory, of {size(memory.total)} there are"
    limit, source = memory.available + psutil.Process().memory_info().rss, "available memory"
    cgroup = cgroup_limit()
    if cgroup is not None and cgroup < limit:
        limit, source = cgroup, "cgroup limit"
    return int(limit * (1 - HOST_RESERVE)), source


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


def make_plan(
    checkpoint: Checkpoint,
    *,
    backend: str,
    threads: int,
    context: int,
    chunk: int,
    memory: int | None,
    expert_cache: int | None,
    trunk: Precision = "bf16",
    reuse: bool = True,
    snapshots: int | None = 0,
    unit_bytes: int | None = None,
    reading: int = 0,
) -> MemoryPlan:
    """Divide the memory. `expert_cache` is what the user asked for, None lets the cache take what is left.

    unit_bytes: what one expert takes in the cache, when that is more than its own; reading: what reading needs besides.
    snapshots: None is two conversations as long as the context, where that is at most a quarter of what is left.
    Without `reuse` the cache is one layer's top-k. Raises DoesNotFitError, with the floor, when it cannot be.
    """
    config = checkpoint.config
    limit, source = memory_limit(memory)
    element = element_size(backend)
    process = psutil.Process().memory_info().rss + MARGIN
    ops = backend_type(backend)
    resident = trunk_nbytes(checkpoint, ops, trunk)
    state = 2 * state_nbytes(config, context, element)  # a pass writes the new state beside the old one
    widths = (
        (config.num_hidden_layers // config.attn_res_block_size + 8) * config.hidden_size
        + 8 * config.kda_width
        + 2 * config.intermediate_size
        + (config.num_experts_per_token + 3) * config.routed_expert_hidden_size
    )
    activations = chunk * widths * element + config.vocab_size * element
    scratch = ops.scratch_nbytes(workload(config, context, chunk), threads)
    floor = staging_floor(checkpoint, unit_bytes)
    everything = len(config.moe_layers) * config.num_experts * (unit_bytes or checkpoint.expert_nbytes)
    left = limit - process - resident - state - activations - scratch - reading
    if snapshots is None:  # where an answer began and where it ended, as long as the context
        snapshots = max(0, min(state + 2 * config.vocab_size * element, (left - (expert_cache or floor)) // 4))
    left -= snapshots
    if expert_cache is not None:
        check_budget(checkpoint, expert_cache, unit_bytes)
    if not reuse:
        expert_cache = floor
    elif expert_cache is None:
        expert_cache = max(floor, min(everything, left))
    plan = MemoryPlan(limit, source, process, resident, state, activations, scratch, expert_cache, reading, snapshots)
    if plan.total > limit:
        least = plan.total - expert_cache + floor
        smaller = least - resident + trunk_nbytes(checkpoint, ops, "int8")
        advice = f". With --trunk int8, which is not weight-exact, it could run in {size(smaller)}"
        raise DoesNotFitError(
            f"this needs {size(plan.total)}, but {size(limit)} is what it may have ({source}): trunk {size(resident)}, "
            f"state for {context:,} tokens {size(state)}, activations {size(activations + scratch)}, expert cache "
            f"{size(expert_cache)}, process {size(process)}{f', reading {size(reading)}' if reading else ''}"
            f"{f', snapshots {size(snapshots)}' if snapshots else ''}. "
            f"The least it can run in is {size(least)}: give --memory at least that on a machine that has it, or a "
            f"smaller --context, --prefill-chunk or --expert-cache{advice if smaller < least else ''}"
        )
    return plan
