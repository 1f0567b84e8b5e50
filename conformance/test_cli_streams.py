"""The command line as a process: signals, pipes, full disks, terminals, and conversations over them."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import HANGS_S, Command, Start, on, read_until, readable
from conftest import ROOT

import runtime
from runtime.commands.chat import Conversation
from runtime.commands.terminal import Interrupts, printable, say, write
from runtime.generate import Engine
from runtime.ops import BACKENDS

# -- how it ends ---------------------------------------------------------------------------------------------


LOST = """
from runtime.commands.terminal import hold_on_to_interrupts
hold_on_to_interrupts()
import os, signal, time
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # here it is raised, and lost
try:
    Last()
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LOST], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("heard\n", "", 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_in_a_layer_with_the_text_so_far(start: Start, tiny: Path, signum: signal.Signals) -> None:
    process = start("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4000)
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 1)
    process.send_signal(signum)
    out, err = process.communicate(timeout=HANGS_S)
    assert begun
    assert out.endswith(b"\n")
    assert process.returncode == 128 + signum
    assert b"stopped in layer" in err.splitlines()[-1]
    assert b"Traceback" not in err


def test_an_interrupted_record_is_an_error(cli: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interrupts, "cancelled", lambda self: True)
    outcome = cli("run", *on(tiny), "--prompt-ids", "1,2,3", "--json")
    assert outcome.status == 130
    assert outcome.record["error"] == {"code": "interrupted", "message": "stopped while loading, as asked"}


def test_the_second_signal_is_not_caught() -> None:
    with Interrupts() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.cancelled()
        assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_closed_pipe_ends_quietly(start: Start, tiny: Path) -> None:
    process = start("run", *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 4000)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(HANGS_S) == 141
    assert err.splitlines()[-1].startswith(b"memory")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("what", [["--help"], ["run", "--help"], ["run"], ["run", "--json"]])
def test_a_full_disk_is_said_in_one_line(start: Start, tiny: Path, what: list[str]) -> None:
    line = what if "--help" in what else [*what, *on(tiny), "--prompt-ids", "1,2,3", "--max-new", 2]
    with open("/dev/full", "wb") as full:
        process = start(*line, stdout=full)
    _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 4
    assert err.splitlines()[-1] == b"error: cannot write to standard output: No space left on device"
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err


@pytest.mark.parametrize(("closed", "status"), [(1, 4), (2, 0), (0, 0)])
def test_closed_streams(tiny: Path, closed: int, status: int) -> None:
    line = [sys.executable, "-m", "runtime", "run", *on(tiny), "--prompt-ids", "1,2", "--max-new", 1]
    shell = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *map(str, line)]
    outcome = subprocess.run(shell, cwd=ROOT, capture_output=True, check=False)
    assert outcome.returncode == status
    assert b"Traceback" not in outcome.stderr
    assert b"Exception ignored" not in outcome.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from runtime.cli import main; assert main(['run', '--help']) == 0; "
        "print(sorted({'numpy', 'numba', 'mlx', 'tiktoken', 'rich', 'tabulate'} & set(sys.modules)), file=sys.stderr)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert outcome.stderr == "[]\n"
    assert all(backend in outcome.stdout for backend in BACKENDS)


def test_version_and_help(cli: Command) -> None:
    assert cli("--version").out == f"expertstream {runtime.__version__}\n"
    assert all(command in cli().out for command in ("run", "chat", "synth"))


# -- chat ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(embedded: Path) -> Engine:
    return Engine.load(embedded)


def conversation(engine: Engine, max_new: int = 100) -> Conversation:
    assert engine.tokenizer is not None
    return Conversation(engine.session(), engine.tokenizer, None, "max", max_new, False)


def test_every_line_of_a_pipe_is_a_message(start: Start) -> None:
    lines = "What is the capital of France?\n\n/reset\n/what\nWhat is the capital of Japan?\n/exit\nnever read\n"
    process = start("chat", stdin=subprocess.PIPE)
    out, err = process.communicate(lines.encode(), timeout=HANGS_S)
    assert process.returncode == 0
    answers = out.decode().splitlines()
    assert len(answers) == 2
    assert "Paris" in answers[0]
    assert "Tokyo" in answers[1]
    assert b"/reset forgets" in err
    assert b"> " not in out


def test_a_turn_costs_its_own_tokens_only(engine: Engine) -> None:
    talk = conversation(engine)
    talk.say("What is the capital of France?")
    read = list(talk.session.processed)
    talk.say("What is the capital of Japan?")
    assert talk.session.processed[: len(read)] == read
    assert talk.session.prefill.rows < len(read)
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert talk.messages[1]["reasoning_content"]
    # What was computed in two parts is what a session that has seen nothing computes.
    cold = conversation(engine)
    cold.messages = talk.messages[:2]
    cold.say("What is the capital of Japan?")
    assert cold.messages == talk.messages
    assert cold.session.prefill.rows > talk.session.prefill.rows


def test_after_a_cut_answer_the_history_is_what_was_received(engine: Engine) -> None:
    talk = conversation(engine, max_new=3)
    talk.say("What is the capital of France?")
    cut = talk.messages[1]
    assert cut["content"] == ""
    talk.max_new = 100
    talk.say("What is the capital of Japan?")
    fresh = conversation(engine)
    fresh.messages = [{"role": "user", "content": "What is the capital of France?"}, cut]
    fresh.say("What is the capital of Japan?")
    assert fresh.messages == talk.messages


def test_a_message_nobody_answered_is_no_history(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = conversation(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Interrupts, "cancelled", lambda self: True)
        with pytest.raises(Exception, match="stopped"):
            talk.say("What is the capital of France?")
    assert talk.messages == []
    talk.say("What is the capital of France?")
    assert "Paris" in talk.messages[-1]["content"]


def test_an_interrupt_stops_the_answer_and_not_the_conversation(start: Start, tiny: Path) -> None:
    process = start("chat", *on(tiny), "--max-new", 4000, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    shown = read_until(process.stderr.fileno(), b"expert cache")
    while len(shown.partition(b"expert cache")[2].partition(b"\n")[2]) == 0:  # the first word of an answer
        shown += os.read(process.stderr.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    read_until(process.stderr.fileno(), b"(stopped)")
    assert process.poll() is None
    _, err = process.communicate(b"/exit\n", timeout=HANGS_S)
    assert process.returncode == 0
    assert b"Traceback" not in err


def test_a_bad_line_ends_a_piped_conversation(start: Start, tiny: Path) -> None:
    process = start("chat", *on(tiny), "--max-new", 1, stdin=subprocess.PIPE)
    _, err = process.communicate(b"na\xefve\n", timeout=HANGS_S)
    assert process.returncode == 2
    assert b"Traceback" not in err


# -- a terminal ----------------------------------------------------------------------------------------------


def test_control_characters_are_written_out() -> None:
    assert printable("a\x1b[31m\r\x07\x7f\x9b\n\tü") == "a\\x1b[31m\\x0d\\x07\\x7f\\x9b\n\tü"


@pytest.mark.parametrize(("terminal", "sent"), [(True, "\\x1b[2J"), (False, "\x1b[2J")])
def test_a_terminal_is_never_sent_a_control_character(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, sent: str
) -> None:
    """A pipe gets what the model said."""
    for name, put in (("stdout", write), ("stderr", say)):
        stream = io.StringIO()
        stream.isatty = lambda: terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, name, stream)
        put("\x1b[2J")
        assert stream.getvalue().rstrip("\n") == sent


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_chat_at_a_terminal(start: Start, embedded: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    process = start(
        "chat", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    read_until(ours, b"> ")
    shown = b""
    process.send_signal(signal.SIGINT)
    while b"/exit or ^D leaves" not in shown:
        if readable([ours], 1):
            shown += os.read(ours, 4096)
        else:  # it came before readline waited, and will be seen at the next one
            process.send_signal(signal.SIGINT)
    shown = b""
    while b"Paris" not in shown:  # a second interrupt, if one was sent, takes the line with it
        os.write(ours, b"What is the capital of France?\n")
        while b"Paris" not in shown and readable([ours], 20):
            shown += os.read(ours, 4096)
    os.write(ours, b"/exit\n")
    assert process.wait(HANGS_S) == 0
