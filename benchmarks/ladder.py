"""`nox -s bench-4drive`: one drive, two, three, four. How near does each rung come to what its drives can do together?

    python -m benchmarks.ladder [--model DIR] [--drive NAME=PATH …] [--limits 200,100,100,80] [--rounds 3] [--smoke] …

Three kinds of machine, one command. Drives that are named are used as they are. Else, as root on Linux, four file
systems on loop devices, limited by the kernel; when that fails, the reason is said and the drives are throttled by
this program, as they are everywhere else. Without `--model` the checkpoint is a synthetic one with experts as released
over a small trunk. The first drive is the model's directory; the others hold copies, the last one a part.

Before anything is measured, the forecast is made and kept. Then every rung runs once a round, arms interleaved. The
*fluid bound* of a token is the time its reads would take if every byte could be divided among its holders at will.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from benchmarks import charts, surroundings
from benchmarks.arms import Arm, Place, Record, interleave, run_arm, spread
from benchmarks.limits import ended_by_signals
from benchmarks.records import (
    count,
    exit_status,
    failed,
    parser,
    paths,
    pm,
    portable,
    save,
    session,
    split,
    tell,
    top_lines,
    voids,
    written,
)
from benchmarks.reports import ladder_report
from benchmarks.stages import KINDS, LIMITS, Stage, call, set_up
from benchmarks.verdict import compare_arms
from runtime.cli.ending import end
from runtime.commands.tables import table
from runtime.drives.plan import fluid_bound
from runtime.drives.report import Analysis, report
from runtime.drives.trace import load as load_trace
from runtime.errors import ExpertstreamError, UsageError
from runtime.home import write_whole
from runtime.weights.placement import MODEL

SPARE = 2
"""Rounds that are run beside those asked for, where arms were void."""
REPORTED = ("drives", "troubles", "barriers", "last_by_drive", "waits", "accounts")
"""Of a trace's report, what is kept with the arm; the trace has the rest."""
FRANCE = "The capital of France is"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; the exit status."""
    options = _options().parse_args(arguments)
    try:
        with ended_by_signals(), ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertstream-", dir=options.work)))
            stage = stack.enter_context(set_up(options, scratch))
            return _measure(options, stage, scratch)
    except (ExpertstreamError, KeyboardInterrupt) as error:
        return failed(error)


def _options() -> argparse.ArgumentParser:
    options = parser("4drive", __doc__, rounds=3)
    add = options.add_argument
    add("--drive", action="append", default=[], metavar="NAME=PATH", help="a real drive; repeat")
    add(
        "--kind", choices=("kernel", "throttled"), help="of drives that are not real [default: what the machine allows]"
    )
    add("--limits", default=LIMITS, metavar="MB/s,…", help=f"of drives that are not real [{LIMITS}]")
    add("--cache", type=Path, help="keep the synthetic checkpoint in this directory, for the next time")
    add("--max-new", type=count, help="tokens of an answer [default: 4, or 17 with --model]")
    add("--prompt", default=FRANCE, help=f"with --model [{FRANCE!r}]")
    add("--run-options", default="", help="further options of `run`, in one string")
    return options


# --- measuring ---


def _measure(options: argparse.Namespace, stage: Stage, scratch: Path) -> int:
    home = scratch / "home"
    home.mkdir()
    record = session(options, "4drive", KINDS[stage.kind])
    record |= {
        "why": stage.why or None,
        "limited_by": stage.how or None,
        "images_in_memory": stage.memory,
        "model": surroundings.model(stage.model),
    }
    probed, rates = _probe(options, stage, home)
    drives = surroundings.drives(stage.places)
    for name, facts in drives.items():
        facts |= {"rate_bytes_per_s": rates[name], "limit_bytes_per_s": stage.limits.get(name), "probe": probed[name]}
    record["drives"] = drives
    arms = _arms(options, stage, {name: found["mode"] for name, found in probed.items() if "mode" in found})
    if not options.smoke:
        tell("warm up  kernels are compiled; this arm is not counted")
        warm = run_arm(arms[-1], 0, Place(scratch, home))
        if warm["status"]:
            raise UsageError(f"the run does not work: {warm['void'][0]}")
    record["forecast"] = _forecast(stage, rates, home)
    place = Place(scratch, home, options.out / "4drive-traces")
    record["arms"] = results = interleave(arms, options.rounds, place, 0 if options.smoke else SPARE)
    holders = stage.holders()
    for result in results:
        result["reads"] = (
            None if result["void"] else _reads(options.out / result["trace"]["file"], result, holders, rates)
        )
    record["rungs"] = _rungs(stage, results, record["forecast"])
    names = [arm.name for arm in arms]
    figure = "steady_tokens_per_s"
    record["comparisons"] = [compare_arms(results, *two, figure, more_is_better=True) for two in pairwise(names)]
    record = portable(record, paths(scratch))
    finish(options.out, record)
    with written("--out", options.out):
        _trace_reports(options.out, results)
    return exit_status(record)


def _probe(options: argparse.Namespace, stage: Stage, home: Path) -> tuple[Record, dict[str, float]]:
    """What `drives probe` finds, remembered in `home`; and the rate that each drive is taken to have: its limit, else
    its ceiling. Raises UsageError when neither is known."""
    tell("probe    each drive")
    amount = ["--rounds", "1", "--depths", "2,4", "--seconds", "0.5" if options.smoke else "2"]
    words = ["drives", "probe", *stage.options(list(stage.places)), *amount, "--json"]
    probed: Record = json.loads(call(words, home, stage.prefix))["drives"]
    rates = {}
    for name in stage.places:
        rate = stage.limits.get(name) or probed[name].get("bytes_per_s")
        if not rate:
            raise UsageError(f"drive {name}: how fast it reads could not be measured: {probed[name]['refused']}")
        rates[name] = rate
    return probed, rates


def _arms(options: argparse.Namespace, stage: Stage, modes: Record) -> list[Arm]:
    prompt = ["--prompt", options.prompt] if options.model else ["--prompt-ids", "1"]
    max_new = options.max_new or (17 if options.model else 4)
    common = [*prompt, "--max-new", str(max_new), "--expert-cache", "off", *split(options.run_options, "--run-options")]
    return [
        Arm(
            name=" + ".join(rung),
            options=(*stage.options(rung), *common),
            files=tuple(dict.fromkeys(stage.places[name] for name in rung)),
            trace=True,
            modes={name: modes[name] for name in rung if name in modes},
            settings={"max_new": max_new, "expert_reuse": False},
            shared=stage.kind == "throttled",
            prefix=stage.prefix,
        )
        for rung in stage.rungs
    ]


def _forecast(stage: Stage, rates: Mapping[str, float], home: Path) -> Record:
    """What `forecast` says of these drives at these rates, before anything is measured."""
    tokens = ["--tokens", "32", "--prompt", "0", "--json"]
    if stage.kind == "throttled":
        drives = [f"--drive={name}={rate / 1e6:g}MB/s" for name, rate in rates.items()]
        model = ["--config", str(stage.model / "config.json")]
    else:
        drives = [f"--drive={name}={path}" for name, path in stage.places.items() if name != MODEL]
        drives += [f"--rate={name}={rate / 1e6:g}MB/s" for name, rate in rates.items()]
        model = ["--model", str(stage.model)]
    return dict(json.loads(call(["forecast", *model, *drives, *tokens], home)))


# --- what was found ---


def _reads(
    trace: Path, result: Record, holders: Mapping[tuple[int, int], frozenset[str]], rates: Mapping[str, float]
) -> Record:
    """Of the passes after the prompt's: seconds, bytes, and the fluid bound of what they needed.

    bound_s is the sum over barriers; a barrier is the experts of one layer and pass.
    """
    analysis = Analysis(load_trace(trace))
    names = [name for name in rates if name in analysis.drives]
    prompt, s = result["run"]["prefill"]["rows"], analysis.slices
    barriers = [barrier for barrier in analysis.barriers if barrier.token >= prompt]
    bound_s, nbytes, by_drive = 0.0, 0, dict.fromkeys(names, 0)
    for barrier in barriers:
        needed: dict[frozenset[int], float] = {}
        jobs = {(int(r["layer"]), int(r["expert"])): int(r["job_bytes"]) for r in s[barrier.slices]}
        for key, length in jobs.items():
            have = frozenset(n for n, name in enumerate(names) if name in holders[key])
            needed[have] = needed.get(have, 0) + length
        bound_s += fluid_bound(needed, [rates[name] for name in names])
        nbytes += sum(jobs.values())
        for row in barrier.slices:
            by_drive[analysis.drives[analysis.drive_of[row]]] += int(s["length"][row])
    figures = result["figures"]
    seconds = figures["last_token_s"] - figures["first_token_s"]
    return {
        "seconds": seconds,
        "tokens": figures["tokens"] - 1,
        "waited_s": sum(barrier.seconds for barrier in barriers),
        "bytes": nbytes,
        "by_drive": by_drive,
        "bound_s": bound_s,
        "of_bound": bound_s / seconds,
        "report": {key: value for key, value in report(analysis).items() if key in REPORTED},
    }


def _rungs(stage: Stage, results: Sequence[Record], forecast: Record) -> list[Record]:
    """The ladder: by rung medians, parts of the fluid bound and of the last rung, and the forecast beside them."""
    rungs: list[Record] = []
    for drives, foretold in zip(stage.rungs, forecast["rungs"], strict=True):
        name = " + ".join(drives)
        counted = [r for r in results if r["arm"] == name and not r["void"]]
        rung: Record = {"rung": name, "drives": list(drives), "arms": len(counted)}
        for figure in ("steady_tokens_per_s", "inclusive_tokens_per_s", "first_token_s"):
            rung[figure] = spread(counted, figure)
        for part in ("of_bound", "seconds", "waited_s", "bound_s", "bytes", "tokens"):
            rung[part] = statistics.median(r["reads"][part] for r in counted) if counted else None
        rung["forecast_tokens_per_s"] = foretold["seconds_per_token"]["tokens_per_s"]
        steady = rung["steady_tokens_per_s"]
        rung["of_forecast"] = steady and steady["median"] / rung["forecast_tokens_per_s"]
        rungs.append(rung)
    best = rungs[-1]["steady_tokens_per_s"]
    for rung in rungs:
        steady = rung["steady_tokens_per_s"]
        rung["of_last"] = steady["median"] / best["median"] if steady and best else None
        rung["forecast_of_last"] = rung["forecast_tokens_per_s"] / rungs[-1]["forecast_tokens_per_s"]
    return rungs


def _trace_reports(out: Path, results: Sequence[Record]) -> None:
    """Of each rung's last arm that counts, as `trace report` prints it."""
    last = {result["arm"]: result["trace"]["file"] for result in results if not result["void"]}
    said = [
        f"# {name}: {file}\n\n{call(['trace', 'report', str((out / file).resolve())])}" for name, file in last.items()
    ]
    write_whole(out / "4drive-traces" / "reports.txt", "\n\n".join(said).encode())


def text(record: Record) -> str:
    """The ladder for people."""
    head = ["rung", "MB/s", "steady tokens/s", "of last", "of fluid bound", "forecast", "measured/forecast", "arms"]
    rows = []
    for rung in record["rungs"]:
        total = sum(record["drives"][name]["rate_bytes_per_s"] for name in rung["drives"])
        parts = [percent(rung[key]) for key in ("of_last", "of_bound")]
        forecast = f"{rung['forecast_tokens_per_s']:.3f} ({rung['forecast_of_last']:.0%})"
        rows.append(
            [
                rung["rung"],
                f"{total / 1e6:.0f}",
                pm(rung["steady_tokens_per_s"]),
                *parts,
                forecast,
                percent(rung["of_forecast"]),
                str(rung["arms"]),
            ]
        )
    waits = [
        f"reads    {rung['rung']}: {rung['bytes'] / 1e9:.2f} GB in {rung['seconds']:.2f} s, of which layers waited "
        f"{rung['waited_s']:.2f} s; at best {rung['bound_s']:.2f} s"
        for rung in record["rungs"]
        if rung["arms"]
    ]
    verdicts = [f"verdict  {c['candidate']} against {c['baseline']}: {c['said']}" for c in record["comparisons"]]
    defined = [
        "steady   " + record["definitions"]["steady_tokens_per_s"],
        "         page cache: " + record["arms"][0]["page_cache"],
    ]
    return (
        "\n".join([*top_lines(record), "", table(head, rows), "", *waits, *verdicts, *defined, *voids(record)]) + "\n"
    )


def percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def finish(out: Path, record: Record) -> None:
    """Write the result, its table, the report and the chart; print the table."""
    said = text(record)
    try:
        with written("--out", out):
            save(out, record)
            write_whole(out / "4drive.txt", said.encode())
            write_whole(out / "4drive.md", ladder_report(record, said).encode())
            charted = charts.ladder(record, out / "4drive")
    finally:
        print(said, end="")
    tell(f"results  {out / '4drive.json'}, .txt, .md{charted}")


if __name__ == "__main__":
    sys.exit(end(main))
