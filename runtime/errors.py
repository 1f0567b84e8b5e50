"""The exceptions that reach a person.

Each message says what was wanted, what was found, where, and what to do next. They are raised once, near the
cause, and caught once, in `runtime.cli`, which prints the message and leaves with `exit_code`.
This file imports nothing from the project.
"""

import errno
from collections.abc import Sequence
from pathlib import Path


class ExpertstreamError(Exception):
    """Base of every error that is the world's or the user's doing, not a bug.

    `code` names the kind in `--json` output; `exit_code` is the status the process ends with. The message is one
    line; `details`, where there is a list to give, are shown below it, a line each (`shortened` where there are many).
    """

    code = "error"
    exit_code = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)

    def __str__(self) -> str:
        return "\n".join([str(self.args[0]), *self.details])


class UsageError(ExpertstreamError):
    """The command line or a request asks for something that cannot be honoured."""

    code = "usage"
    exit_code = 2


class CheckpointError(ExpertstreamError):
    """The checkpoint is missing, incomplete, or not what its config says it is."""

    code = "bad_checkpoint"
    exit_code = 3


class StorageError(ExpertstreamError):
    """Bytes that were there at the start could not be read, and no other copy is left."""

    code = "storage_failed"
    exit_code = 4


class NotKept(StorageError):
    """A file beside the result could not be written; the result itself is printed already."""


class DoesNotFitError(ExpertstreamError):
    """The request needs more memory than it may have."""

    code = "does_not_fit"
    exit_code = 5


def memory_refused(wanted: str) -> DoesNotFitError:
    """What is raised where the system, or a limit set for this process, does not give what the plan counts on."""
    advice = "give a smaller --memory, end other programs, or raise the limit of this process (ulimit -v)"
    return DoesNotFitError(f"the system refused {wanted}: {advice}")


THREADLESS = "can't start new thread"
"""All that Python says of it, in a RuntimeError."""


def refusal(error: BaseException) -> DoesNotFitError | None:
    """What people are told where Python says that the system refused memory, or a thread; None for anything else."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return memory_refused("memory that was planned for")
    if isinstance(error, RuntimeError) and str(error) == THREADLESS:
        return memory_refused("a thread, or the memory for one")
    return None


class Cancelled(ExpertstreamError):
    """The generation was asked to stop; the state is as it was before the call."""

    code = "interrupted"
    exit_code = 130


ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
"""What the system says of a file that is not there, or not for us; anything else is the storage's failure."""


def unreadable(path: Path, error: OSError) -> CheckpointError | StorageError:
    """The error of a part of the checkpoint that cannot be read."""
    kind = CheckpointError if error.errno in ABSENT else StorageError
    return kind(f"cannot read {path}: {error.strerror or error}")


def shortened(lines: Sequence[str], most: int = 20) -> list[str]:
    """The first of many lines, and one that says how many more there are."""
    more = [f"... and {len(lines) - most:,} more"] if len(lines) > most else []
    return [*lines[:most], *more]
