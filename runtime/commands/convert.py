"""`convert`: the trunk in int8, made once for all runs that ask for it."""

from __future__ import annotations

import time
from pathlib import Path

from runtime.checkpoint import Checkpoint
from runtime.commands.terminal import Interrupts, progress, say, write
from runtime.generate.embedded import NOTE, embedded_model
from runtime.setup.convert import convert as make
from runtime.units import size


def convert(model: Path | None, out: Path) -> None:
    """Make it, or compare the one that is there; interrupted, nothing is left."""
    started = time.monotonic()
    with Checkpoint.open(model or embedded_model(), experts_elsewhere=True) as checkpoint:
        say(f"model    {NOTE if model is None else checkpoint.path}")
        say("         not weight-exact: the trunk in int8, as asked")
        with Interrupts() as stop, progress("converting", in_bytes=True) as report:
            outcome = make(checkpoint, out, stop.stoppable("converting", report))
    what = f"{outcome.matrices:,} matrices, {size(outcome.nbytes)}"
    done = f"in {time.monotonic() - started:.1f} s, read back {outcome.mode}"
    write(f"{outcome.path}: {what}, {done if outcome.written else f'were there and are right, {done}'}\n")
    say(f"use it   with --trunk int8 --drive NAME={out}")
