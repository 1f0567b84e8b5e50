"""Ideas that lose, beside what the project does instead, on the same work: docs/rejected.md.

    python -m benchmarks.rejected [NAME …] [--routes FILE.npy] [--json FILE]

What is counted under the virtual clock, and of routes, is exact and the same every time; processor time is not.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from benchmarks import arms, surroundings
from benchmarks.records import Record, directory, failed, keep
from benchmarks.rejected import caches, dispatch, guesses, reading, sums, tiles
from benchmarks.rejected.trial import MACHINE, PROMPT, TOKENS, Outcome, Trial
from runtime.cli.ending import end
from runtime.commands.arguments import output_file
from runtime.commands.terminal import progress
from runtime.errors import ExpertstreamError, UsageError

SCHEMA = "expertstream.rejected/1"

IDEAS: dict[str, Callable[[Trial], Outcome]] = {
    idea.__name__.replace("_", "-"): idea
    for idea in (
        dispatch.whole_reads,
        dispatch.equal_stripes,
        dispatch.first_holder,
        dispatch.cumulative_clocks,
        dispatch.rates_of_a_probe,
        dispatch.one_read_at_a_time,
        guesses.unbounded_prefetch,
        caches.cache_below_a_layer,
        caches.least_recently_used,
        reading.page_cache,
        reading.small_pages,
        tiles.prefill_tiles,
        sums.sums_on_arrival,
    )
}


def measure(names: Sequence[str], trial: Trial) -> list[Record]:
    """What came out for each idea; `refused` where it cannot be tried here."""
    found: list[Record] = []
    with progress("trying what was rejected") as report:
        for done, name in enumerate(names):
            report(done, len(names))
            head = {"name": name, "idea": inspect.getdoc(IDEAS[name])}
            try:
                outcome = IDEAS[name](trial)
            except UsageError as error:
                found.append(head | {"refused": str(error)})
            else:
                found.append(head | asdict(outcome) | {"ratio": outcome.ratio})
    return found


def table(found: Sequence[Record]) -> str:
    """For people."""
    rows = [
        (one["name"], f"not tried: {one['refused']}", "", "", "")
        if "refused" in one
        else (one["name"], one["counted"], number(one["kept"]), number(one["rejected"]), f"{one['ratio']:.2f}")
        for one in found
    ]
    head = ("rejected", "counted: as it is | as rejected", "kept", "rejected", "ratio")
    align = ("left", "left", "right", "right", "right")
    return str(tabulate(rows, head, "simple", disable_numparse=True, colalign=align))


def number(value: float) -> str:
    """A count whole, anything else to a thousandth."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def about(record: Record) -> str:
    """What made the numbers."""
    drawn = f"{PROMPT} drawn positions; those first in them are read under the virtual clock: {TOKENS}"
    lines = [f"{'' if n else 'drives':8} {text}" for n, text in enumerate(MACHINE)]
    return "\n".join([*lines, f"routes   {record['routes'] or drawn}"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or the exit status of what is wrong. Raises NotKept, after the table is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rejected", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(IDEAS)}")
    add("--routes", type=Path, metavar="FILE.npy", help="recorded routes of Kimi K3; default: drawn ones")
    add("--work", type=directory, metavar="DIR", help="where a file to read is made; default: the system's place")
    add("--json", type=Path, metavar="FILE", help="write it there, too")
    asked = parser.parse_args(argv)
    trial = Trial(asked.routes, asked.work)
    try:
        file = asked.json and output_file(asked.json, "--json", {})
        if unknown := [name for name in asked.names if name not in IDEAS]:
            raise UsageError(f"{unknown[0]!r} is no idea of the catalogue: name some of {', '.join(IDEAS)}, or none")
        trial.routes  # noqa: B018  a file that holds none ends it here
        record = {
            "schema": SCHEMA,
            "source": surroundings.commit(arms.ROOT),
            "versions": surroundings.versions(),
            "machine": surroundings.machine(),
            "routes": asked.routes and str(asked.routes),
            "ideas": measure(asked.names or list(IDEAS), trial),
        }
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)
    print(about(record), table(record["ideas"]), sep="\n\n", flush=True)
    if file:
        keep(file, record)
    return 0


if __name__ == "__main__":
    sys.exit(end(main))
