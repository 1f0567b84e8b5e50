"""`nox -s bench-kernels`: what the kernels of the `cpu` backend reach of the machine's roofs, recorded like the others.

    python -m benchmarks.kernel_session [--kernel-options "--threads 2 --rows 1,8,32"] [--rounds 5] …

What is measured, and how, is `benchmarks.kernels`; its own record is the `kernels` of this result.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import kernels
from benchmarks.records import failed, parser, paths, portable, save, session, split, tell, written
from benchmarks.speed import pytest_benchmark
from runtime.cli.ending import end
from runtime.errors import ExpertstreamError

SMOKE = ("--rows", "1", "--only", "KDA")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = parser("kernels", __doc__, rounds=5)
    options.add_argument("--kernel-options", default="", metavar="OPTIONS", help="of benchmarks.kernels, in one string")
    asked = options.parse_args(arguments)
    try:
        record = session(asked, "kernels", "kernels of the cpu backend, at the released dimensions, weights in memory")
        own = [
            *(SMOKE if asked.smoke else ()),
            "--repeats",
            str(asked.rounds),
            *split(asked.kernel_options, "--kernel-options"),
        ]
        with tempfile.TemporaryDirectory(prefix="expertstream-", dir=asked.work) as scratch:
            found = Path(scratch) / "kernels.json"
            kernels.main([*own, "--json", str(found)])
            record["kernels"] = json.loads(found.read_bytes())
            record = portable(record, paths(Path(scratch)))
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)
    record["definitions"] = {"ms": "of a call, by the clock; the median of repeats is shown"}
    with written("--out", asked.out):
        saved = save(asked.out, record)
    kept = pytest_benchmark(saved, asked.out / "kernels-pytest-benchmark.json")
    tell(f"results  {saved}{kept}")
    return 0


if __name__ == "__main__":
    sys.exit(end(main))
