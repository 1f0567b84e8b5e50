"""`python -m benchmarks.kernels`: it measures what it says, call by call on other weights. No time is looked at."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
from commandline import HANGS_S

from benchmarks import kernels
from benchmarks.kernels import Case, Dimensions, about, cases, main, measure, record, table
from benchmarks.roofs import CHAINS, Roofs, _multiply, machine
from runtime.ops.cpu import CpuOps

SMALL = Dimensions(
    hidden=96, latent=64, inter=96, experts=24, chosen=4, kda_heads=3, kda_width=16, heads=3, rank=32, nope=12, rope=8,
    value=20, context=30,
)  # fmt: skip
ROWS = (1, 8)
NAMES = ["mxfp4 expert", "bf16 matrix", "int8 matrix", "KDA step", "MLA absorbed", "router"]


@pytest.fixture(scope="module")
def small() -> list[Case]:
    return list(cases(CpuOps(1), ROWS, SMALL, beyond=100_000))


def test_every_kernel_at_every_number_of_rows_with_its_bytes_and_operations(small: list[Case]) -> None:
    assert [(case.name, case.rows) for case in small] == [(name, n) for name in NAMES for n in ROWS]
    weights, matrix, up, state = 3 * 64 * 96, 48 * 96, 3 * 32 * 32, 3 * 16 * 16
    wanted = {
        "mxfp4 expert": (weights * 17 // 32, 2 * weights),
        "bf16 matrix": (2 * matrix, 2 * matrix),
        "int8 matrix": (matrix + 4 * 48, 2 * matrix),
        "KDA step": (8 * state, 7 * state),
        "MLA absorbed": (2 * up + 4 * 30 * 40, 2 * (up + 3 * 30 * (40 + 32))),
        "router": (2 * 24 * 96, 2 * 24 * 96),
    }
    for case in small:
        nbytes, flops = wanted[case.name]
        assert (case.nbytes, case.flops) == (nbytes, flops * case.rows)
        assert len(case.calls) == max(2, -(-100_000 // nbytes))


def test_every_call_is_on_other_weights(small: list[Case]) -> None:
    for case in small:
        if case.name in ("mxfp4 expert", "int8 matrix"):  # the others' weights may repeat
            found = {np.asarray(call()).tobytes() for call in case.calls}
            assert len(found) == len(case.calls)


def test_repeats_are_counted_and_targets_stand_beside(small: list[Case]) -> None:
    roofs = Roofs(2, read_bytes=1 << 20, chain=1000)
    results = measure(roofs, small, repeats=2, lap_s=1e-9)
    assert all(len(result.ms) == len(result.of_read) == len(result.of_fma_by_cpu) == 2 for result in results)
    assert [nbytes for nbytes, _ in roofs.reads] == [2 << 20] * 2 * len(small)
    assert [flops for flops, _ in roofs.multiplies] == [2 * 2 * 16 * CHAINS * 1000] * 2 * len(small)
    found = json.loads(json.dumps(record(results, roofs, machine())))
    assert found["schema"] == kernels.SCHEMA
    assert [(kernel["name"], kernel["rows"]) for kernel in found["kernels"]] == [(c.name, c.rows) for c in small]
    assert "read roof" in about(found)
    lines = table(results).splitlines()[2:]
    targets = [line.split()[-3:] for line in lines if line.endswith((" read", " FMA"))]
    assert targets == [["0.27", "of", "read"], ["0.65", "of", "FMA"], ["0.65", "of", "read"], ["0.65", "of", "read"]]


def test_every_multiply_add_of_the_roof_is_computed() -> None:
    """None of the chains was left out by the compiler: its copies of the loop have all of them."""
    _multiply(1, one=np.float32(1.0))
    (compiled,) = _multiply.inspect_llvm().values()
    computed = compiled.count("call <16 x float> @llvm.fma.v16f32")
    assert computed >= CHAINS
    assert computed % CHAINS == 0


def test_meanwhile_all_threads_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    roofs, calls = Roofs(2, read_bytes=1 << 20), threading.Semaphore(0)
    multiply = roofs._multiply

    def noted(n: int) -> None:
        multiply(n)
        calls.release()

    monkeypatch.setattr(roofs, "_multiply", noted)
    with roofs.busy():
        assert all(calls.acquire(timeout=HANGS_S) for _ in range(4))


@pytest.mark.parametrize("words", [["--rows", "1,x"], ["--threads", "0"], ["--repeats", "0"], ["--json", "/"]])
def test_mistakes_end_before_anything_is_measured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CpuOps", None)
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
