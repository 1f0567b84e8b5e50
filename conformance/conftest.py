"""Fixtures that several topics share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import Command, Outcome, Start
from matrix import Coverage
from own import Own
from report import Report
from serverside import Gate, ScriptedModel, Served, lend, served

from runtime.cli import main
from runtime.errors import ExpertstreamError
from runtime.generate import Engine, embedded_model
from runtime.setup.synth import synthesize
from runtime.text.tokenizer import Tokenizer
from runtime.units import parse_size

signal.signal(signal.SIGINT, signal.default_int_handler)
"""Where tests run in the background it would be ignored, here and in every process that is started."""

ROOT = Path(__file__).resolve().parent.parent
COVERAGE = pytest.StashKey[Coverage]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("expertstream", "the promises, on a checkpoint and drives of one's own")
    group.addoption("--full", action="store_true", help="every cell of the invariance matrix, not a pairwise design")
    group.addoption("--model", type=Path, metavar="DIR", help="test this checkpoint, and nothing else")
    group.addoption("--drive", action="append", default=[], metavar="NAME=PATH", help="with experts; may be repeated")
    group.addoption("--backend", choices=("cpu", "mlx", "reference"), help="for --model [as run chooses]")
    group.addoption("--memory", type=parse_size, metavar="SIZE", help="for --model, such as 24G [as run chooses]")
    group.addoption(
        "--report", type=Path, metavar="PATH", default="conformance-report", help="for --model: where .txt and .json go"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_model: what is run with --model, on a checkpoint of one's own")
    config.addinivalue_line("markers", "xdist_group(name): what stays together where several processes run the tests")
    config.stash[COVERAGE] = Coverage()
    option = config.getoption
    if option("--model") is None:
        if option("--drive") or option("--backend") or option("--memory"):
            raise pytest.UsageError("--drive, --backend and --memory go with --model")
        return
    try:
        own = Own(option("--model"), option("--drive"), option("--backend"), option("--memory"))
    except ExpertstreamError as error:
        raise pytest.UsageError(str(error)) from None
    report = config.stash[Report.KEY] = Report(own, Path(option("--report")).absolute(), config.stash[COVERAGE])
    config.pluginmanager.register(report, "conformance-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, those of a file stay together, of the matrix those of a checkpoint: what a
    module or a checkpoint needs is made once."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        checkpoint = getattr(parameters.get("subject"), "name", "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {checkpoint}"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of several that run the tests tells what its part of the matrix has covered."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["coverage"] = session.config.stash[COVERAGE].told()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of these processes has ended."""
    node.config.stash[COVERAGE].hear(getattr(node, "workeroutput", {}).get("coverage", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if Report.KEY not in config.stash and (table := config.stash[COVERAGE].table()):
        terminalreporter.section("the same answers, bit for bit")
        terminalreporter.write_line(table)


@pytest.fixture(scope="session")
def coverage(pytestconfig: pytest.Config) -> Coverage:
    """What the invariance matrix has covered in this session."""
    return pytestconfig.stash[COVERAGE]


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """Of the session on one's own checkpoint."""
    if Report.KEY not in pytestconfig.stash:
        pytest.skip("needs a checkpoint: nox -s conformance -- --model DIR")
    return pytestconfig.stash[Report.KEY]


@pytest.fixture(scope="session")
def own(report: Report) -> Own:
    """The checkpoint and drives that were named."""
    return report.own


@pytest.fixture(scope="session")
def released(own: Own) -> Own:
    """The same, where it is the released checkpoint."""
    if not own.released:
        pytest.skip("the vectors are the released model's, and this checkpoint is another")
    return own


@pytest.fixture(scope="session")
def released_tokenizer(released: Own) -> Tokenizer:
    """The released tokenizer."""
    return Tokenizer.load(released.model)


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """What a test lets the program learn stays the test's own, and nothing is known before."""
    path = tmp_path_factory.mktemp("home")
    if Report.KEY in request.config.stash:
        request.config.stash[Report.KEY].own.use_home(path)
    monkeypatch.setenv("EXPERTSTREAM_HOME", str(path))
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint of the shape `tiny`, with a tokenizer. Not to be written to."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    synthesize("tiny", path, vocab=1024)
    return path


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The embedded default model. Not to be written to."""
    return embedded_model()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process."""

    def command(*arguments: object) -> Outcome:
        status = main([str(argument) for argument in arguments])
        return Outcome(status, *capsys.readouterr())

    return command


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of its own, for what only a process can show. None outlives the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def command(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "runtime", *map(str, arguments)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        processes.append(subprocess.Popen(line, cwd=ROOT, **{**pipes, "env": env, **options}))
        return processes[-1]

    yield command
    for process in processes:
        with process:
            process.kill()


@pytest.fixture(scope="session")
def embedded_engine() -> Iterator[Engine]:
    """The embedded default, loaded once. To be used by one test at a time."""
    with Engine.load(embedded_model(), backend="cpu", threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(embedded_engine: Engine) -> Iterator[Served]:
    with served(lend(embedded_engine, snapshots=0)) as server:
        yield server


@pytest.fixture
def gated(embedded_engine: Engine) -> Iterator[tuple[Served, ScriptedModel, Gate]]:
    """A server with room for two that wait; its model stands at the gate."""
    model, gate = ScriptedModel(embedded_engine.config.vocab_size), Gate()
    model.script, model.gate = [5] * 100, gate
    with served(lend(embedded_engine, model=model), queue=2, heartbeat_s=0.02) as server:
        try:
            yield server, model, gate
        finally:
            gate.open.set()
