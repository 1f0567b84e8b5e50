"""`nox -s conformance`, `nox -s lint`, and the benchmarks, `nox -s bench-4drive` and others (docs/benchmarks.md).

Arguments after `--` go to pytest or to the benchmark; `--install` there installs anew. An environment is made once and
used again: pip is asked only when pyproject.toml or the interpreter has changed since, so that all sessions work
without a network from then on. The benchmarks use that of the tests.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["conformance", "lint"]

ROOT = Path(__file__).parent


def install(session: nox.Session, extra: str) -> list[str]:
    """Install the checkout, editable, with an extra, unless that was done; the session's remaining arguments."""
    return _install(session, extra, Path(session.virtualenv.location), session.install)


def _install(session: nox.Session, extra: str, location: Path, pip: Callable[..., None]) -> list[str]:
    arguments = [argument for argument in session.posargs if argument != "--install"]
    wanted = hashlib.sha256(f"{sys.version} {extra} {ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes())
    stamp = location / "installed"
    current = stamp.is_file() and stamp.read_text() == wanted.hexdigest()
    if not current or len(arguments) < len(session.posargs):
        stamp.unlink(missing_ok=True)
        pip("--editable", f".[{extra}]")
        stamp.write_text(wanted.hexdigest())
    return arguments


OPTIONS = ("--model", "--drive", "--backend", "--memory", "--report")


def joined(arguments: list[str]) -> list[str]:
    """`--model DIR` as `--model=DIR`: pytest takes a word that stands alone for the path of tests."""
    done: list[str] = []
    for argument in arguments:
        if done and done[-1] in OPTIONS:
            done[-1] += f"={argument}"
        else:
            done.append(argument)
    return done


def spread(arguments: list[str]) -> list[str]:
    """Tests run in as many processes as there are processors, up to four; on one's own drives, one after another."""
    said = any(argument.startswith(("--model", "-n", "--numprocesses", "--pdb")) for argument in arguments)
    return [] if said else ["-n", "logical", "--maxprocesses", "4", "--dist", "loadgroup"]


def bench(session: nox.Session, name: str) -> None:
    """Run one of the benchmarks, in the environment of the tests."""
    location = ROOT / ".nox" / "conformance"
    python = str(location / "bin" / "python")
    if not Path(python).exists():
        session.run_install(sys.executable, "-m", "virtualenv", "--quiet", str(location), external=True)

    def pip(*words: str) -> None:
        session.run_install(python, "-m", "pip", "install", "--quiet", *words, external=True)

    arguments = _install(session, "test", location, pip)
    session.run(python, "-m", f"benchmarks.{name}", *arguments, external=True)


@nox.session
def conformance(session: nox.Session) -> None:
    """The tests: golden tokens, invariance, properties, faults, the command line; or, with --model, on one's own."""
    arguments = install(session, "test")
    session.run("python", "-m", "pytest", *spread(arguments), *joined(arguments))


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, types."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(name="bench-4drive", venv_backend="none")
def bench_4drive(session: nox.Session) -> None:
    """The drive ladder: one to four drives, the forecast beside them."""
    bench(session, "ladder")


@nox.session(name="bench-decode", venv_backend="none")
def bench_decode(session: nox.Session) -> None:
    """Tokens a second."""
    bench(session, "decode")


@nox.session(name="bench-ttft", venv_backend="none")
def bench_ttft(session: nox.Session) -> None:
    """Seconds to the first token, by the length of the prompt."""
    bench(session, "ttft")


@nox.session(name="bench-kernels", venv_backend="none")
def bench_kernels(session: nox.Session) -> None:
    """What the kernels reach of the machine's roofs."""
    bench(session, "kernel_session")


@nox.session(name="bench-slice", venv_backend="none")
def bench_slice(session: nox.Session) -> None:
    """Runs at the released dimensions, beside what the machine could do."""
    bench(session, "slice")


@nox.session(name="bench-peers", venv_backend="none")
def bench_peers(session: nox.Session) -> None:
    """Other engines on the same checkpoint."""
    bench(session, "peers")
