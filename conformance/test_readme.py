"""What the documents tell people to type exists, parses, and, where it is cheap, does what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from conftest import ROOT

from runtime.cli import app

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Line(NamedTuple):
    """A line of a shell block."""

    document: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command in it."""
        return [shlex.split(part) for part in re.split(r"&&|\|", self.text)]


LINES = [
    Line(document.name, line)
    for document in DOCUMENTS
    for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
OURS = [words[3:] for line in LINES for words in line.commands if words[1:3] == ["-m", "runtime"]]
TYPED = [line.text for line in LINES if " -m runtime " in line.text and not line.text.startswith("python3")]


def test_there_is_something_to_test() -> None:
    assert len(OURS) >= 8
    commands = "chat convert doctor drives forecast replicate run serve synth trace verify"
    assert {words[0] for words in OURS} == set(commands.split())


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_command_parses(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_every_program_is_known(line: Line) -> None:
    for words in line.commands:
        program = Path(words[0]).name
        if program == "nox":
            assert words[1] == "-s"
            named = rf'^def {words[2]}\(session|^@nox.session\(name="{words[2]}"'
            assert re.search(named, (ROOT / "noxfile.py").read_text(), re.MULTILINE)
        else:
            assert program in ("python", "python3", "pip", "printf", "curl"), line


def test_the_two_commands_stand_first_and_are_what_ci_runs() -> None:
    first, tests = (line.text for line in LINES[:2])
    assert first.startswith("python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/python -m runtime run ")
    assert tests.startswith("python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s conformance")
    script = (ROOT / ".ci" / "run").read_text()
    for line in (first, tests):
        pattern = next(p for p in re.findall(r"grep -m 1 '(.*?)' README.md", script) if re.search(p, line))
        assert next(row for row in (ROOT / "README.md").read_text().splitlines() if re.search(pattern, row)) == line


def test_the_answers_shown_are_the_answers_given(embedded: Path) -> None:
    shown = re.search(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    words = next(words[3:] for words in LINES[0].commands if words[1:3] == ["-m", "runtime"])
    outcome = subprocess.run(
        [sys.executable, "-m", "runtime", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown[1].splitlines()[-1] == outcome.stdout.rstrip("\n")
    assert shown[1].splitlines()[0] == outcome.stderr.splitlines()[0]


def test_what_is_shown_to_be_typed_runs(embedded: Path, own_home: Path, tmp_path: Path) -> None:
    """One shell, in an empty directory, in their order; what needs the real checkpoint aside, and servers."""
    script = "\n".join(line for line in TYPED if "/path/to/" not in line and " serve" not in line)
    outcome = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'python() {{ "$PYTHON" "$@"; }}\n{script}'],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "EXPERTSTREAM_HOME": str(own_home),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("Paris") >= 3
    (ladder,) = re.findall(r"^```text\n(drives .*?)\n```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert ladder in outcome.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target
