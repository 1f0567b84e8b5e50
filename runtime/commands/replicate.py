"""`replicate`: copies of the hottest experts to another drive, verified as they are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.inventory import expert_file
from runtime.checkpoint.manifest import COPY_NAME, AnotherModel, Manifest, load_if_there, manifest_path
from runtime.commands.terminal import Interrupts, progress, say, write
from runtime.drives.identity import identify, same_device
from runtime.errors import CheckpointError, StorageError, UsageError, shortened
from runtime.generate.embedded import NOTE, embedded_model
from runtime.setup.copies import Copies, open_copies
from runtime.setup.replicate import Outcome, Plan, Replication, choose
from runtime.setup.target import TARGET, Target
from runtime.setup.usage import Uses, read_usage
from runtime.setup.verify import Found, read_all
from runtime.units import size
from runtime.weights.heat import Heat
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL


@dataclass(frozen=True)
class Request:
    """What is asked for. budget_bytes: None for all experts. usage: a file, or None for what runs have learned."""

    to: Path
    budget_bytes: int | None
    floor_bytes: int
    usage: Path | None
    same_device: bool = False
    replace: bool = False


def replicate(model: Path | None, layout: Layout, request: Request) -> None:
    """Choose, copy, tell. Raises StorageError when not all of it could be done; what is done stays."""
    directory = model or embedded_model()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(directory, experts_elsewhere=bool(layout.directories)))
        _refuse_places(directory, layout, request)
        say(f"model    {NOTE if model is None else checkpoint.path}")
        counts, word = _usage(checkpoint, request)
        target = Target(checkpoint, request.to, request.floor_bytes)
        stack.callback(target.close)
        sources = open_copies(checkpoint, layout)
        for one in sources:
            stack.callback(one.close)
        ours = _is_ours(checkpoint, request)
        plan = _plan(checkpoint, sources, target, counts, request)
        _announce(checkpoint, target, plan, word, request.budget_bytes)
        manifest = _known(checkpoint, sources)
        with Interrupts() as stop:
            seen = _look(checkpoint, target, plan, stop)
            work = Replication(sources, target, manifest, seen, ours or request.replace)
            _work(work, plan, target, checkpoint, stop)
        _end(work.outcome, target)


def _refuse_places(model: Path, layout: Layout, request: Request) -> None:
    """Raise UsageError for a target that would be no further copy on another drive."""
    if not request.to.is_dir():
        raise UsageError(f"--to {request.to}: there is no such directory; make it, on the drive that is to have copies")
    to = request.to.resolve()
    if to.is_relative_to(model.resolve()):
        raise UsageError(
            f"--to {request.to} is inside the model's directory, where nothing is written: give another one"
        )
    for name, path in layout.directories:
        if to.is_relative_to(path.resolve()):
            raise UsageError(
                f"--to {request.to} is inside the directory of drive {name}, which is read: give another one"
            )
    sources = {"the model's directory": model, **{f"drive {name}": path for name, path in layout.directories}}
    for what, path in sources.items():
        if not request.same_device and same_device({what: identify(path), TARGET: identify(to)}):
            raise UsageError(
                f"--to {request.to} is on the device of {what}: a copy there makes no read faster; give a directory on "
                "another drive, or --allow-same-device"
            )


def _usage(checkpoint: Checkpoint, request: Request) -> tuple[Uses, str]:
    """(how often each expert was used, where that is from)."""
    if request.usage is not None:
        return read_usage(request.usage, checkpoint), f"hottest first, by {request.usage}"
    heat = Heat.load(checkpoint)
    if heat.note:
        say(f"note     {heat.note}")
    if heat.counts.any():
        return heat.counts, "hottest first, by what runs have learned"
    return heat.counts, "evenly from all layers: no run has learned which are used most"


def _is_ours(checkpoint: Checkpoint, request: Request) -> bool:
    """Whether the target was written by replicate, for this model. Raises UsageError for another model's."""
    path = request.to / COPY_NAME
    if not path.exists():
        return False
    try:
        Manifest.load(path, checkpoint)
    except AnotherModel as error:
        raise UsageError(f"{error}: give --to another directory, or remove that replica first") from None
    except CheckpointError as error:
        say(f"note     {error}")
        return False
    return True


def _plan(checkpoint: Checkpoint, sources: Sequence[Copies], target: Target, counts: Uses, request: Request) -> Plan:
    """What the target is to hold. Raises UsageError for a budget under one expert, StorageError when it cannot fit."""
    available = np.zeros_like(checkpoint.experts_here)
    for source in sources:
        available |= source.holder.here
    nbytes = checkpoint.expert_nbytes
    budget = available.size * nbytes if request.budget_bytes is None else request.budget_bytes
    if budget < nbytes:
        raise UsageError(f"--budget: {size(budget)} is less than one expert, {size(nbytes)}")
    plan = choose(checkpoint, counts, available, target.files.here, budget)
    wanted, room = len(plan.new) * nbytes, max(0, target.free_bytes - request.floor_bytes)
    if wanted > room:
        fits = room // nbytes * nbytes + len(plan.there) * nbytes
        raise StorageError(
            f"{request.to} has {size(target.free_bytes)} free, of which {size(request.floor_bytes)} are to stay free, "
            f"and {size(wanted)} are to be copied: give --budget {fits} or less, or a smaller --floor"
            if fits
            else f"{request.to} has {size(target.free_bytes)} free, and {size(request.floor_bytes)} are to stay free: "
            "make room, or give a smaller --floor"
        )
    return plan


def _announce(checkpoint: Checkpoint, target: Target, plan: Plan, word: str, budget: int | None) -> None:
    nbytes, total = checkpoint.expert_nbytes, checkpoint.experts_here.size
    count = len(plan.there) + len(plan.new)
    say(f"target   {target.path}: {len(plan.there):,} copies are there, {size(target.free_bytes)} free")
    for note in target.files.notes:
        say(f"         {note}")
    everything = "all of them" if count == total else word
    say(f"plan     {count:,} of {total:,} experts, {size(count * nbytes)}, {everything}")
    say(f"         {len(plan.new):,} to be copied, {size(len(plan.new) * nbytes)}")
    if budget is not None and (there := len(plan.there) * nbytes) > budget:
        say(
            f"note     the target holds {size(there)} already, more than --budget {size(budget)}: "
            "nothing is added, and nothing is removed"
        )
    if plan.colder:
        say(f"         {plan.colder:,} copies that are there are used less than others that are not; none is removed")


def _known(checkpoint: Checkpoint, sources: Sequence[Copies]) -> Manifest:
    """What the manifest says; of experts that the model's directory lacks, also what those beside the copies say."""
    manifest = Manifest(checkpoint)
    places = [manifest_path(checkpoint)] + [s.path / COPY_NAME for s in sources if s.name != MODEL]
    for number, place in enumerate(places):
        known, trouble = load_if_there(place, checkpoint)
        if trouble:
            say(f"note     {trouble}")
        if known is not None:
            words = [*filter(None, manifest.made_from.split(", ")), *known.made_from.split(", ")]
            manifest.made_from = ", ".join(dict.fromkeys(words))
            manifest.take(known, ~manifest.known & ~(checkpoint.experts_here & (number > 0)))
    return manifest


def _look(checkpoint: Checkpoint, target: Target, plan: Plan, stop: Interrupts) -> Manifest:
    """The digests of what the target holds."""
    if not plan.there:
        return Manifest(checkpoint)
    copies = Copies(checkpoint, target.files, target.path)
    found = Found(copies, Manifest(checkpoint))
    try:
        with progress("comparing what is there", in_bytes=True) as report:
            read_all([found], stop.stoppable("comparing", report))
    finally:
        copies.close()
    return found.seen


def _work(work: Replication, plan: Plan, target: Target, checkpoint: Checkpoint, stop: Interrupts) -> None:
    """Copy, keep the manifest, tell: also of what ends before its end."""
    started = time.monotonic()
    try:
        with progress("copying", in_bytes=True) as report:
            work.run(plan, stop.stoppable("copying", report))
    except BaseException:
        with suppress(StorageError):  # a full drive is told of already
            _keep(work, target, checkpoint)
        raise
    else:
        _keep(work, target, checkpoint)
    finally:
        outcome = work.outcome
        back = f", read back {target.mode}" if target.mode else ""
        replaced = f", {outcome.replaced:,} of them in place of wrong ones" if outcome.replaced else ""
        nbytes = size(outcome.written * checkpoint.expert_nbytes)
        write(f"copied   {outcome.written:,} experts, {nbytes} in {time.monotonic() - started:.1f} s{back}{replaced}\n")
        write(f"right    {outcome.right:,} copies that were there\n")


def _keep(work: Replication, target: Target, checkpoint: Checkpoint) -> None:
    """The manifest beside the copies, and, where it has learned something, at home."""
    if work.outcome.foreign:
        return  # what is there is not ours
    manifest = work.manifest
    if work.learned:
        manifest.made_from = manifest.made_from or "what was copied"
        try:
            manifest.save(manifest_path(checkpoint))
        except OSError as error:
            say(f"note     the manifest is kept in {target.path} alone: {error.strerror or error}")
    if work.outcome.right or work.outcome.written:
        target.save(manifest)


def _end(outcome: Outcome, target: Target) -> None:
    """Raise StorageError for what could not be done."""
    if outcome.foreign:
        names = [expert_file(layer, expert) for layer, expert in outcome.foreign]
        raise StorageError(
            f"{target.path} has {len(names):,} files with the name of an expert that are not this model's, or damaged, "
            "and that replicate did not write: give --to another directory, or --replace to write them anew",
            shortened(names),
        )
    if outcome.lost:
        raise StorageError(
            f"{len(outcome.lost):,} experts could not be copied: no source gives the right bytes",
            shortened(outcome.lost),
        )
