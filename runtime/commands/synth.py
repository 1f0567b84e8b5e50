"""`synth`: a synthetic checkpoint, with a bar."""

from __future__ import annotations

from pathlib import Path

from runtime.commands.terminal import Interrupts, progress, say
from runtime.setup.synth import synthesize
from runtime.units import size


def synth(
    shape: str,
    out: Path,
    *,
    layers: int | None,
    experts: int | None,
    top_k: int | None,
    vocab: int | None,
    seed: int,
) -> None:
    """Write the checkpoint; interrupted, it leaves nothing behind."""
    with Interrupts() as stop, progress("writing", in_bytes=True) as report:

        def advanced(done: int, total: int) -> None:
            stop.check("writing")
            report(done, total)

        nbytes = synthesize(
            shape, out, layers=layers, experts=experts, top_k=top_k, vocab=vocab, seed=seed, progress=advanced
        )
    say(f"{out}: {size(nbytes)} of random weights, shape {shape}, seed {seed}")
