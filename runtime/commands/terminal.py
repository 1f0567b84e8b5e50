"""Where output goes and how it ends: the answer on stdout, everything else on stderr, and a stop when asked.

stdout may be a pipe that closes or a disk that fills; both are reported by `write`. stderr is for people: what
cannot be written there is let go, so that a lost message never costs an answer.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, TextIO

from runtime.errors import Cancelled, StorageError
from runtime.progress import Progress

_SHOW_CURSOR = b"\x1b[?25h"

AGAIN_S = 0.05
"""After this, ^C is heard once more."""


def hold_on_to_interrupts() -> None:
    """See that no ^C is lost: where Python has it raised in a finalizer or a callback, it would be printed there and
    forgotten, and while modules are imported there are many of these."""
    before = sys.unraisablehook
    if getattr(before, "holds_on", False):
        return

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        else:
            before(lost)

    hook.holds_on = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def prepare() -> None:
    """Make the three streams UTF-8 whatever the locale, and there even when the shell closed them; lose no ^C."""
    hold_on_to_interrupts()
    for name, errors in (("stdin", "surrogateescape"), ("stdout", "strict"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:  # a closed stdout must refuse the answer, so it cannot be written to either
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            setattr(sys, name, os.fdopen(null, "w" if name == "stderr" else "r", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at the stream."""
    return stream.isatty()


def printable(text: str) -> str:
    r"""The text with control characters written out (\x1b), so that no terminal obeys them; \n and \t stay."""
    return "".join(ch if ch in "\n\t" or unicodedata.category(ch) != "Cc" else f"\\x{ord(ch):02x}" for ch in text)


def write(text: str) -> None:
    """Text to stdout, at once. A pipe gets it as it is, a terminal with its control characters written out.

    Raises BrokenPipeError when nobody reads any more, StorageError when the text cannot be written.
    """
    try:
        sys.stdout.write(printable(text) if is_terminal(sys.stdout) else text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon(sys.stdout)
        raise StorageError(f"cannot write to standard output: {error.strerror or error}") from None


def say(text: str, *, dim: bool = False, end: str = "\n") -> None:
    """Text for people, on stderr."""
    with contextlib.suppress(OSError):
        if not is_terminal(sys.stderr):
            sys.stderr.write(text + end)
        elif dim:
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True, highlight=False).print(Text(printable(text), "dim"), end=end, soft_wrap=True)
        else:
            sys.stderr.write(printable(text) + end)
        sys.stderr.flush()


def abandon(stream: TextIO) -> None:
    """Let the stream's descriptor lead nowhere, so that closing it at exit cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextlib.contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Progress]:
    """A bar on stderr from the first report on, gone when it is done; nothing when stderr is no terminal."""
    if not is_terminal(sys.stderr):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def report(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        bar.start()

    try:
        yield report
    finally:
        bar.stop()


class Interrupts:
    """SIGINT and SIGTERM as a flag that the model looks at between experts, and while it waits for drives.

    The first of them asks to stop; the second ends the process at once. A Cancelled that leaves the block gets
    the exit status of its signal: 130, or 143 for SIGTERM.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
        if isinstance(error, Cancelled) and self.signum is not None:
            error.exit_code = 128 + self.signum

    def cancelled(self) -> bool:
        """Whether somebody has asked to stop."""
        return self.signum is not None

    def check(self, doing: str) -> None:
        """Raise Cancelled when somebody has asked to stop; `doing` says what is stopped."""
        if self.cancelled():
            raise Cancelled(f"stopped while {doing}, as asked")

    def check_terminated(self, doing: str) -> None:
        """`check`, after the block, of what ^C ends as it is meant to end: only SIGTERM is a stop, with its status."""
        if self.signum == signal.SIGTERM:
            error = Cancelled(f"stopped while {doing}, as asked")
            error.exit_code = 128 + signal.SIGTERM
            raise error

    def stoppable(self, doing: str, report: Progress) -> Progress:
        """`report`, but for raising Cancelled, as `check` does, when somebody has asked to stop."""

        def advanced(done: int, total: int) -> None:
            self.check(doing)
            report(done, total)

        return advanced

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)
        if sys.stderr.isatty():
            with contextlib.suppress(OSError):  # a bar may hide the cursor, and the next signal ends us at once
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
