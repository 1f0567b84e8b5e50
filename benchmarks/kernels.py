"""What the kernels of the `cpu` backend reach of the machine's two roofs, at the released dimensions.

    python -m benchmarks.kernels [--threads 2] [--rows 1,2,4,8,32,128] [--only NAME] [--repeats 5] [--json FILE]

Every kernel is called as the model calls it, on weights that lie in memory and not in a cache: call after call takes
other ones. Repeats are interleaved: in each, the roofs first, then every kernel at every number of rows; a ratio is
taken within one repeat, and what is shown is the median of the repeats with the least and the most.

GB/s counts each byte of weights or state that must be read (KDA: read and written) once a call, whatever the rows;
GFLOP/s counts a multiply-add as two. "by CPU" is the same ratio with processor seconds, which leaves out the time that
other processes had the processors: where it differs much from the other, the machine was busy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.records import keep
from benchmarks.roofs import Lap, Roofs, lap, machine
from runtime.checkpoint.int8 import Int8Matrix
from runtime.checkpoint.mxfp4 import PackedExpert
from runtime.cli.ending import end
from runtime.commands.arguments import output_file
from runtime.config import MXFP4_GROUP
from runtime.errors import UsageError
from runtime.ops.cpu import CpuOps
from runtime.setup.shapes import RELEASED, RELEASED_KDA

SCHEMA = "expertstream.kernels/1"
ROWS = (1, 2, 4, 8, 32, 128)
LAP_S = 0.05
"""A measured stretch is calls for at least this long."""
BEYOND_CACHE = 256 << 20
"""Bytes of weights that a kernel goes through before it comes to the first ones again."""

BETA, LINEAR_BETA = RELEASED["activation_situ_beta"], RELEASED["activation_situ_linear_beta"]


@dataclass(frozen=True)
class Dimensions:
    """Sizes of the model; the released ones unless told otherwise."""

    hidden: int = RELEASED["hidden_size"]
    latent: int = RELEASED["routed_expert_hidden_size"]
    inter: int = RELEASED["moe_intermediate_size"]
    experts: int = RELEASED["num_experts"]
    chosen: int = RELEASED["num_experts_per_token"]
    kda_heads: int = RELEASED_KDA["num_heads"]
    kda_width: int = RELEASED_KDA["head_dim"]
    heads: int = RELEASED["num_attention_heads"]
    rank: int = RELEASED["kv_lora_rank"]
    nope: int = RELEASED["qk_nope_head_dim"]
    rope: int = RELEASED["qk_rope_head_dim"]
    value: int = RELEASED["v_head_dim"]
    context: int = 4096


@dataclass(frozen=True)
class Case:
    """A kernel at a number of rows: what a call must move and compute, and the calls, each on other weights."""

    name: str
    rows: int
    nbytes: int
    flops: int
    calls: Sequence[Callable[[], object]]

    @property
    def target(self) -> tuple[str, float] | None:
        """(which ratio, at least) where one was set."""
        if self.rows == 1 and self.name in READ_TARGETS:
            return "read", READ_TARGETS[self.name]
        return ("FMA", 0.65) if self.rows >= 8 and self.name == "mxfp4 expert" else None


READ_TARGETS = {"mxfp4 expert": 0.27, "bf16 matrix": 0.65, "int8 matrix": 0.65}
"""Shares of the read roof to reach with one row and two threads."""


@dataclass
class Result:
    """What the repeats of a case gave."""

    case: Case
    ms: list[float] = field(default_factory=list)
    gb_per_s: list[float] = field(default_factory=list)
    gflop_per_s: list[float] = field(default_factory=list)
    of_read: list[float] = field(default_factory=list)
    of_fma: list[float] = field(default_factory=list)
    of_read_by_cpu: list[float] = field(default_factory=list)
    of_fma_by_cpu: list[float] = field(default_factory=list)

    def add(self, calls: int, took: Lap, read: tuple[int, Lap], fma: tuple[int, Lap]) -> None:
        """Take one repeat down: so many calls, beside the roofs measured just before."""
        moved, computed = calls * self.case.nbytes, calls * self.case.flops
        self.ms.append(1e3 * took.wall_s / calls)
        self.gb_per_s.append(moved / took.wall_s / 1e9)
        self.gflop_per_s.append(computed / took.wall_s / 1e9)
        for clock, of_read, of_fma in (
            ("wall_s", self.of_read, self.of_fma),
            ("cpu_s", self.of_read_by_cpu, self.of_fma_by_cpu),
        ):
            seconds = getattr(took, clock)
            of_read.append(moved / seconds / (read[0] / getattr(read[1], clock)))
            of_fma.append(computed / seconds / (fma[0] / getattr(fma[1], clock)))

    def row(self) -> list[str]:
        """For the table."""
        case = self.case
        target = case.target and f"{case.target[1]:.2f} of {case.target[0]}"
        bound = self.of_fma if case.target and case.target[0] == "FMA" else self.of_read
        return [
            case.name,
            str(case.rows),
            f"{statistics.median(self.ms):.3g}",
            f"{statistics.median(self.gb_per_s):.1f}",
            f"{statistics.median(self.gflop_per_s):.0f}",
            f"{statistics.median(self.of_read):.2f}",
            f"{statistics.median(self.of_read_by_cpu):.2f}",
            f"{statistics.median(self.of_fma):.2f}",
            f"{statistics.median(self.of_fma_by_cpu):.2f}",
            f"{min(bound):.2f} to {max(bound):.2f}",
            target or "",
        ]

    def record(self) -> dict[str, Any]:
        """For the file: every repeat."""
        named = {key: value for key, value in vars(self).items() if key != "case"}
        about = {key: getattr(self.case, key) for key in ("name", "rows", "nbytes", "flops", "target")}
        return {**about, **named}


HEADERS = [
    "kernel", "rows", "ms", "GB/s", "GFLOP/s", "of read", "by CPU", "of FMA", "by CPU", "least to most", "target",
]  # fmt: skip


class Material:
    """Weights and rows made up, of one seed."""

    def __init__(self, beyond: int) -> None:
        self._rng, self._beyond = np.random.default_rng(0), beyond
        self._bf16 = (self.floats(1 << 20).view(np.uint32) >> 16).astype(np.uint16)

    def floats(self, *shape: int) -> Any:
        """Standard normal float32."""
        return self._rng.standard_normal(shape, np.float32)

    def bf16(self, rows: int, columns: int) -> Any:
        """bf16 as uint16; it repeats itself, which no kernel can tell."""
        return np.resize(self._bf16, (rows, columns))

    def int8(self, rows: int, columns: int) -> Int8Matrix:
        """Any int8, a scale for each row."""
        values = self._rng.integers(-127, 128, (rows, columns), np.int8)
        return Int8Matrix(values, np.full(rows, 2.0**-10, np.float16))

    def expert(self, latent: int, inter: int) -> PackedExpert:
        """Any codes, scales of usual size."""

        def part(rows: int, columns: int) -> tuple[Any, Any]:
            codes = self._rng.integers(0, 256, (rows, columns // 2), np.uint8)
            return codes, self._rng.integers(114, 124, (rows, columns // MXFP4_GROUP), np.uint8)

        return PackedExpert(*part(inter, latent), *part(latent, inter), *part(inter, latent))

    def many(self, nbytes: int, make: Callable[[], Any]) -> list[Any]:
        """As many as go beyond the cache, two at least."""
        return [make() for _ in range(max(2, -(-self._beyond // nbytes)))]


def cases(ops: CpuOps, rows: Sequence[int], d: Dimensions, beyond: int = BEYOND_CACHE) -> Iterator[Case]:
    """Every kernel at every number of rows. Weights of a kernel serve all its rows."""
    made = Material(beyond)

    def at_all_rows(
        name: str,
        nbytes: int,
        flops: int,
        weights: Callable[[], Any],
        given: Callable[[int], Any],
        call: Callable[[Any, Any], object],
    ) -> Iterator[Case]:
        """`nbytes` of a call and `flops` of a row; `call(weights, given(rows))` on weights made often enough."""
        over = made.many(nbytes, weights)
        for n in rows:
            x = given(n)
            yield Case(name, n, nbytes, n * flops, [partial(call, each, x) for each in over])

    elements = 3 * d.latent * d.inter
    yield from at_all_rows(
        "mxfp4 expert",
        elements // 2 + elements // MXFP4_GROUP,
        2 * elements,
        lambda: ops.expert(made.expert(d.latent, d.inter)),
        lambda n: made.floats(n, d.latent),
        lambda expert, z: ops.expert_mlp(z, expert, BETA, LINEAR_BETA),
    )
    projected = d.kda_heads * d.kda_width
    elements = projected * d.hidden
    forms: dict[str, tuple[int, Callable[[], Any]]] = {
        "bf16 matrix": (2 * elements, lambda: ops.matrix(made.bf16(projected, d.hidden))),
        "int8 matrix": (elements + 4 * projected, lambda: ops.int8_matrix(made.int8(projected, d.hidden))),
    }
    for name, (nbytes, weights) in forms.items():
        yield from at_all_rows(
            name, nbytes, 2 * elements, weights, lambda n: made.floats(n, d.hidden), lambda w, x: ops.linear(x, w)
        )
    elements = d.kda_heads * d.kda_width**2

    def tokens(n: int) -> list[Any]:
        q, k, v = (made.floats(n, d.kda_heads, d.kda_width) / d.kda_width for _ in range(3))
        return [q, k, v, np.full_like(q, 0.9), np.full((n, d.kda_heads), 0.5, np.float32)]

    yield from at_all_rows(
        "KDA step",
        8 * elements,
        7 * elements,
        lambda: made.floats(d.kda_heads, d.kda_width, d.kda_width),
        tokens,
        lambda state, given: ops.delta_rule(*given, state),
    )
    up, entry = d.heads * (d.nope + d.value) * d.rank, d.rank + d.rope
    yield from at_all_rows(
        "MLA absorbed",
        2 * up + 4 * d.context * entry,
        2 * (up + d.heads * d.context * (entry + d.rank)),
        lambda: (_cache(ops, made, d, max(rows)), ops.matrix(made.bf16(up // d.rank, d.rank))),
        lambda n: made.floats(n, d.heads, d.nope + d.rope),
        lambda layer, q: ops.latent_attention(q, *layer, d.rank, d.rope, 0.1),
    )
    elements, bias = d.experts * d.hidden, np.zeros(d.experts, np.float32)
    yield from at_all_rows(
        "router",
        2 * elements,
        2 * elements,
        lambda: ops.matrix(made.bf16(d.experts, d.hidden)),
        lambda n: made.floats(n, d.hidden),
        lambda gate, x: ops.route(ops.linear(x, gate), bias, d.chosen, True, 1.0),
    )


def _cache(ops: CpuOps, made: Material, d: Dimensions, rows: int) -> Any:
    """A latent cache with `context` positions, and room for the rows that are asked about."""
    cache = ops.latent_cache(d.context + rows, d.rank, d.rope)
    cache.append(made.floats(d.context + rows, d.rank), made.floats(d.context + rows, d.rope))
    cache.length = d.context - 1
    return cache


def measure(roofs: Roofs, all_cases: Sequence[Case], repeats: int, lap_s: float = LAP_S) -> list[Result]:
    """Repeat by repeat, the roofs and then every case."""
    results = [Result(case) for case in all_cases]
    for repeat in range(repeats):
        for result in results:
            calls = result.case.calls
            if repeat == 0:
                calls[0]()
            read, fma = roofs.read(), roofs.multiply()
            done, took = 0, Lap(0.0, 0.0)
            while took.wall_s < lap_s:
                call = calls[(repeat + done) % len(calls)]
                one = lap(roofs.threads, call)
                took, done = Lap(took.wall_s + one.wall_s, took.cpu_s + one.cpu_s), done + 1
            result.add(done, took, read, fma)
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
    return results


def table(results: Sequence[Result]) -> str:
    """The results for people."""
    return str(tabulate([result.row() for result in results], HEADERS, tablefmt="simple", disable_numparse=True))


def record(results: Sequence[Result], roofs: Roofs, before: dict[str, Any]) -> dict[str, Any]:
    """The results for programs, with what made them."""
    return {
        "schema": SCHEMA,
        "machine": before,
        "load_after": os.getloadavg(),
        "threads": roofs.threads,
        "roofs": {
            name: [amount / getattr(took, clock) / 1e9 for amount, took in measured]
            for name, measured, clock in (
                ("read_gb_per_s", roofs.reads, "wall_s"),
                ("read_gb_per_cpu_s", roofs.reads, "cpu_s"),
                ("fma_gflop_per_s", roofs.multiplies, "wall_s"),
                ("fma_gflop_per_cpu_s", roofs.multiplies, "cpu_s"),
            )
        },
        "kernels": [result.record() for result in results],
    }


def about(record: dict[str, Any]) -> str:
    """The machine and its roofs: median, least and most."""
    at, roofs = record["machine"], record["roofs"]
    rates = [f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})" for found in roofs.values()]
    caches = ", ".join(f"{name} {size}" for name, size in at["caches"].items())
    return (
        f"{at['processor']}, {at['processors']} processors, {record['threads']} threads, {at['vectors']}; {caches}\n"
        f"load {at['load_average'][0]:.1f} before, {record['load_after'][0]:.1f} after; "
        f"read roof {rates[0]} GB/s, by CPU {rates[1]}; FMA peak {rates[2]} GFLOP/s, by CPU {rates[3]}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows (default: %(default)s)")
    parser.add_argument("--only", default="", help="kernels with this in their name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every repeat there")
    asked = parser.parse_args(argv)
    try:
        rows = [int(n) for n in asked.rows.split(",")]
    except ValueError:
        parser.error(f"--rows {asked.rows!r}: numbers separated by commas are wanted, such as 1,8")
    try:
        file = asked.json and output_file(asked.json, "--json", {})
    except UsageError as error:
        parser.error(str(error))
    if min(asked.threads, asked.repeats, *rows) < 1:
        parser.error("--threads, --repeats and --rows: 1 at least")
    before = machine()
    ops, roofs = CpuOps(asked.threads), Roofs(asked.threads)
    chosen = [case for case in cases(ops, rows, Dimensions()) if asked.only in case.name]
    if not chosen:
        parser.error(f"--only {asked.only!r}: there is no such kernel")
    results = measure(roofs, chosen, asked.repeats)
    found = record(results, roofs, before)
    print(about(found), table(results), sep="\n\n", flush=True)
    if file:
        keep(file, found)


if __name__ == "__main__":
    sys.exit(end(main))
