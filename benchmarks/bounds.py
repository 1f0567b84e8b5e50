"""What no run can be quicker than: bytes that must be read at the ceiling of the drives, arithmetic at the rate of the
kernels, both measured in the same session.

The trunk in two parts. *Serial*: what must be computed before a layer can be routed, that is attention, dense layers,
routers, what leads back from the experts' space, since the next layer begins there, and the vocabulary, since the next
token begins there. *Beside*: shared experts and what leads into the experts' space, for which there is time while
experts are read.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.kernels import Dimensions, cases, measure
from benchmarks.roofs import Roofs
from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import is_vector
from runtime.config import ModelConfig
from runtime.drives.buffers import address, fresh
from runtime.ops.cpu import CpuOps

BESIDE = (".shared_experts.", ".routed_expert_down_proj.")
ONE_ROW = ("lm_head.weight",)
"""Computed for the last row only."""
NEVER = ("embed_tokens.weight",)
OF_ROOF = 0.65
"""Of the read roof, what a kernel with one row is to reach."""

ROWS, EXPERT_ROWS = 64, 8
"""Rows with which kernels are measured: enough for their full rate; an expert has some nine of a 512-token prompt."""
WANTED = (("bf16 matrix", ROWS), ("mxfp4 expert", EXPERT_ROWS), ("KDA step", ROWS))
FRESH = 1 << 30
BEYOND = 64 << 20
"""Bytes of weights that a kernel goes through: with so many rows it does not matter where they come from."""


@dataclass(frozen=True)
class Work:
    """Of a checkpoint. Elements of trunk matrices: `serial` for every row, `last` for the last row, `beside`."""

    serial: int
    last: int
    beside: int
    kda_layers: int
    moe_layers: int
    chosen: int
    expert_elements: int
    expert_bytes: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Work:
        """Counted from its tensors."""
        config = checkpoint.config
        elements = dict.fromkeys(("serial", "last", "beside"), 0)
        for name in checkpoint.trunk_names():
            if is_vector(name) or name.endswith(NEVER):
                continue
            part = "last" if name.endswith(ONE_ROW) else "beside" if any(b in name for b in BESIDE) else "serial"
            elements[part] += checkpoint.span(name).nbytes // 2
        return cls(
            **elements,
            kda_layers=sum(config.is_kda(layer) for layer in range(config.num_hidden_layers)),
            moe_layers=len(config.moe_layers),
            chosen=config.num_experts_per_token,
            expert_elements=3 * config.routed_expert_hidden_size * config.moe_intermediate_size,
            expert_bytes=checkpoint.expert_nbytes,
        )

    def decode_s(self, nbytes: float, ceiling: float, roof: float) -> float:
        """A token that reads so many bytes, with a resident bf16 trunk. ceiling, roof: bytes/s."""
        return nbytes / ceiling + 2 * (self.serial + self.last) / (OF_ROOF * roof)

    def prefill_s(self, rows: int, nbytes: float, ceiling: float, kernels: Kernels) -> float:
        """A short prompt: its experts are read, then; and what comes before each routing is computed, one by one."""
        return nbytes / ceiling + self._before_routing_s(rows, kernels)

    def overlapped_prefill_s(self, rows: int, nbytes: float, ceiling: float, kernels: Kernels) -> float:
        """The same where arithmetic beside the reads takes longer than they do, as on few processors."""
        return self._before_routing_s(rows, kernels) + max(nbytes / ceiling, self._beside_reads_s(rows, kernels))

    def long_prefill_s(self, rows: int, nbytes: float, ceiling: float, kernels: Kernels) -> float:
        """A long prompt: reads and arithmetic at once, whichever takes longer."""
        return max(nbytes / ceiling, self._before_routing_s(rows, kernels) + self._beside_reads_s(rows, kernels))

    def _beside_reads_s(self, rows: int, kernels: Kernels) -> float:
        experts = 2 * rows * self.chosen * self.moe_layers * self.expert_elements / kernels.expert
        return 2 * rows * self.beside / kernels.matrix + experts

    def _before_routing_s(self, rows: int, kernels: Kernels) -> float:
        return 2 * (rows * self.serial + self.last) / kernels.matrix + rows * self.kda_layers * kernels.kda_row_s


@dataclass(frozen=True)
class Kernels:
    """What the kernels do: trunk matrices and experts in operations/s, a row of one KDA layer in seconds."""

    matrix: float
    expert: float
    kda_row_s: float


class Rates:
    """The kernels that the bounds are made of, and the read roof, measured as often as it is asked."""

    def __init__(self, config: ModelConfig, threads: int) -> None:
        kda = config.linear_attn_config
        dimensions = Dimensions(
            hidden=config.hidden_size,
            latent=config.routed_expert_hidden_size,
            inter=config.moe_intermediate_size,
            kda_heads=kda.num_heads,
            kda_width=kda.head_dim,
        )
        made = cases(CpuOps(threads), (EXPERT_ROWS, ROWS), dimensions, BEYOND)
        self._roofs = Roofs(threads)
        self._cases = {(case.name, case.rows): case for case in made if (case.name, case.rows) in WANTED}

    def busy(self) -> AbstractContextManager[None]:
        """Meanwhile all threads multiply."""
        return self._roofs.busy()

    @staticmethod
    def fresh() -> float:
        """Bytes/s at which memory can be had that this process never had: where a virtual machine gets its memory from
        its host page by page, a cache that fills pays for it, and so does whatever is loaded."""
        area = fresh(FRESH)
        began = time.monotonic()
        ctypes.memset(address(area), 1, FRESH)
        return FRESH / (time.monotonic() - began)

    def measure(self) -> tuple[float, Kernels]:
        """(read roof in bytes/s, the kernels)."""
        before = len(self._roofs.reads)
        matrix, expert, kda = measure(self._roofs, [self._cases[wanted] for wanted in WANTED], 1)
        roof = statistics.median(nbytes / lap.wall_s for nbytes, lap in self._roofs.reads[before:])
        return roof, Kernels(1e9 * matrix.gflop_per_s[0], 1e9 * expert.gflop_per_s[0], kda.ms[0] / 1e3 / ROWS)
