"""Golden runs: prompts with the tokens and the logits they must give, kept as JSON beside this file.

    embedded.json    the embedded default, prompts as people write them
    int8.json        the same with the trunk in int8, which is not weight-exact
    synthetic.json   synthetic checkpoints, made anew from their seed wherever they are needed
    released.json    published vectors of the released model, for whoever has its checkpoint

A case's digest is the SHA-256 of the concatenated SHA-256 (hex) of each step's logits. Token ids are compared on
every machine; digests on `DIGEST_MACHINES`, where it was shown that they repeat. `python -m golden.make` makes the
first three files anew.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime.generate import Engine, Step
from runtime.weights.trunk import Precision

HERE = Path(__file__).parent

BACKENDS = ("reference", "cpu")
"""The backends whose bits are promised."""

DIGEST_MACHINES = ("x86_64", "AMD64")
"""AVX-512, AVX2 and plain SSE code of this architecture were shown to give the same bits."""


@dataclass(frozen=True)
class Case:
    """One prompt and what must follow it. `model` is "embedded" or the name of a synthetic shape."""

    model: str
    fingerprint: str
    name: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    digests: dict[str, str]
    trunk: Precision = "bf16"


def load(name: str) -> list[Case]:
    """The cases of `golden/<name>.json`."""
    return [Case(**case) for case in json.loads((HERE / f"{name}.json").read_text())["cases"]]


def save(name: str, how: str, cases: list[Case]) -> None:
    """Write `golden/<name>.json`, replacing it when it is whole."""
    partial = HERE / f"{name}.json.partial"
    partial.write_text(json.dumps({"how": how, "cases": [asdict(case) for case in cases]}, indent=1) + "\n")
    partial.replace(HERE / f"{name}.json")


def digest(steps: list[Step]) -> str:
    """The digest of a run's logits."""
    return hashlib.sha256("".join(str(step.logits_sha256) for step in steps).encode()).hexdigest()


def run(engine: Engine, prompt_ids: list[int], max_new: int) -> list[Step]:
    """The steps that follow a prompt in a new session."""
    return list(engine.session().generate(prompt_ids, max_new, logits_hash=True))


def check(engine: Engine, case: Case) -> None:
    """Assert that the engine reproduces the case."""
    assert engine.checkpoint.fingerprint == case.fingerprint, "this is another checkpoint than the one the case is of"
    assert engine.model.trunk.precision == case.trunk
    steps = run(engine, case.prompt_ids, len(case.token_ids))
    assert [step.token_id for step in steps] == case.token_ids
    assert steps[-1].finish_reason == case.finish_reason
    if engine.ops.name in case.digests and platform.machine() in DIGEST_MACHINES:
        assert digest(steps) == case.digests[engine.ops.name], "same tokens, but other bits in the logits"
