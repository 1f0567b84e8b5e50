"""Break the code on purpose: replace a piece of a function's source and put the result in its place.

The piece must occur exactly once, so that a mutation cannot silently stop being one when the code changes.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Edit:
    """In the function `owner.name`, each first text of `changes` becomes the second."""

    owner: Any
    name: str
    changes: tuple[tuple[str, str], ...]


@contextmanager
def mutated(*edits: Edit) -> Iterator[None]:
    """The program with all the edits, for as long as the block runs."""
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(mock.patch.object(edit.owner, edit.name, _replacement(edit)))
        yield


def _replacement(edit: Edit) -> Any:
    function = getattr(edit.owner, edit.name)
    source = textwrap.dedent(inspect.getsource(function))
    for old, _ in edit.changes:
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {edit.name}"
    for old, new in edit.changes:
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    # The module's own globals, so that mutations of several functions see each other.
    code = compile("from __future__ import annotations\n" + source, f"<mutated {edit.name}>", "exec")
    exec(code, sys.modules[function.__module__].__dict__, made)
    return made[edit.name]
