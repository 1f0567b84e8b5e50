"""Drives as people write them on a command line, and what is said about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.commands.terminal import say
from runtime.drives.ledger import Health
from runtime.drives.throttled import Limit
from runtime.errors import CheckpointError, UsageError, unreadable
from runtime.generate import Engine
from runtime.weights.layout import Layout


def parse_drives(drives: Sequence[str], simulated: Sequence[str], option: str = "--drive") -> Layout:
    """From the values of `--drive NAME=PATH`, or an option like it, and of `--simulate-drive`. Raises UsageError."""
    directories = []
    for text in drives:
        name, equals, path = text.partition("=")
        if not name.strip() or not path or not equals:
            raise UsageError(f"{option} {text!r} is not understood: write NAME=PATH, such as a=/mnt/a")
        directories.append((name.strip(), Path(path)))
    return Layout(tuple(directories), tuple(Limit.parse(text) for text in simulated))


def require_model(model: Path | None) -> None:
    """Raise CheckpointError, as whoever opens the checkpoint does, for a model's directory that is not there."""
    if model is None:
        return
    try:
        there = model.is_dir()
    except OSError as error:
        raise unreadable(model, error) from None
    if not there:
        raise CheckpointError(f"--model {model}: there is no such directory")


NOT_READ = (Health.SUSPECT, Health.LOST)


class Failures:
    """Says which drives failed on the way and that it was made good, each failure once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told: dict[str, int] = {}
        self._silent: set[str] = set()
        self._told_wrong: dict[str, int] = {}

    def tell(self, made_good: bool = True) -> None:
        """Of those that nobody was told of yet. `made_good`: what was asked for came all the same."""
        if self._engine.drives is None:
            return
        reader = self._engine.drives.reader
        assert reader is not None
        last = reader.last_failures()
        for name, counts in self._engine.drives.counts()[0].items():
            new = counts.errors - self._told.get(name, 0)
            if new:
                self._told[name] = counts.errors
                well = "; other copies were read" if made_good else ""
                say(f"note     drive {name}: {new:,} reads failed{self._wrong(name)}{well}; the last: {last[name]}")
            elif counts.reads == counts.checks and name not in self._silent and reader.health(name) in NOT_READ:
                self._silent.add(name)
                say(f"note     drive {name}: it has not answered, and nothing was read from it")

    def _wrong(self, name: str) -> str:
        """What to do about wrong bytes, if there were any."""
        wrong = self._engine.checks.wrong[name]
        new, self._told_wrong[name] = wrong - self._told_wrong.get(name, 0), wrong
        return f", {new:,} of them by wrong bytes (python -m runtime verify names them)" if new else ""
