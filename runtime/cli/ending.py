"""`main`: one command line run, and `end`: every way in which it can end as an exit status and one line.

Exit status: 0 done, 2 usage, 3 bad checkpoint, 4 storage failed (also: the output cannot be written), 5 does not
fit, 130 interrupted, 141 nobody read the output, 143 terminated.
"""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from runtime.cli.commands import app
from runtime.commands.arguments import check_unicode
from runtime.commands.terminal import abandon, prepare, printable, say
from runtime.errors import Cancelled, ExpertstreamError, NotKept, StorageError, UsageError, refusal

ParserError: type[Exception] = typer.BadParameter.__mro__[2]
"""What the parser raises for any mistake: the base of BadParameter's base, wherever this version keeps it."""

FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (*FULL, errno.EIO, errno.EBADF)
"""Why a help page cannot be written, beside a stdout that is closed; an OSError for anything else is a bug."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name); its exit status. A bug is the only traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> int | None:
        check_unicode(arguments)
        try:
            status: int | None = app(arguments, standalone_mode=False)
        except SystemExit:  # the parser turns a pipe that broke into it
            raise BrokenPipeError from None
        return status

    return end(command, _schema(arguments))


def end(command: Callable[[], int | None], schema: str | None = None) -> int:
    """Call it, and make of what it raises an exit status and one line; with a schema, a record of the failure too."""
    prepare()
    try:
        try:
            status = command()
        except SystemExit as error:  # argparse has said why
            status = error.code if isinstance(error.code, int) else 0
        sys.stdout.flush()
        return int(status or 0)
    except NotKept as error:
        return _fail(error.code, str(error.args[0]), error.exit_code, None)
    except ExpertstreamError as error:
        return _fail(error.code, str(error.args[0]), error.exit_code, schema, error.details)
    except ParserError as error:
        message = " ".join(error.format_message().replace("Value error, ", "").split())  # type: ignore[attr-defined]
        return _fail(UsageError.code, f"{message} (--help lists what there is)", UsageError.exit_code, schema)
    except (MemoryError, RuntimeError) as error:
        if (refused := refusal(error)) is None:
            raise
        return _fail(refused.code, str(refused), refused.exit_code, schema)
    except BrokenPipeError:
        abandon(sys.stdout)
        return 141
    except OSError as error:
        if (refused := refusal(error)) is not None:
            return _fail(refused.code, str(refused), refused.exit_code, schema)
        if isinstance(error, PermissionError) and error.filename is not None:
            message = f"{error.filename}: {error.strerror}; name a place that this user may use"
            return _fail(UsageError.code, message, UsageError.exit_code, schema)
        if error.errno in FULL and error.filename is not None:
            message = f"{error.filename2 or error.filename}: {error.strerror}; make room there, or name another place"
            return _fail(StorageError.code, message, StorageError.exit_code, schema)
        closed = isinstance(error, io.UnsupportedOperation)
        if not closed and (error.filename is not None or error.errno not in UNWRITABLE):
            raise
        abandon(sys.stdout)
        message = f"cannot write to standard output: {error.strerror or error}"
        return _fail(StorageError.code, message, StorageError.exit_code, None)
    except KeyboardInterrupt:
        return 130


def _schema(arguments: Sequence[str]) -> str | None:
    """With --json, the schema of the command's record, which is that of its failure too."""
    if "--json" not in arguments:
        return None
    command: Any = typer.main.get_command(app)
    name = "run"
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        name = word
    return f"expertstream.{name}/1"


def _fail(code: str, message: str, status: int, schema: str | None, details: Sequence[str] = ()) -> int:
    """Lines on stderr; with a schema also an error record on stdout, unless stdout is what failed."""
    lines = [printable(" ".join(line.split("\n"))) for line in (message, *details)]
    if schema is not None:
        error = {"code": code, "message": "\n".join([message, *details])}
        try:
            print(json.dumps({"schema": schema, "error": error}), flush=True)
        except OSError:
            abandon(sys.stdout)
    say("\n  ".join([lines[0] if code == Cancelled.code else f"error: {lines[0]}", *lines[1:]]))
    return status
