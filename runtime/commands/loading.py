"""From options to a loaded engine, telling what is loaded before it is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runtime.checkpoint import Checkpoint
from runtime.commands.arguments import Passes
from runtime.commands.terminal import Interrupts, progress, say
from runtime.drives.trace import TraceLog
from runtime.errors import UsageError
from runtime.generate import Engine, MemoryPlan, embedded_model
from runtime.generate.embedded import NOTE
from runtime.generate.engine import default_backend, default_threads
from runtime.model.timeline import Timeline
from runtime.text.tokenizer import Tokenizer
from runtime.weights.checks import ReadChecks, VerifyReads
from runtime.weights.layout import Drives, Layout
from runtime.weights.trunk import Precision

MAX_THREADS = 1024

PATIENCE_S = 2.0
"""After this long without an answer people are told what takes so long."""

COMPILED_ONCE = "compile  the kernels, for this machine: once, part of a minute"
COMPILED_ALWAYS = (
    "compile  the kernels: they cannot be kept (no writable cache directory: set NUMBA_CACHE_DIR), "
    "so at every start, part of a minute"
)

Ready = Callable[[Checkpoint, Tokenizer | None], int | None]
"""Called when the checkpoint is open and nothing of it is loaded: the time to refuse a request.

Says how many tokens the only prompt has; None when there will be others.
"""


@dataclass(frozen=True)
class Loading:
    """What `run` and `chat` let people choose about the engine. None: the default. Sizes in bytes."""

    model: Path | None = None
    backend: str | None = None
    threads: int | None = None
    trunk: Precision = "bf16"
    context: int | None = None
    prefill_chunk: int | None = None
    memory: int | None = None
    expert_cache: int | None = None
    reuse: bool = True
    snapshots: int | None = 0
    layout: Layout = field(default_factory=Layout)
    trace: Path | None = None
    timeline: Path | None = None
    timeline_passes: Passes | Literal["typical"] = "typical"
    inputs: Mapping[str, Path] = field(default_factory=dict)
    """Files that the command reads beside the model, by option: none of them is written."""
    verify_reads: VerifyReads = "first"
    prefetch: bool | None = None

    @property
    def path(self) -> Path:
        """The model's directory."""
        return self.model or embedded_model()

    @property
    def sources(self) -> dict[str, Path]:
        """The directories that are read, by what they are."""
        drives = {f"the directory of drive {name}": path for name, path in self.layout.directories}
        return {"the model's directory": self.path, **drives}

    @property
    def note(self) -> str | None:
        """What the model is, when the user did not name one."""
        return NOTE if self.model is None else None

    def resolved_threads(self, backend: str) -> int | None:
        """The threads of our own kernels; None on the backends that have none. Raises UsageError."""
        if backend == "cpu":
            if self.threads is not None and self.threads < 1:
                raise UsageError(f"--threads {self.threads}: at least one thread is needed")
            if self.threads is not None and self.threads > MAX_THREADS:
                raise UsageError(f"--threads {self.threads}: no more than {MAX_THREADS} make sense")
            return self.threads or default_threads()
        if self.threads is not None:
            raise UsageError(f"--threads is for the cpu backend; {backend} does not take it: leave it out")
        return None

    def load(
        self, stop: Interrupts, ready: Ready, trace: TraceLog | None = None, timeline: Timeline | None = None
    ) -> Engine:
        """Open, announce on stderr, ask `ready`, load. Raises what Engine.load and `ready` raise, or Cancelled."""
        backend = self.backend or default_backend()
        threads = self.resolved_threads(backend)

        def announce(
            checkpoint: Checkpoint,
            plan: MemoryPlan,
            drives: Drives | None,
            checks: ReadChecks,
        ) -> None:
            config = checkpoint.config
            say(f"model    {self.note or checkpoint.path}")
            say(
                f"         {config.num_hidden_layers} layers, {config.num_experts} experts, "
                f"fingerprint {checkpoint.fingerprint[:16]}, backend {backend}"
                + (f" with {threads} thread{'s' if threads > 1 else ''}" if threads else "")
            )
            if self.trunk == "int8":
                say("         not weight-exact: the trunk in int8, as asked")
            for note in checkpoint.notes:
                say(f"         {note}")
            for number, line in enumerate(drives.lines() if drives is not None else ()):
                say(f"{'' if number else 'drives':8} {line}")
            if drives is not None or checks.active:
                say(f"verify   {checks}")
            for note in checks.notes:
                say(f"         {note}")
            say(f"memory   {plan}")
            if plan.streaming:
                say(f"trunk    {plan.streaming}")
            if backend == "cpu":
                _compile(stop)

        with progress("loading", in_bytes=True) as report:
            return Engine.load(
                self.path,
                backend=backend,
                threads=threads,
                trunk=self.trunk,
                context=self.context,
                chunk=self.prefill_chunk,
                memory=self.memory,
                expert_cache=self.expert_cache,
                reuse=self.reuse,
                snapshots=self.snapshots,
                layout=self.layout,
                trace=trace,
                timeline=timeline,
                verify_reads=self.verify_reads,
                prefetch=self.prefetch,
                prompt=ready,
                announce=announce,
                progress=stop.stoppable("loading", report),
            )


@contextlib.contextmanager
def learning(engine: Engine) -> Iterator[None]:
    """What is learned of the experts in the block is kept, however it ends; where it cannot be, a line says so."""
    try:
        yield
    finally:
        if (heat := engine.experts.heat) is not None:
            heat.save()
            if heat.note:
                say(f"note     {heat.note}")


def _compile(stop: Interrupts) -> None:
    """Have the kernels of the `cpu` backend ready. New on a machine, they take part of a minute."""
    from runtime.ops.cpu import CpuOps

    started, told = time.perf_counter(), False
    with progress("compiling") as report:

        def compiled(done: int, total: int) -> None:
            nonlocal told
            stop.check("compiling")
            if not told and done < total and time.perf_counter() - started > PATIENCE_S:
                told = True
                say(COMPILED_ONCE if CpuOps.keeps_kernels() else COMPILED_ALWAYS)
            if told:
                report(done, total)

        CpuOps.warm_up(compiled)
