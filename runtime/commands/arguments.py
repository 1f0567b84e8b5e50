"""What people write on a command line, read strictly: ids, passes, prompts, names of files."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.errors import UsageError
from runtime.home import home

_ID = re.compile(r"-?[0-9]{1,18}")
_PASSES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def check_seconds(seconds: float, most: float) -> None:
    """Raise UsageError unless --seconds is a time, no longer than `most`."""
    if not 0 < seconds <= most:  # nan is neither
        raise UsageError(f"--seconds {seconds:g}: more than 0, and no more than {most:g}")


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas. Whether the model has them is the model's to say."""
    items = [item.strip() for item in text.split(",")]
    for position, item in enumerate(items):
        if not _ID.fullmatch(item):
            raise UsageError(
                f"--prompt-ids: item {position} is {item!r}: wanted integers separated by commas, such as 1,2,3"
            )
    return [int(item) for item in items]


Passes = Sequence[range] | None
"""Numbers of passes of the model, the first is 0; None for all."""


def parse_passes(text: str) -> Passes:
    """0,3-5 or all. Raises UsageError."""
    if text.strip() == "all":
        return None
    found = []
    for item in text.split(","):
        match = _PASSES.fullmatch(item.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise UsageError(f"--timeline-passes: {item.strip()!r} is no pass: write numbers, such as 0,3-5, or all")
        found.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def read_prompt(path: Path) -> str:
    """The file's text, every byte of it: nothing is trimmed."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompt-file: cannot read {path}: {error.strerror or error}") from None
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompt-file: {path} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}; "
            "convert the file to UTF-8"
        ) from None


def prompt_source(prompt: str | None, prompt_file: Path | None, prompt_ids: str | None, chat: bool) -> str | list[int]:
    """The prompt as text or as ids. Raises UsageError unless it is given in exactly one way, and not empty."""
    given = [
        option
        for option, value in (("--prompt", prompt), ("--prompt-file", prompt_file), ("--prompt-ids", prompt_ids))
        if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise UsageError(f"one of --prompt, --prompt-file and --prompt-ids is needed, found {found}")
    if prompt_ids is not None:
        if chat:
            raise UsageError(
                "--chat writes a message around a text, and --prompt-ids is not one: give --prompt, or leave out --chat"
            )
        return parse_ids(prompt_ids)
    text = read_prompt(prompt_file) if prompt_file is not None else prompt
    if not text:
        where = "--prompt" if prompt_file is None else f"--prompt-file: {prompt_file}"
        raise UsageError(f"{where} is empty: there is nothing to continue from")
    return text


def check_unicode(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that was not UTF-8 in the shell."""
    for position, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = argument.encode(errors="backslashreplace").decode()
            raise UsageError(f"argument {position} is not UTF-8 text at character {error.start}: {shown}") from None


def output_file(
    path: Path, option: str, keep_out: Mapping[str, Path], others: Mapping[str, Path] | None = None
) -> Path:
    """Where a file that is asked for can be written, links followed; one that is there will be replaced.

    keep_out: directories by what they are, in which nothing is ever written, as in the program's own. others: files by
    what they are that this command reads or writes. Raises UsageError.
    """
    if path == Path():
        raise UsageError(f"{option}: the name is empty, or that of this directory: name a file")
    target = Path(os.path.realpath(path))
    for what, directory in keep_out.items():
        if _inside(target, directory):
            raise UsageError(f"{option} {path} is in {what}, where nothing is ever written: name another place")
    if _inside(target, home()):
        raise UsageError(f"{option} {path} is in {home()}, where the program keeps what it has learned: name another")
    for what, other in (others or {}).items():
        if target == Path(os.path.realpath(other)) or (target.exists() and other.exists() and target.samefile(other)):
            raise UsageError(f"{option} {path} is also the file of {what}, which would be lost: name another")
    if target.is_dir():
        raise UsageError(f"{option} {path} is a directory: name a file in it")
    if target.exists() and not target.is_file():
        raise UsageError(f"{option} {path} is no regular file: name another")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {target.parent}: {error.strerror or error}") from None


def _inside(target: Path, directory: Path) -> bool:
    return os.path.exists(directory) and any(
        parent.exists() and parent.samefile(directory) for parent in target.parents
    )
