"""Each trap of the model specification, built on purpose: the golden tokens must not survive it.

All of them leave every shape right, and most leave the text fluent; only exact comparison finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import shapes
from mutation import Edit, mutated

from golden import cases
from runtime.checkpoint import Checkpoint, mxfp4
from runtime.config import ModelConfig
from runtime.errors import CheckpointError
from runtime.generate import Engine
from runtime.model.k3 import K3
from runtime.ops import reference
from runtime.ops.reference import ReferenceOps

SHAPE = "released-proportions"


def edit(owner: object, name: str, *changes: tuple[str, str]) -> Edit:
    return Edit(owner, name, changes)


MUTATIONS: dict[str, tuple[Edit, ...]] = {
    "nibble order": (
        edit(
            mxfp4,
            "decode",
            ("codes[:, 0::2] = packed & 15", "codes[:, 0::2] = packed >> 4"),
            ("codes[:, 1::2] = packed >> 4", "codes[:, 1::2] = packed & 15"),
        ),
    ),
    "scale bias off by one": (edit(mxfp4, "decode", ("scale.astype(np.int32) - 127", "scale.astype(np.int32) - 128")),),
    "w1 and w3 swapped": (
        edit(
            ReferenceOps,
            "expert_mlp",
            ("self.linear(z, w1), self.linear(z, w3)", "self.linear(z, w3), self.linear(z, w1)"),
        ),
    ),
    "A_log per channel": (
        edit(
            Checkpoint,
            "_in_shape",
            (
                "stored[: math.prod(shape)].reshape(shape)",
                'stored if name.endswith("A_log") else stored[: math.prod(shape)].reshape(shape)',
            ),
        ),
        edit(ReferenceOps, "decay", ("exp(a_log)[:, None]", "exp(a_log)[: u.shape[-1]]")),
    ),
    "rope channels dropped": (
        edit(
            ReferenceOps,
            "latent_attention",
            ("matvec(latent, absorbed) + matvec(key, q[t, h, nope:])", "matvec(latent, absorbed)"),
        ),
    ),
    "router bias used as weight": (
        edit(ReferenceOps, "route", ("np.take_along_axis(scores, ids", "np.take_along_axis(scores + bias, ids")),
    ),
    "router bias ignored": (edit(ReferenceOps, "route", ("-(scores + bias)", "-scores")),),
    "snapshot taken after the layer": (
        edit(
            K3,
            "forward",
            ("snapshots.append(p)", "pass"),
            ("h = ops.add(p, f)", "h = ops.add(p, f); snapshots.extend([h] * restart)"),
        ),
    ),
    "snapshot of the mixture": (edit(K3, "forward", ("snapshots.append(p)", "snapshots.append(m)")),),
    "running sum not restarted": (edit(K3, "forward", ("y if restart else ops.add(p, y)", "ops.add(p, y)")),),
    "output added to the mixture": (edit(K3, "forward", ("h = ops.add(p, f)", "h = ops.add(m, f)")),),
    "mix of normalised sources": (
        edit(ReferenceOps, "attn_res", ("w[:, None] * v for", "w[:, None] * self.rms_norm(v, norm, eps) for")),
    ),
    "last token's tap first": (edit(ReferenceOps, "short_conv", ("weight[:, j]", "weight[:, taps - 1 - j]")),),
    "key not normalised": (edit(K3, "kda", ("ops.l2_norm(k, 1.0)", "k")),),
    "decay after the write": (
        edit(
            ReferenceOps,
            "delta_rule",
            ("s = alpha[t][:, :, None] * s", "pass"),
            ("write[:, None, :]", "write[:, None, :]; s = alpha[t][:, :, None] * s"),
        ),
    ),
    "output read before the write": (
        edit(
            ReferenceOps,
            "delta_rule",
            ("s * q[t][:, :, None]", "(s - k[t][:, :, None] * write[:, None, :]) * q[t][:, :, None]"),
        ),
    ),
    "dt_bias left out": (edit(K3, "kda", ('u = ops.add(u, w["self_attn.dt_bias"])', "pass")),),
    "gate before the norm": (
        edit(
            K3,
            "kda",
            ('ops.rms_norm(o, w["self_attn.o_norm"], self.config.rms_norm_eps)', "o"),
            (
                "ops.gate(o, g)",
                "ops.merge_heads(ops.rms_norm("
                'ops.heads(ops.gate(o, g), n), w["self_attn.o_norm"], self.config.rms_norm_eps))',
            ),
        ),
    ),
    "MLA scale without the rope channels": (edit(K3, "mla", ("(nope + rope) ** -0.5", "nope**-0.5")),),
    "MLA output gate left out": (edit(K3, "mla", ("if config.mla_use_output_gate:", "if False:")),),
    "shared experts left out": (
        edit(
            K3,
            "latent_moe",
            (
                'ops.add(linear(y, w["block_sparse_moe.routed_expert_up_proj"]), shared)',
                'linear(y, w["block_sparse_moe.routed_expert_up_proj"])',
            ),
        ),
    ),
    "no norm on the experts' sum": (edit(K3, "latent_moe", ("if config.latent_moe_use_norm:", "if False:")),),
    "SiTU's σ on the capped gate": (edit(reference, "situ", ("sigmoid(g)", "sigmoid(beta * tanh(g / beta))")),),
    "SiTU without the cap on the up branch": (edit(reference, "situ", ("u if linear_beta is None", "u if True")),),
}

ELSEWHERE: dict[str, tuple[str, tuple[Edit, ...]]] = {
    # The latent norm hides the scale of the router's weights: this shape has none, and does not renormalise.
    "router weights renormalised unasked": (
        "relative",
        (edit(ReferenceOps, "route", ("if renormalize and k > 1:", "if k > 1:")),),
    ),
    "MLA epsilon as elsewhere": (
        "faint",
        (edit(K3, "mla", ("eps = config.mla_norm_eps", "eps = config.rms_norm_eps")),),
    ),
    "L2 epsilon on the mean": (
        "faint",
        (edit(ReferenceOps, "l2_norm", ("+ L2_EPS", "+ L2_EPS * x.shape[-1]")),),
    ),
}
"""Mutations that only show on a shape of their own."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def written(shape: str) -> Path:
        path = tmp_path_factory.mktemp("mutations") / shape
        shapes.write_checkpoint(shape, shapes.SEEDS[shape], path)
        return path

    return written


def golden_case(shape: str) -> cases.Case:
    return next(case for case in cases.load("synthetic") if case.model == shape and case.name == "short")


def tokens(path: Path, case: cases.Case) -> list[int]:
    """What the reference answers to the case, as the code now is."""
    steps = cases.run(Engine.load(path, backend="reference"), case.prompt_ids, len(case.token_ids))
    return [step.token_id for step in steps]


@pytest.mark.parametrize("shape", [SHAPE, "relative", "faint"])
def test_without_a_mutation_the_golden_tokens_come_out(shape: str, checkpoints: Callable[[str], Path]) -> None:
    case = golden_case(shape)
    assert tokens(checkpoints(shape), case) == case.token_ids


@pytest.mark.parametrize("name", [*MUTATIONS, *ELSEWHERE])
def test_the_golden_tokens_do_not_survive(name: str, checkpoints: Callable[[str], Path]) -> None:
    shape, edits = ELSEWHERE[name] if name in ELSEWHERE else (SHAPE, MUTATIONS[name])
    case = golden_case(shape)
    with mutated(*edits):
        assert tokens(checkpoints(shape), case) != case.token_ids


def test_layer_lists_off_by_one_do_not_fit_the_tensors(checkpoints: Callable[[str], Path]) -> None:
    with (
        mutated(edit(ModelConfig, "is_kda", ("layer + 1 in", "layer in"))),
        pytest.raises(CheckpointError, match="q_a_proj"),
    ):
        Engine.load(checkpoints(SHAPE), backend="reference")
