"""`python -m benchmarks.slice`: what its ratios are made of. Nothing is measured here."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bounds import Kernels, Work
from benchmarks.slice import (
    CACHE,
    FIGURES,
    LONG,
    LONG_CACHE,
    NO_CACHE,
    STREAMED,
    Round,
    _engines,
    main,
    summary,
    table,
    unsteady,
)
from runtime.checkpoint import Checkpoint
from runtime.config import ModelConfig

KERNELS = Kernels(matrix=2e9, expert=1e9, kda_row_s=0.01)


def work(**changes: Any) -> Work:
    """A small model: 10⁹ elements before routing."""
    known = {"serial": 900_000_000, "last": 100_000_000, "beside": 50_000_000, "kda_layers": 2, "moe_layers": 3}
    return Work(**{**known, "chosen": 4, "expert_elements": 1000, "expert_bytes": 500, **changes})


def test_the_trunk_is_counted_once_in_two_parts(tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        config, found = checkpoint.config, Work.of(checkpoint)
    h, z, inner = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    moe = len(config.moe_layers)
    assert found.last == config.vocab_size * h
    assert found.beside == moe * (z * h + 3 * h * inner * config.num_shared_experts)
    dense = config.num_hidden_layers - moe
    around = dense * 3 * h * config.intermediate_size + moe * (config.num_experts * h + h * z)
    assert found.serial == around + attention(config)
    assert (found.moe_layers, found.chosen, found.expert_elements) == (moe, config.num_experts_per_token, 3 * z * inner)


def attention(config: ModelConfig) -> int:
    """Elements of its matrices."""
    h, kda = config.hidden_size, config.linear_attn_config
    width, heads = config.kda_width, config.num_attention_heads
    assert config.q_lora_rank is not None
    of_kda = 5 * h * width + h * kda.head_dim + kda.head_dim * width + h * kda.num_heads
    query = config.q_lora_rank * (h + heads * (config.qk_nope_head_dim + config.qk_rope_head_dim))
    up = heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
    latent = h * (config.kv_lora_rank + config.qk_rope_head_dim) + up
    of_mla = query + latent + 2 * h * heads * config.v_head_dim
    layers = range(config.num_hidden_layers)
    return sum(of_kda if config.is_kda(layer) else of_mla for layer in layers)


def test_bounds_are_bytes_over_ceilings_and_operations_over_rates() -> None:
    assert math.isclose(work().decode_s(6e9, ceiling=3e9, roof=10e9), 2.0 + 2e9 / 6.5e9)
    before = 2 * (64 * 0.9e9 + 0.1e9) / 2e9 + 64 * 2 * 0.01
    assert math.isclose(work().prefill_s(64, 6e9, 3e9, KERNELS), 2.0 + before)
    beside = 2 * 64 * 0.05e9 / 2e9 + 2 * 64 * 4 * 3 * 1000 / 1e9
    assert math.isclose(work().overlapped_prefill_s(64, 6e9, 3e9, KERNELS), max(2.0, beside) + before)
    assert math.isclose(work().overlapped_prefill_s(64, 0, 3e9, KERNELS), beside + before)
    computed = 2 * (8 * 0.9e9 + 0.1e9) / 2e9 + 8 * 2 * 0.01 + 2 * 8 * 0.05e9 / 2e9 + 2 * 8 * 4 * 3 * 1000 / 1e9
    assert math.isclose(work().long_prefill_s(8, 6e9, 3e9, KERNELS), computed)
    assert work().long_prefill_s(8, 600e9, 3e9, KERNELS) == 200.0


def timeline() -> dict[str, Any]:
    """A prompt of three tokens, and two more."""
    phases = {"attention": 1.0, "waiting": 2.0}
    waits = {"demand": 1.5, "late": 0.0, "trunk": 0.5}
    columns = ["pass", "drive", "kind", "layer", "expert", "what", "bytes", "queued", "started", "landed", "fault"]

    def read(of: int, kind: str, layer: int, expert: int, nbytes: int, queued: float, landed: float) -> list[object]:
        return [of, "a", kind, layer, expert, "" if layer >= 0 else "w", nbytes, queued, queued, landed, ""]

    return {
        "passes": [
            {"rows": rows, "began": began, "by_phase": phases, "waiting": waits}
            for rows, began in ((3, 0.0), (1, 10.0), (1, 20.0))
        ],
        "reads": {
            "columns": columns,
            "rows": [
                read(0, "demand", 1, 0, 999, 1.0, 2.0),
                read(1, "demand", 1, 0, 100, 10.0, 11.0),
                read(1, "demand", 1, 1, 100, 10.5, 12.0),
                read(1, "trunk", -1, -1, 70, 12.0, 21.0),
                read(2, "trunk", -1, -1, 70, 12.0, 21.0),
                read(2, "demand", 1, 5, 100, 20.0, 21.0),
            ],
        },
    }


def test_a_timeline_in_sums() -> None:
    found = summary(timeline())
    assert found["prompt_by_phase"] == {"attention": 1.0, "waiting": 2.0}
    assert found["decode_waiting"] == {"demand": 3.0, "late": 0.0, "trunk": 1.0}
    assert found["decode_bytes"] == 370, "what two passes saw was read once"
    assert found["decode_trunk_bytes"] == 70
    assert found["streaming_bytes_per_s"] == 300 / (2.0 + 1.0)


def at(arm: str, number: int = 0, **changes: Any) -> Round:
    """An arm that took 4.0 s over three tokens and 8.0 s over the prompt."""
    run = {
        "timing": {"decode_s": 4.0, "prefill_s": 8.0},
        "token_ids": [1, 2, 3],
        "prefill": {"distinct_experts": 6},
        "memory": {"peak_rss_bytes": 99, "plan": {"total": 100}},
    }
    told = summary(timeline()) | {"expert_bytes": 500}
    result = {"arm": arm, "round": number, "run": run, "void": [], "timeline": told, "elapsed_s": 9.0, **changes}
    return Round(result, ceiling=200.0, busy=100.0, roof=10e9, kernels=KERNELS, fresh=1e9)


def test_an_arm_between_two_ceilings_that_differ_is_void() -> None:
    assert unsteady(2.0e9, 2.9e9) == unsteady(2.9e9, 2.0e9) == []
    assert unsteady(2.4e9, 0.3e9) == ["the drives gave 2.4 GB/s before it and 300 MB/s after it"]


def test_every_ratio_is_of_its_own_round_and_void_arms_count_nowhere() -> None:
    rounds = [at(NO_CACHE), at(CACHE), at(STREAMED), at(LONG), at(LONG_CACHE), at(NO_CACHE, 1, void=["a reason"])]
    rows, kept = table(rounds, work(), [])
    values = {figure["figure"]: figure["values"] for figure in kept}
    bound = work().decode_s(185, 200.0, 10e9)
    assert values["reads with compute"] == [100 / 200]
    assert values["the same"] == [100 / 100]
    assert values["token, trunk resident, no cache"] == [pytest.approx(2.0 / bound)]
    assert values["token, cache"] == [2.0]
    assert values["token, trunk streamed"] == [pytest.approx(2.0 / (185 / 200))]
    assert values["the same, trunk"] == [pytest.approx(2.0 / (185 / 100))]
    assert values["prompt of 64"] == [pytest.approx(8.0 / work().prefill_s(64, 3000, 200.0, KERNELS))]
    assert values["the same, prompt of 64"] == [
        pytest.approx(8.0 / work().overlapped_prefill_s(64, 3000, 200.0, KERNELS))
    ]
    assert values["prompt of 512"] == [pytest.approx(8.0 / work().long_prefill_s(512, 3000, 200.0, KERNELS))]
    assert values["peak memory"] == [0.99] * 5
    assert [row[0] for row in rows] == [*(figure.name for figure in FIGURES), "peak memory"]
    assert all(row[1] != "–" for row in rows)


def test_of_another_engine_too_void_arms_count_nowhere() -> None:
    asked = argparse.Namespace(engine=["other=run {ids}"], tokens=3)
    good = [at("other, 1 tokens", elapsed_s=5.0), at("other, 3 tokens", elapsed_s=9.0)]
    void = [at(f"other, {count} tokens", 1, elapsed_s=0.1, void=["status 1"]) for count in (1, 3)]
    for some, values in ((good, [2.0 / 2.0]), ([], [])):
        rounds = [at(CACHE), *some, *void]
        _, kept = table(rounds, work(), _engines(rounds, asked))
        assert kept[len(FIGURES)]["values"] == values


def test_what_was_not_measured_is_not_shown_as_a_number() -> None:
    quiet = at(STREAMED)
    quiet.result["timeline"]["decode_trunk_bytes"] = 0
    rows, _ = table([quiet], work(), [])
    shown = {row[0]: row[1] for row in rows}
    assert shown["token, trunk streamed"] == "–", "nothing was streamed"
    assert shown["token, cache"] == "–"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model is needed"),
        (["--model", "MODEL", "--tokens", "1"], "--tokens is 2 at least"),
        (["--model", "MODEL", "--memory", "much"], "--memory 'much' is not a size"),
        (["--model", "MODEL"], "too small to measure a drive with"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(tiny) if word == "MODEL" else word for word in words]
    assert main([*asked, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert not out


@pytest.mark.parametrize("text", ["x", "=command", "x='open"])
def test_an_engine_is_refused_before_a_checkpoint_is_made(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.slice.synthetic", None)
    assert main(["--smoke", "--engine", text]) == 2
    assert capsys.readouterr().err.startswith(f"error: --engine {text!r}: ")
