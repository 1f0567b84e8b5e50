"""`--trace FILE` and `--timeline FILE`: what a run read, and when it computed, also of one that fails or is stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.commands.arguments import output_file
from runtime.commands.loading import Loading, Ready
from runtime.commands.terminal import Interrupts, say
from runtime.commands.timeline import check_format
from runtime.commands.timeline import write as write_timeline
from runtime.drives.identity import disks_below_image
from runtime.drives.trace import TraceLog
from runtime.errors import NotKept
from runtime.generate import Engine
from runtime.generate.record import model, settings
from runtime.model.timeline import Timeline


class Tracing:
    """Notes what the engine it loads reads, and computes, and writes it when the block ends, however it ends.

    Refuses a place that cannot be written before anything is loaded. Without `loading.trace` and `loading.timeline` it
    does nothing. Raises NotKept at the end, so the result is to be printed within the block.
    """

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        if loading.timeline is not None:
            check_format(loading.timeline)
        others = dict(loading.inputs)
        self._file: Path | None = None
        self._drawn: Path | None = None
        if loading.trace is not None:
            self._file = others["--trace"] = output_file(loading.trace, "--trace", loading.sources, others)
        if loading.timeline is not None:
            self._drawn = output_file(loading.timeline, "--timeline", loading.sources, others)
        self._unwritten: list[str] = []
        self._log: TraceLog | None = None
        self._timeline: Timeline | None = None
        self._engine: Engine | None = None

    def load(self, stop: Interrupts, ready: Ready) -> Engine:
        """`Loading.load`, traced."""
        self._log = TraceLog() if self._file or self._drawn else None
        self._timeline = Timeline() if self._drawn else None
        self._engine = self._loading.load(stop, ready, self._log, self._timeline)
        return self._engine

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is None or (self._engine is None and self._log.empty):
            return
        about: dict[str, Any] = {"ended": _ended(error), "model": None, "settings": None}
        if self._engine is not None:
            about = about_run(self._engine, self._loading.note, _ended(error))
            if self._timeline is not None and self._drawn is not None:
                self._write("timeline", self._drawn, partial(self._draw, self._timeline, self._log, about))
        if self._file is not None:
            self._write("trace", self._file, partial(self._put_down, self._log, about))
        if self._unwritten and error is None:
            raise NotKept("; ".join(self._unwritten))
        for message in self._unwritten:  # something worse has happened
            say(f"note     {message}")

    def _write(self, what: str, file: Path, write: Callable[[Path], str]) -> None:
        """Write it and tell of it, or know that it could not be."""
        try:
            say(f"{what:8} {file}: {write(file)}")
        except OSError as problem:
            self._unwritten.append(f"--{what} {file} could not be written: {problem.strerror or problem}")

    @staticmethod
    def _put_down(log: TraceLog, about: dict[str, Any], file: Path) -> str:
        slices, dropped = log.write(file, about)
        lost = f", {dropped:,} more that there was no room for" if dropped else ""
        return f"{slices:,} reads{lost}"

    def _draw(self, timeline: Timeline, log: TraceLog, about: dict[str, Any], file: Path) -> str:
        assert self._engine is not None
        about = {name: about[name] for name in ("ended", "model", "settings")}
        return write_timeline(file, timeline, log, self._loading.timeline_passes, self._engine.config, about)


def _ended(error: BaseException | None) -> str:
    """How the run ended, for who reads of it."""
    return "done" if error is None else str(error) or type(error).__name__


def about_run(engine: Engine, note: str | None, ended: str) -> dict[str, Any]:
    """What a reader of a trace should know of the run (docs/trace.md)."""
    drives = engine.drives
    assert drives is not None
    assert drives.reader is not None
    counts, kinds, modes = drives.counts()
    rates = drives.reader.rates()
    process, disks = drives.witnessed()
    return {
        "ended": ended,
        "model": model(engine, note),
        "settings": settings(engine),
        "drives": {
            name: {"mode": modes[name], "learned_bytes_per_s": rates[name], **asdict(counts[name])} for name in counts
        },
        "kinds": {kind: count.requested_bytes for kind, count in kinds.items()},
        "process_read_bytes": process,
        "disks": {
            disk: {"drives": list(above), "on": list(disks_below_image(disk)), **asdict(done)}
            for disk, (above, done) in disks.items()
        },
    }
