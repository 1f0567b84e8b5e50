"""The promises on somebody's own checkpoint, end to end: a session of its own, and the report that it writes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from copies import flip, write_experts

from runtime.setup.synth import synthesize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "model"
    synthesize("tiny", path, layers=3, experts=8, vocab=1024)
    return path


def session(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`pytest` with these arguments, as nox calls it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
    env = {**os.environ, "EXPERTSTREAM_HOME": str(home)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=600)


def held(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["test"].rpartition("::")[2]: result for result in record["results"]}


def test_a_checkpoint_that_keeps_its_promises(model: Path, own_home: Path, tmp_path: Path) -> None:
    drive = write_experts(model, tmp_path / "d", lambda _, expert: expert % 2 == 0)
    made = subprocess.run(
        [sys.executable, "-m", "runtime", "verify", "--model", model], cwd=ROOT, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    known = sorted(path.relative_to(own_home) for path in own_home.rglob("*") if path.is_file())
    done = session(own_home, f"--model={model}", f"--drive=d={drive}", "--backend=cpu", f"--report={tmp_path / 'out'}")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["schema"] == "expertstream.conformance/1"
    assert record["verdict"] == "passed"
    assert record["model"]["experts"] == 8
    assert not record["model"]["released"]
    assert {name: drive["experts"] for name, drive in record["drives"].items()} == {"model": 16, "d": 8}
    assert all(drive["reads"] > 0 and drive["mode"] for drive in record["drives"].values())
    assert record["drives"]["d"]["errors"] > 0, "it was lost in some cells"
    matrix = record["matrix"]
    assert matrix["pairs"] == matrix["possible_pairs"] > 100
    assert matrix["digests"] == matrix["prompts"] * 8
    assert matrix["factors"]["verify"]["first"] > 0
    results = held(record)
    assert results["test_the_answer_is_the_same"]["passed"] == matrix["cells"]
    for test in ("test_every_expert_is_on_a_drive", "test_copies_are_equal", "test_nothing_was_written"):
        assert results[test]["passed"] == 1
        assert not results[test]["failed"]
    published = results["test_the_released_model_has_the_published_logits"]
    assert "another" in "".join(published["not_run"].values())
    page = (tmp_path / "out.txt").read_text()
    assert page in done.stdout
    assert len(page.splitlines()) < 60
    assert max(map(len, page.splitlines())) <= 120
    assert record["model"]["fingerprint"] in page
    assert "verdict  PASSED" in page
    assert sorted(path.relative_to(own_home) for path in own_home.rglob("*") if path.is_file()) == known


def test_a_damaged_replica_fails_and_is_named(model: Path, own_home: Path, tmp_path: Path) -> None:
    drive = write_experts(model, tmp_path / "d", lambda layer, _: layer == 1)
    for file in drive.iterdir():
        flip(file, 1000)
    done = session(
        own_home,
        f"--model={model}",
        f"--drive=d={drive}",
        "--backend=cpu",
        f"--report={tmp_path / 'out'}",
        "-k",
        "copies",
    )
    assert done.returncode == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["verdict"] == "failed"
    (why,) = held(record)["test_copies_are_equal"]["failed"].values()
    assert "layer 1 expert " in why
    assert "is not the same on d and model" in why
    assert "FAILED   Copies of one expert" in (tmp_path / "out.txt").read_text()


def test_what_cannot_be_tested_is_a_line(model: Path, own_home: Path) -> None:
    done = session(own_home, f"--model={model}", "--drive=a=nowhere")
    assert done.returncode == 4
    assert "drive a: there is no directory" in done.stderr
    assert "Traceback" not in done.stderr


def of_nox(*names: str) -> dict[str, Any]:
    """What noxfile.py calls so; nox itself need not be there."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    wanted = [
        node
        for node in tree.body
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names)
        or (isinstance(node, ast.FunctionDef) and node.name in names)
    ]
    found: dict[str, Any] = {}
    exec(ast.unparse(ast.Module(wanted, [])), found)
    return found


def test_on_ones_own_drives_one_test_runs_after_another() -> None:
    spread = of_nox("spread")["spread"]
    assert "-n" in spread(["-k", "copies"])
    assert spread(["--model=/m"]) == spread(["-n0"]) == []


def test_words_of_an_option_are_joined() -> None:
    """As nox does: pytest would take a path that stands alone for one of tests."""
    found = of_nox("OPTIONS", "joined")
    words = ["--full", "--model", "/m", "--drive", "a=/a", "--drive=b=/b", "--memory", "24G", "-k", "copies"]
    assert found["joined"](words) == [
        *("--full", "--model=/m", "--drive=a=/a", "--drive=b=/b", "--memory=24G"),
        *("-k", "copies"),
    ]
