"""`--trace FILE`: every read of a run written down, also of one that fails or is stopped."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any

from runtime.commands.arguments import output_file
from runtime.commands.loading import Loading, Ready
from runtime.commands.terminal import Interrupts, say
from runtime.drives.trace import TraceLog
from runtime.errors import StorageError
from runtime.generate import Engine
from runtime.generate.record import model, settings


class Tracing:
    """Notes what the engine it loads reads, and writes it when the block ends, however it ends.

    Refuses a place that cannot be written before anything is loaded. Without `loading.trace` it does nothing.
    """

    def __init__(self, loading: Loading) -> None:
        self._loading = loading
        self._file = None if loading.trace is None else output_file(loading.trace, "--trace", loading.sources)
        self._log: TraceLog | None = None
        self._engine: Engine | None = None

    def load(self, stop: Interrupts, ready: Ready) -> Engine:
        """`Loading.load`, traced."""
        self._log = None if self._file is None else TraceLog()
        self._engine = self._loading.load(stop, ready, self._log)
        return self._engine

    def __enter__(self) -> Tracing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is None or self._log is None or self._file is None:
            return
        ended = "done" if error is None else str(error) or type(error).__name__
        try:
            slices, dropped = self._log.write(self._file, about_run(self._engine, self._loading.note, ended))
        except OSError as problem:
            message = f"--trace {self._file} could not be written: {problem.strerror or problem}"
            if error is not None:
                say(f"note     {message}")
                return
            raise StorageError(message) from None
        lost = f", {dropped:,} more that there was no room for" if dropped else ""
        say(f"trace    {self._file}: {slices:,} reads{lost}")


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
        "disks": {disk: {"drives": list(above), **asdict(done)} for disk, (above, done) in disks.items()},
    }
