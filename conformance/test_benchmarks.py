"""The harness that measures: its verdicts, what makes an arm void, what it writes, that it leaves nothing behind."""

from __future__ import annotations

import copy
import errno
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psutil
import pytest
from commandline import Start, read_until
from conftest import ROOT
from copies import large_experts

from benchmarks import arms, charts, ladder, limits, peers, records, speed, ttft
from benchmarks.arms import Arm, Place, figures, judge, output_hash, run_arm, void_reasons
from benchmarks.limits import Unavailable, kernel_limits, loop_drives
from benchmarks.peers import engine
from benchmarks.stages import Stage, set_up
from benchmarks.verdict import compare, compare_arms
from runtime.checkpoint import Checkpoint
from runtime.errors import NotKept, StorageError, UsageError
from runtime.generate import embedded_model
from runtime.generate.limits import Limit

# --- verdicts ---

COMPARISONS = 400
PAIRS = 10


def simulated(factor: float, seed: int, drift: float = 0.0) -> tuple[list[float], list[float]]:
    """Seconds of arms, each off by up to 15 %; those of the second side longer by a factor. What a pair's hour adds to
    both of its arms goes up and down by `drift`."""
    draw = random.Random(seed)
    hours = [draw.uniform(1 - drift, 1 + drift) for _ in range(PAIRS)]
    return tuple([20 * hour * f * draw.uniform(0.85, 1.15) for hour in hours] for f in (1.0, factor))  # type: ignore[return-value]


@pytest.mark.parametrize("drift", [0.0, 0.15, 0.5])
def test_where_nothing_has_changed_at_least_19_of_20_comparisons_are_inconclusive(drift: float) -> None:
    words = [compare(*simulated(1.0, seed, drift)).word for seed in range(COMPARISONS)]
    assert words.count("inconclusive") >= 0.95 * COMPARISONS


@pytest.mark.parametrize("drift", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("factor", [1.2, 1 / 0.8])
def test_a_drive_that_is_20_percent_slower_is_worse_in_at_least_19_of_20(factor: float, drift: float) -> None:
    words = [compare(*simulated(factor, seed, drift)).word for seed in range(COMPARISONS)]
    assert words.count("worse") >= 0.95 * COMPARISONS


def test_the_smallest_effect_that_could_have_been_shown_is_shown_nine_times_of_ten() -> None:
    smallest = [compare(*simulated(1.0, seed)).smallest or 0.0 for seed in range(COMPARISONS)]
    typical = sorted(smallest)[COMPARISONS // 2]
    words = [compare(*simulated(1 + typical, seed)).word for seed in range(COMPARISONS)]
    assert 0.8 * COMPARISONS <= words.count("worse") <= 0.97 * COMPARISONS


def test_better_is_less_time_or_a_higher_rate() -> None:
    assert compare([10.0, 11.0, 12.0], [5.0, 5.6, 6.1]).word == "better"
    assert compare([10.0, 11.0, 12.0], [5.0, 5.6, 6.1], more_is_better=True).word == "worse"
    found = compare([10.0] * 4, [8.0] * 4)
    assert (found.word, found.pairs) == ("better", 4)
    assert found.low == found.high == pytest.approx(0.8)


def test_every_verdict_says_its_interval_and_what_could_have_been_shown() -> None:
    said = str(compare([10.0, 11.0, 9.0], [10.5, 10.9, 9.2]))
    assert said.startswith("inconclusive: +2.1% (-")
    assert " to +" in said
    assert "which could have shown " in said
    assert str(compare([1.0], [3.0])) == "inconclusive: 1 pair can show nothing"


def test_what_is_no_pair_is_refused() -> None:
    for baseline, candidate in (([1.0], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [float("inf")])):
        with pytest.raises(ValueError, match="pairs of positive numbers"):
            compare(baseline, candidate)


def test_pairs_are_of_one_round_in_which_neither_arm_is_void() -> None:
    results = [
        {"arm": arm, "round": number, "void": ["?"] if (arm, number) == ("b", 1) else [], "figures": {"x": value}}
        for arm, number, value in (
            ("a", 0, 1.0),
            ("b", 0, 2.0),
            ("a", 1, 1.0),
            ("b", 1, 9.0),
            ("b", 2, 2.001),
            ("a", 2, 1.0),
        )
    ]
    found = compare_arms(results, "a", "b", "x")
    assert (found["pairs"], found["word"]) == (2, "worse")
    assert found["ratio"] == pytest.approx((2.0 * 2.001) ** 0.5)


# --- arms ---

GOOD: dict[str, Any] = {
    "arm": "one",
    "round": 0,
    "partners": "",
    "exact": True,
    "command": ["…"],
    "page_cache": "warm",
    "status": 0,
    "elapsed_s": 9.5,
    "events": [
        [1.0, "model    somewhere"],
        [4.0, "    1    2558       90.9 ms      0 hits    102 misses       0.67 MB  ' Paris'"],
        [6.0, "    2      46       10.6 ms     22 hits      6 misses       0.04 MB  '.'"],
        [9.0, "    3    1918        9.2 ms     19 hits      9 misses       0.06 MB  ' 1 2 ms'"],
    ],
    "swap_bytes": 0,
    "run": {
        "schema": "expertstream.run/1",
        "token_ids": [2558, 46, 1918],
        "logits_sha256": ["a", "b", "c"],
        "timing": {"ttft_s": 0.5},
        "settings": {"max_new": 3, "expert_reuse": False},
        "io": {
            "by_drive": {"model": {"retries": 0, "errors": 0, "mode": "direct; trunk buffered"}},
            "by_kind": {"trunk": 1},
        },
    },
    "trace": {"head": {"drives": {"model": {"hedges": 0}}}},
    "disks": {"loop0": {"own_bytes": 1_000_000_000, "foreign_bytes": 1_000_000}},
}
ARM = Arm("one", modes={"model": "direct"}, settings={"max_new": 3, "expert_reuse": False})


def faked(change: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
    """A good arm, changed."""
    result = copy.deepcopy(GOOD)
    change(result)
    result["figures"] = figures(result)
    result["tokens_sha256"], result["output_sha256"] = (output_hash(result["run"], exact) for exact in (False, True))
    result["void"] = void_reasons(result, ARM)
    return result


def test_figures_are_computed_from_raw_times() -> None:
    found = faked()
    assert found["void"] == []
    assert found["figures"] == {
        "elapsed_s": 9.5,
        "tokens": 3,
        "first_token_s": 4.0,
        "last_token_s": 9.0,
        "prompt_s": 0.5,
        "inclusive_tokens_per_s": 3 / 9.0,
        "steady_tokens_per_s": 2 / 5.0,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.update(status=4), "ended with status 4: "),
        (lambda r: r.update(swap_bytes=1_000_001), "1,000,001 bytes were swapped"),
        (lambda r: r.update(run=None), "it printed no record"),
        (lambda r: r["run"].update(schema="expertstream.run/2"), "it printed no record"),
        (lambda r: r["events"].pop(), "the lines of its tokens did not all arrive"),
        (lambda r: r["run"]["settings"].pop("expert_reuse"), "the setting expert_reuse is unknown"),
        (lambda r: r["run"]["settings"].update(max_new=4), "the setting max_new was to be 3 and is 4"),
        (lambda r: r["run"]["io"]["by_drive"]["model"].update(mode="buffered: no"), "read direct and was buffered: no"),
        (lambda r: r["run"]["io"]["by_drive"].clear(), "read direct and was not read at all"),
        (lambda r: r["run"]["io"]["by_drive"]["model"].update(errors=1), "drive model: 1 failed"),
        (lambda r: r["run"]["io"]["by_drive"]["model"].update(retries=2), "drive model: 2 retried"),
        (lambda r: r["trace"]["head"]["drives"]["model"].update(hedges=3), "drive model: 3 late"),
        (lambda r: r["disks"]["loop0"].update(foreign_bytes=20_000_001), "others read 20,000,001 bytes from loop0"),
    ],
)  # fmt: skip
def test_void_not_slow(change: Callable[[dict[str, Any]], object], reason: str) -> None:
    (said,) = faked(change)["void"]
    assert reason in said


def test_what_others_read_from_a_shared_disk_and_what_a_fault_arm_is_about_make_nothing_void() -> None:
    def change(result: dict[str, Any]) -> None:
        result["disks"]["loop0"]["foreign_bytes"] = 10**9
        result["run"]["io"]["by_drive"]["model"]["errors"] = 2

    result = faked(change)
    assert len(result["void"]) == 2
    assert void_reasons(result, Arm("one", shared=True, faults=True)) == []


def test_arms_whose_output_differs_are_void() -> None:
    def other_logits(result: dict[str, Any]) -> None:
        result["run"]["logits_sha256"][2] = "d"

    def other_tokens(result: dict[str, Any]) -> None:
        result["run"]["token_ids"][2] = 7

    arms = [faked(), faked(other_logits), faked(), faked(other_tokens), faked()]
    judge(arms)
    assert [bool(arm["void"]) for arm in arms] == [False, True, False, True, False]
    assert "its logits " in arms[1]["void"][0]
    assert "its tokens " in arms[3]["void"][0]
    two = [faked(), faked(other_tokens)]
    judge(two)
    assert all("do not agree either" in arm["void"][0] for arm in two)


def test_an_arm_that_does_not_end_is_ended_and_void(tmp_path: Path) -> None:
    result = run_arm(Arm("sleeper", command=("sleep", "60"), limit_s=0.3), 0, Place(tmp_path))
    assert result["elapsed_s"] < 30
    assert result["void"] == [f"ended with status {-signal.SIGKILL}: it said nothing"]
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_fails_under_a_session_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "_traced", lambda trace: {"trace": {}})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "heat").symlink_to("nowhere")
    (tmp_path / "file").touch()
    leave_a_trace = Arm("one", command=("touch",), trace=True)
    monkeypatch.setattr(Arm, "line", lambda self, trace: ["touch", str(trace)])
    with pytest.raises(StorageError, match=f"^{tmp_path}/file cannot be written: File exists; .* with --out$"):
        run_arm(leave_a_trace, 0, Place(tmp_path, traces=tmp_path / "file"))
    with pytest.raises(StorageError, match=f"^{tmp_path}/none cannot be written: No such file .* with --work$"):
        run_arm(leave_a_trace, 0, Place(tmp_path / "none"))
    with pytest.raises(StorageError, match=f"^{tmp_path} cannot be written: .*No such file.* with --work$"):
        run_arm(leave_a_trace, 0, Place(tmp_path, tmp_path / "home"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "home"]


# --- the ladder's arithmetic, on a run of its own ---


@pytest.fixture(scope="module")
def rung(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Stage, Path]:
    """(a result over two simulated drives, what it ran on, where its trace lies)."""
    folder = tmp_path_factory.mktemp("rung")
    model = large_experts(folder / "model")
    rates = {"d1": 60e6, "d2": 30e6}
    stage = Stage("throttled", model, dict.fromkeys(rates, model), rates)
    words = ["--backend", "reference", "--prompt-ids", "1,2", "--max-new", "3", "--expert-cache", "off"]
    arm = Arm(
        "d1 + d2",
        options=(*stage.options(["d1", "d2"]), *words),
        files=(model,),
        trace=True,
        modes={"d1": "direct", "d2": "direct"} if sys.platform == "linux" else {},
        settings={"max_new": 3, "expert_reuse": False},
        faults=True,
        shared=True,
    )
    return run_arm(arm, 0, Place(folder, traces=folder / "traces")), stage, folder


def test_an_arm_has_everything_that_made_it(rung: tuple[dict[str, Any], Stage, Path]) -> None:
    result, stage, _ = rung
    assert result["void"] == []
    assert result["page_cache"].startswith("cold: ") or sys.platform != "linux"
    assert result["run"]["model"]["fingerprint"] == Checkpoint.open(stage.model).fingerprint
    assert set(result["run"]["settings"]["drives"]) == {"d1", "d2"}
    assert result["figures"]["tokens"] == 3
    assert 0 < result["figures"]["first_token_s"] < result["figures"]["last_token_s"] < result["elapsed_s"]
    assert result["disks"] is None or all(disk["written_bytes"] >= 0 for disk in result["disks"].values())
    judge([result])
    assert result["void"] == []


def test_the_fluid_bound_is_of_the_bytes_that_the_passes_needed(rung: tuple[dict[str, Any], Stage, Path]) -> None:
    result, stage, folder = rung
    found = ladder._reads(folder / result["trace"]["file"], result, stage.holders(), stage.limits)
    passes, layers, chosen = 2, 2, 2
    with Checkpoint.open(stage.model) as checkpoint:
        assert found["bytes"] == passes * layers * chosen * checkpoint.expert_nbytes
    assert sum(found["by_drive"].values()) == found["bytes"]
    assert found["bound_s"] == pytest.approx(found["bytes"] / 90e6)
    assert found["seconds"] == result["figures"]["last_token_s"] - result["figures"]["first_token_s"]
    assert found["of_bound"] == found["bound_s"] / found["seconds"]
    alone = {key: frozenset({"d2"}) for key in stage.holders()}
    found = ladder._reads(folder / result["trace"]["file"], result, alone, stage.limits)
    assert found["bound_s"] == pytest.approx(found["bytes"] / 30e6)


def test_rungs_are_medians_of_arms_that_are_not_void() -> None:
    stage = Stage("throttled", Path(), dict.fromkeys(["a", "b"], Path()), {"a": 1.0, "b": 1.0})
    forecast = {"rungs": [{"seconds_per_token": {"tokens_per_s": rate}} for rate in (1.0, 2.0)]}
    results = []
    for name, rates in (("a", (0.8, 1.0, 1.2, 99.0)), ("a + b", (1.5, 1.6, 1.7, 0.1))):
        for rate in rates:
            arm = {"steady_tokens_per_s": rate, "inclusive_tokens_per_s": rate, "first_token_s": 1.0}
            reads = {"of_bound": rate / 2, "seconds": 1, "waited_s": 1, "bound_s": 1, "bytes": 1, "tokens": 1}
            void = ["odd"] if rate in (99.0, 0.1) else []
            results.append({"arm": name, "figures": arm, "reads": reads, "void": void})
    one, two = ladder._rungs(stage, results, forecast)
    assert one["steady_tokens_per_s"] == {"median": 1.0, "least": 0.8, "most": 1.2, "arms": 3}
    assert (one["of_last"], two["of_last"]) == (1.0 / 1.6, 1.0)
    assert (one["of_forecast"], two["of_forecast"]) == (1.0, 0.8)
    assert (two["of_bound"], two["arms"]) == (0.8, 3)


# --- prompts, and runs that are compared ---


def test_prompts_are_the_first_tokens_of_one_text(embedded: Path, tmp_path: Path) -> None:
    long = ttft.prompt_ids(embedded, 512)
    assert len(long) == 512
    assert ttft.prompt_ids(embedded, 37) == long[:37]
    with pytest.raises(UsageError, match="the text has"):
        ttft.prompt_ids(embedded, 100_000)
    without = large_experts(tmp_path / "without-a-tokenizer")
    (without / "tiktoken.model").unlink()
    ids = ttft.prompt_ids(without, 128)
    assert len(ids) == 128
    assert len(set(ids)) > 64


def test_the_prefill_rate_is_between_the_shortest_and_the_longest_prompt() -> None:
    results = [
        {"arm": f"{n} tokens", "round": number, "figures": {"first_token_s": seconds}, "void": void}
        for number, (short, long, void) in enumerate(
            [(5.0, 7.0, []), (5.0, 8.0, []), (6.0, 7.0, []), (1.0, 99.0, ["odd"])]
        )
        for n, seconds in ((6, short), (37, 6.0), (512, long))
    ]
    assert ttft.prefill_rate(results, "", [6, 37, 512]) == pytest.approx((512 - 6) / 2.0)
    assert ttft.prefill_rate(results[-3:], "", [6, 37, 512]) is None


def test_what_is_compared_differs_in_its_further_options_alone() -> None:
    parser = records.parser("decode", "Words.", rounds=3)
    speed.add_run_options(parser)
    asked = parser.parse_args(["--run-options", "--threads 1", "--versus=--no-prefetch --context 64"])
    found = speed.variants(asked)
    assert found == {
        "": (("--threads", "1"), ROOT),
        "versus ": (("--threads", "1", "--no-prefetch", "--context", "64"), ROOT),
    }
    arm = speed.make_arm(asked, "one", ["--max-new", "3"])
    assert (arm.trace, arm.cold, arm.options) == (False, True, ("--max-new", "3"))
    with pytest.raises(UsageError, match="there is no runtime/ in it"):
        speed.variants(parser.parse_args(["--versus-checkout", "/"]))
    for words in (["--run-options", "'open"], ["--versus", "'open"]):
        with pytest.raises(UsageError, match=f"{words[0]} .*: close what is open"):
            speed.variants(parser.parse_args(words))
    with pytest.raises(UsageError, match="there is no command no-such"):
        engine("other=no-such {ids}", embedded_model(), "1", 1, arm)


def test_no_more_memory_is_touched_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    held = psutil.Process().memory_info().rss
    monkeypatch.setattr(arms, "memory_limit", lambda asked: Limit(held // 2, "what this process has and others left"))
    assert arms.have(1 << 40) == "as it was"


# --- what is written ---


def a_record(folder: Path) -> dict[str, Any]:
    options = records.parser("decode", "Words.", rounds=3).parse_args(["--smoke", "--out", str(folder)])
    record = records.session(options, "decode", "faked")
    record["arms"] = [faked(), faked(lambda r: r.update(status=3, round=1))]
    return record


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    path = records.save(tmp_path, record)
    assert records.load(path) == record == json.loads(path.read_text())
    assert record["source"]["commit"] is None or len(record["source"]["commit"]) == 40
    assert set(record) == set(records.KEYS)
    assert "`expertstream.bench/1`" in (ROOT / "docs/benchmarks.md").read_text()


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    assert [key for key in (*records.KEYS, *records.ARM_KEYS, *faked()["figures"]) if f"`{key}`" not in text] == []


def test_a_result_names_no_place_of_this_machine(tmp_path: Path) -> None:
    record = a_record(tmp_path) | {
        "places": [{f"{tmp_path}/a": (f"{ROOT}/fixtures", sys.executable, f"{ROOT}-else", None)}]
    }
    text = json.dumps(records.portable(record, records.paths(tmp_path)))
    assert f'{{"$SCRATCH/a": ["$CHECKOUT/fixtures", "python", "{ROOT}-else", null]}}' in text
    assert not any(place in text for place in (str(tmp_path), f"{ROOT}/", sys.executable))


def test_a_directory_that_is_full_costs_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "save", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    record = a_record(tmp_path) | {"comparisons": [], "shown": []}
    record["arms"][0]["memory"] = "as it was"
    with pytest.raises(NotKept, match=f"--out {tmp_path} could not be written: No space left"):
        speed.finish(tmp_path, tmp_path, record, ["one"], speed.Shown(["arm"], [["one"]], ("elapsed_s", "s", "One")))
    assert "void     one, round 2" in capsys.readouterr().out


def test_interrupted_while_it_imports_a_session_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise KeyboardInterrupt\n")
    line = [sys.executable, "-m", "benchmarks.decode"]
    ended = subprocess.run(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("lost", ["schema", "arms", "versions"])
def test_what_is_no_result_is_refused(tmp_path: Path, lost: str) -> None:
    record = a_record(tmp_path)
    del record[lost]
    with pytest.raises(UsageError, match=r"schema expertstream\.bench/1|is missing"):
        records.check(record)


@pytest.mark.skipif(not importlib.util.find_spec("pytest_benchmark"), reason="needs pytest-benchmark (extra bench)")
def test_pytest_benchmark_records_what_arms_have_measured(tmp_path: Path) -> None:
    path = records.save(tmp_path, a_record(tmp_path))
    assert speed.pytest_benchmark(path, tmp_path / "there.json") == ", there.json"
    found = {b["name"]: b for b in json.loads((tmp_path / "there.json").read_text())["benchmarks"]}
    first = found["test_recorded[one-first_token_s]"]
    assert (first["stats"]["median"], first["stats"]["rounds"]) == (4.0, 1)
    assert found["test_recorded[one-per_token_s_steady]"]["stats"]["median"] == pytest.approx(2.5)
    assert first["extra_info"]["definitions"] == records.load(path)["definitions"]


def test_charts_are_drawn_of_what_counts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert charts.bars(a_record(tmp_path), tmp_path / "chart", ["one"], "first_token_s", "s", "One") == ", .svg, .png"
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "chart.svg").read_text()


def test_a_chart_that_cannot_be_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    def full(self: Figure, file: Any, **options: Any) -> None:
        if isinstance(file, Path):
            file.write_bytes(b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    (tmp_path / "chart.svg").write_text("as it was")
    with pytest.raises(OSError, match="No space left"):
        charts.bars(a_record(tmp_path), tmp_path / "chart", ["one"], "first_token_s", "s", "One")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"chart.svg": "as it was"}


# --- drives that the kernel limits ---


def left(folder: Path, process: int) -> set[str]:
    """What a session has set up, or left, that has this process and lays its images there."""
    loops = {line for line in _loops() if limits.MOUNTED in line}
    mounts = {line for line in Path("/proc/mounts").read_text().splitlines() if limits.MOUNTED in line}
    groups = {str(p) for top in (limits.V1, *limits.V2) if top.is_dir() for p in top.glob("expertstream-bench-*")}
    return {line for line in loops | mounts | groups if str(folder) in line or line.endswith(f"-{process}")}


def _loops() -> list[str]:
    return subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout.splitlines()


@contextmanager
def two_drives(folder: Path) -> Iterator[tuple[dict[str, Path], tuple[str, ...]]]:
    """Skips where the kernel cannot."""
    with ExitStack() as stack:
        try:
            mounts = stack.enter_context(loop_drives({"a": 4 << 20, "b": 4 << 20}, folder))
            _, prefix = stack.enter_context(kernel_limits({mounts["a"]: 20_000_000, mounts["b"]: 10_000_000}))
        except Unavailable as error:
            pytest.skip(str(error))
        yield mounts, prefix


def test_limits_hold_for_the_process_that_is_started_so_and_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), two_drives(tmp_path) as (mounts, prefix):  # noqa: PT012
        assert len(left(tmp_path, os.getpid())) == 5
        assert os.stat(mounts["a"]).st_dev != os.stat(mounts["b"]).st_dev
        (mounts["a"] / "file").write_bytes(bytes(4 << 20))
        inside = subprocess.run([*prefix, "cat", "/proc/self/cgroup"], capture_output=True, text=True, check=True)
        assert f"/expertstream-bench-{os.getpid()}" in inside.stdout
        assert "expertstream-bench" not in Path("/proc/self/cgroup").read_text()
        raise ZeroDivisionError
    assert left(tmp_path, os.getpid()) == set()
    assert list(tmp_path.iterdir()) == []


def test_images_are_read_into_memory_only_where_it_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{limits.MOUNTED}-a.img").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(limits, "SPARE_BYTES", 0)
    assert limits.keep_in_memory(tmp_path)
    monkeypatch.setattr(limits, "SPARE_BYTES", 1 << 60)
    assert not limits.keep_in_memory(tmp_path)


def test_interrupted_a_session_leaves_nothing(tmp_path: Path, start: Start) -> None:
    if sys.platform != "linux" or os.geteuid():
        pytest.skip("needs Linux and root")
    words = ["--smoke", "--kind", "kernel", "--work", str(tmp_path), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ladder", *words], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    with process:
        assert process.stderr is not None
        try:
            read_until(process.stderr.fileno(), b"drives   4 loop devices")
        except AssertionError as error:
            pytest.skip(f"no such drives here: {error}")
        process.send_signal(signal.SIGTERM)
        assert b"interrupted" in process.stderr.read()
    assert process.returncode == 130
    assert left(tmp_path, process.pid) == set()
    assert list(tmp_path.iterdir()) == []


def test_version_2_of_control_groups_is_told_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory\n")
    monkeypatch.setattr(limits, "V1", tmp_path / "none")
    monkeypatch.setattr(limits, "V2", (tmp_path / "neither", tmp_path))
    monkeypatch.setattr(limits, "_remove", lambda group: None)
    device = os.stat(tmp_path).st_dev
    with kernel_limits({tmp_path: 5_000_000}) as (said, prefix):
        group = Path(prefix[-1]).parent
        assert said == "cgroup version 2, io.max"
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+io"
        assert (group / "io.max").read_text() == f"{os.major(device)}:{os.minor(device)} rbps=5000000"


def test_where_the_kernel_cannot_drives_are_throttled_and_it_is_said_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOOLS", ("mkfs.no-such",))
    model = large_experts(tmp_path / "model")
    words = ["--model", str(model), "--limits", "4,2"]
    with set_up(ladder._options().parse_args(words), tmp_path) as stage:
        assert stage.kind == "throttled"
        assert "there is no mkfs.no-such" in stage.why or "needs Linux, and root" in stage.why
        assert stage.rungs == [("d1",), ("d1", "d2")]
        assert stage.options(["d1"])[-1] == "--simulate-drive=d1=4MB/s"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--limits", "fast"], "--limits 'fast'"),
        (["--limits", "0.1"], "--limits '0.1'"),
        (["--drive", "a"], "--drive 'a'"),
        (["--drive", "a=/no/such/place"], "drive a: there is no directory /no/such/place"),
        (["--drive", "a=.", "--drive", "a=/"], "the drive name 'a' is given twice"),
        (["--drive", "model=."], "the drive name 'model' is the model directory's"),
        (["--drive", "a=.", "--kind", "kernel"], "--kind is of drives that are not real"),
        (["--kind", "throttled", "--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ladder.main([*words, "--work", str(tmp_path), "--out", str(tmp_path / "out")]) in (2, 3)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.parametrize("number", ["0", "-1", "nan"])
@pytest.mark.parametrize("session", [ladder, peers], ids=["ladder", "peers"])
@pytest.mark.parametrize("option", ["--rounds", "--max-new"])
def test_what_is_done_is_done_once_at_least(
    session: ModuleType, option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        session.main([option, number])
    assert f"{option}: a number from 1 to 1000 was expected" in capsys.readouterr().err


def test_names_that_are_one_device_are_no_ladder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = large_experts(tmp_path / "model")
    (tmp_path / "b").mkdir()
    words = ["--model", str(model), "--drive", f"b={tmp_path / 'b'}", "--out", str(tmp_path / "out")]
    assert ladder.main(words) == 2
    assert "are one device" in capsys.readouterr().err
