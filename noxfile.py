"""`nox -s conformance` and `nox -s lint`. Arguments after `--` go to pytest; `--install` there installs anew.

An environment is made once and used again: pip is asked only when pyproject.toml or the interpreter has changed
since, so that both sessions work without a network from then on.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["conformance", "lint"]

ROOT = Path(__file__).parent


def install(session: nox.Session, extra: str) -> list[str]:
    """Install the checkout, editable, with an extra, unless that was done; the session's remaining arguments."""
    arguments = [argument for argument in session.posargs if argument != "--install"]
    wanted = hashlib.sha256(f"{sys.version} {extra} {ROOT}\n".encode() + (ROOT / "pyproject.toml").read_bytes())
    stamp = Path(session.virtualenv.location) / "installed"
    current = stamp.is_file() and stamp.read_text() == wanted.hexdigest()
    if not current or len(arguments) < len(session.posargs):
        stamp.unlink(missing_ok=True)
        session.install("--editable", f".[{extra}]")
        stamp.write_text(wanted.hexdigest())
    return arguments


@nox.session
def conformance(session: nox.Session) -> None:
    """The tests: golden tokens, invariance, properties, faults, the command line."""
    arguments = install(session, "test")
    session.run("python", "-m", "pytest", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, format, types."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
