"""The structure of `runtime/`: a room imports only from rooms below it, in the order the README gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "runtime").rglob("*.py"))


def rooms() -> list[str]:
    """From the ground up, as the README lists them."""
    listed = re.search(r"^runtime/.*\n((?:  .*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert listed is not None
    return listed[1].split(":")[0].replace(",", " ").split()


def imports(path: Path) -> set[str]:
    """The rooms that a module imports from, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.add(str(node.module))
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.split(".")[1] for name in names if name.startswith("runtime.")} & set(rooms())


def test_every_room_is_listed() -> None:
    found = {path.relative_to(ROOT / "runtime").parts[0].removesuffix(".py") for path in MODULES}
    assert found - {"__init__", "__main__"} == set(rooms())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_from_rooms_below_it(path: Path) -> None:
    room = path.relative_to(ROOT / "runtime").parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    below = rooms()[: rooms().index(room) + 1]
    assert imports(path) <= set(below)
