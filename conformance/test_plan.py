"""The memory plan: where the limit comes from, how it is divided, and that a run stays within it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.checkpoint import Checkpoint
from runtime.errors import DoesNotFitError
from runtime.generate.limits import Limit, cgroup_room, memory_limit
from runtime.generate.plan import STAGED_TOKENS, MemoryPlan, Supply, Wanted, make_plan
from runtime.setup.synth import synthesize
from runtime.units import size
from runtime.weights.experts import staging_floor


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def plan(path: Path, supply: Supply | None = None, **changes: object) -> MemoryPlan:
    asked = {
        "backend": "cpu",
        "threads": 1,
        "context": 100,
        "chunk": 10,
        "memory": 4 * 10**9,
    } | changes
    with Checkpoint.open(path) as checkpoint:
        return make_plan(checkpoint, Wanted(**asked), supply)  # type: ignore[arg-type]


def test_the_least_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, "0::/user.slice/model.scope")
    write(tmp_path / "fs" / "user.slice" / "model.scope" / "memory.max", "max")
    assert cgroup_room(0, tmp_path / "fs", own) is None
    write(tmp_path / "fs" / "user.slice" / "memory.max", "7000000000")
    assert cgroup_room(0, tmp_path / "fs", own) == 7_000_000_000
    write(tmp_path / "fs" / "user.slice" / "model.scope" / "memory.max", "5000000000")
    assert cgroup_room(0, tmp_path / "fs", own) == 5_000_000_000
    write(tmp_path / "fs" / "other.slice" / "memory.max", "1000")
    assert cgroup_room(0, tmp_path / "fs", own) == 5_000_000_000


def test_version_1_names_its_memory_group_and_a_huge_number_is_no_limit(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, "9:name=systemd:/\n4:memory:/jobs/one\n1:cpu:/\n0::/")
    write(tmp_path / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    assert cgroup_room(0, tmp_path, own) is None
    write(tmp_path / "memory" / "jobs" / "one" / "memory.limit_in_bytes", "3000000000")
    assert cgroup_room(0, tmp_path, own) == 3_000_000_000


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_room(0, tmp_path / "nothing", tmp_path / "nothing") is None


def test_what_is_asked_for_is_the_limit() -> None:
    assert memory_limit(5) == Limit(5, "--memory")
    found = memory_limit(None)
    assert found.nbytes > found.reserve > 0
    assert found.source in ("available memory", "cgroup limit")


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not grow from one plan to the next."""
    held = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=10**8))
    monkeypatch.setattr("psutil.Process", lambda: held)


@pytest.mark.usefixtures("steady")
def test_the_cache_takes_what_is_left_and_no_more_than_there_are_experts(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        everything = 8 * 16 * checkpoint.expert_nbytes
        floor = staging_floor(checkpoint)
    roomy = plan(tiny)
    assert roomy["expert_cache"] == everything
    tight = plan(tiny, memory=roomy.total - everything // 2)
    assert floor < tight["expert_cache"] == everything - everything // 2
    assert tight.total == tight.limit.nbytes
    assert plan(tiny, reuse=False)["expert_cache"] == floor


@pytest.mark.usefixtures("steady")
def test_where_none_is_kept_drives_may_read_ahead_of_a_prompt_as_far_as_memory_allows(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        config, floor = checkpoint.config, staging_floor(checkpoint)
    drives = Supply(drives=True)
    assert plan(tiny, supply=drives, reuse=False, chunk=1)["expert_cache"] == floor
    layer = floor // config.num_experts_per_token * config.num_experts
    roomy = plan(tiny, supply=drives, reuse=False, chunk=20)
    assert roomy["expert_cache"] == min(layer, STAGED_TOKENS * floor) > floor
    tight = plan(tiny, supply=drives, reuse=False, chunk=20, memory=roomy.total - floor)
    assert floor <= tight["expert_cache"] < roomy["expert_cache"]
    assert tight.total <= tight.limit.nbytes


def test_too_little_is_refused_with_the_least_that_would_do(tiny: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"The least it can run in is [\d.]+ [MG]B"):
        plan(tiny, memory=10**6)
    with pytest.raises(DoesNotFitError, match="give --expert-cache at least that"):
        plan(tiny, expert_cache=1000)


def test_a_longer_context_costs_state_and_a_longer_chunk_activations(tiny: Path) -> None:
    short, long = plan(tiny), plan(tiny, context=1000)
    # 3 MLA layers, a latent of 32 and a shared key of 16 per position, float32, old state and new.
    assert long["state"] - short["state"] == 2 * 900 * 3 * 48 * 4
    assert plan(tiny, chunk=20)["activations"] > short["activations"]


@pytest.mark.parametrize(
    ("nbytes", "words"), [(0, "0 B"), (999, "999 B"), (17_547_264, "17.5 MB"), (1.56e12, "1.56 TB")]
)
def test_sizes_for_people(nbytes: int, words: str) -> None:
    assert size(nbytes) == words


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose largest matrix is most of it: 51 MB of vocabulary."""
    path = tmp_path_factory.mktemp("wide") / "wide"
    synthesize("tiny", path, layers=4, vocab=200_000)
    return path


@pytest.mark.parametrize(
    ("backend", "trunk"), [("cpu", "bf16"), ("mlx", "bf16"), ("reference", "bf16"), ("cpu", "int8"), ("mlx", "int8")]
)
def test_a_run_stays_within_its_plan(backend: str, trunk: str, wide: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    ids = ",".join(str(i * 37 % 1000) for i in range(300))
    command = [sys.executable, "-m", "runtime", "run", "--model", str(wide), "--backend", backend, "--json"]
    command += ["--prompt-ids", ids, "--max-new", "4", "--context", "400", "--trunk", trunk]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert 10**8 < memory["peak_rss_bytes"] <= memory["plan"]["total"] <= memory["budget_bytes"]


# -- the trunk is streamed ---------------------------------------------------------------------------------------------

LIMIT = ["--simulate-drive", "a=900MB/s"]


def child(*arguments: object, before: str = "") -> dict[str, Any]:
    """The record of a run in a process of its own."""
    line = shlex.join([sys.executable, "-m", "runtime", "run", "--json", *map(str, arguments)])
    done = subprocess.run(f"{before} exec {line}", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose trunk is far more than what a process holds otherwise: 205 MB, half of it the head."""
    path = tmp_path_factory.mktemp("heavy") / "heavy"
    synthesize("tiny", path, layers=4, vocab=400_000)
    (path / "tiktoken.model").unlink()
    return path


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
def test_a_run_that_streams_stays_within_its_plan(backend: str, heavy: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core", reason="needs MLX")
    options = ["--model", heavy, "--backend", backend, "--context", 400, "--max-new", 3, "--logits-hash"]
    options += ["--prompt-ids", ",".join(str(i * 37 % 1000) for i in range(300)), *LIMIT]
    whole = child(*options)
    assert whole["memory"]["plan"]["trunk_read_per_token"] == 0
    trunk = whole["memory"]["plan"]["trunk"]
    streamed = child(*options, "--memory", whole["memory"]["plan"]["total"] - trunk + 60_000_000)
    memory = streamed["memory"]
    assert streamed["logits_sha256"] == whole["logits_sha256"]
    assert memory["plan"]["trunk_read_per_token"] > trunk // 3
    assert memory["peak_rss_bytes"] <= memory["plan"]["total"] <= memory["budget_bytes"]
    assert memory["peak_rss_bytes"] < whole["memory"]["peak_rss_bytes"] - trunk // 3, "it would not fit otherwise"


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of version 1 below this process's own."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    if own is None:
        pytest.skip("there is no memory controller of version 1")
    path = Path("/sys/fs/cgroup/memory") / own.split(":", 2)[2].strip("/") / f"plan-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error.strerror}")
    yield path
    for _ in range(100):
        with suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.05)


def test_in_a_memory_control_group(heavy: Path, group: Path) -> None:
    """The kernel ends what goes beyond: the limit is found, the trunk streamed, and the page cache does not count."""
    options = ["--model", heavy, "--backend", "cpu", "--context", 64, "--max-new", 2, "--prompt-ids", "1,2,3", *LIMIT]
    whole = child(*options)["memory"]["plan"]
    limit = int((whole["total"] - whole["trunk"] + 80_000_000) / 0.9) // 4096 * 4096
    (group / "memory.limit_in_bytes").write_text(str(limit))
    record = child(*options, before=f"echo $$ > {group}/cgroup.procs && cat {heavy}/*.safetensors > /dev/null &&")
    plan = record["memory"]["plan"]
    assert plan["source"] == "cgroup limit"
    assert plan["limit"] + plan["reserve"] <= limit
    assert plan["limit"] + plan["reserve"] > 0.95 * limit, "what was read through the page cache is given back"
    assert plan["trunk_read_per_token"] > 0
