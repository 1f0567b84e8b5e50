"""`verify`: are all copies of all experts what they should be? Makes the manifest that says so, where there is none.

A converted trunk has its own checksums, and is compared with them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import FILE_NAME, Form, damaged
from runtime.checkpoint.manifest import COPY_NAME, Manifest, load_if_there, manifest_path
from runtime.commands.terminal import Interrupts, progress, say, write
from runtime.errors import Cancelled, CheckpointError, StorageError, UsageError, shortened
from runtime.generate.embedded import NOTE, embedded_model
from runtime.progress import Progress, Tally
from runtime.setup.convert import read_back
from runtime.setup.copies import open_copies
from runtime.setup.verify import Found, Verdict, judge, read_all
from runtime.units import size
from runtime.weights.layout import Layout
from runtime.weights.placement import MODEL


def verify(model: Path | None, layout: Layout, *, build: bool, named: Path | None) -> None:
    """Read everything, say what is there, keep the manifest. Raises StorageError when a copy is bad.

    Stopped, it keeps what it has learned of the experts it had read; the next run reads all of them again.
    """
    if build and named is not None:
        raise UsageError("--build makes a manifest and --manifest names one: give one of them")
    with ExitStack() as stack:
        checkpoint = Checkpoint.open(model or embedded_model(), experts_elsewhere=bool(layout.directories))
        stack.enter_context(checkpoint)
        say(f"model    {NOTE if model is None else checkpoint.path}")
        manifest, before = _manifest(checkpoint, build, named)
        _warn_of_home(checkpoint)
        copies = open_copies(checkpoint, layout)
        for one in copies:
            stack.callback(one.close)
        own = _own_manifests(checkpoint, layout)
        found = [Found(one, Manifest(checkpoint)) for one in copies]
        started, stopped = time.monotonic(), None
        with Interrupts() as stop, progress("verifying", in_bytes=True) as report:
            try:
                read_all(found, stop.stoppable("verifying", report))
            except Cancelled as error:
                stopped = error
            verdict = judge(manifest, found, own)
            _tell(found, verdict, time.monotonic() - started)
            problems = _save(checkpoint, manifest, before, verdict, named is not None)
            trunks: list[str] = []
            try:
                for wrong in _trunks(checkpoint, layout, stop.stoppable("verifying", report)) if not stopped else ():
                    trunks.append(wrong)
            except Cancelled as error:
                stopped = error
            if verdict.bad or verdict.differ or trunks or problems:
                raise _error(found, verdict, trunks, problems)
            if stopped is not None:
                raise stopped


def _manifest(checkpoint: Checkpoint, build: bool, named: Path | None) -> tuple[Manifest, Manifest | None]:
    """(what is to be compared with, the one that was there). Raises CheckpointError for one that was named."""
    path = manifest_path(checkpoint)
    before, trouble = load_if_there(path, checkpoint)
    if trouble:
        say(f"note     {trouble}")
    if named is not None:
        # whatever it is, it need not be ours to remove
        return Manifest.load(named, checkpoint, ": name another with --manifest"), before
    manifest = Manifest(checkpoint)
    if before is not None and not build:
        manifest.made_from = before.made_from
        manifest.take(before, before.known)
    return manifest, before


def _warn_of_home(checkpoint: Checkpoint) -> None:
    """Say at once, and not after hours, that nothing can be kept."""
    folder = manifest_path(checkpoint).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK) else "it cannot be written to"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        say(f"note     a new manifest cannot be kept in {folder}: {why}")


def _own_manifests(checkpoint: Checkpoint, layout: Layout) -> dict[str, Manifest]:
    own = {}
    for name, path in layout.directories:
        manifest, trouble = load_if_there(path / COPY_NAME, checkpoint)
        if manifest is not None:
            own[name] = manifest
        elif trouble:
            say(f"note     drive {name}: {trouble}")
    return own


def _tell(found: Sequence[Found], verdict: Verdict, seconds: float) -> None:
    """What was read of each drive, on stdout."""
    for one in found:
        bad = sum(b.drive == one.copies.name for b in verdict.bad)
        nbytes = int(np.count_nonzero(one.seen.known)) * one.seen.expert_nbytes
        rest = f", {one.unread:,} not read" if one.unread else ""
        said = f"{bad:,} bad" if bad else "none bad"
        write(f"{one.copies.name:8} {one.read:,} copies, {size(nbytes)} in {seconds:.1f} s, {one.copies.mode}: ")
        write(f"{said}{rest}\n")


def _trunks(checkpoint: Checkpoint, layout: Layout, progress: Progress) -> Iterator[str]:
    """Read every converted trunk whole, and say so on stdout; what is wrong with those that are bad."""
    nbytes = sum(span.nbytes for span in Form.of(checkpoint).matrices.values())
    for name, path in layout.directories:
        if not os.path.lexists(path / FILE_NAME):
            continue
        started = time.monotonic()
        try:
            mode, bad = read_back(path / FILE_NAME, checkpoint, Tally(progress, nbytes))
        except (CheckpointError, StorageError) as error:
            yield f"drive {name}: {error}"
            continue
        took = f"{size(nbytes)} in {time.monotonic() - started:.1f} s, {mode}"
        write(f"{name:8} the trunk in int8, {took}: {'bad' if bad else 'right'}\n")
        if bad:
            yield f"drive {name}: {damaged(path / FILE_NAME, bad)}"


def _save(
    checkpoint: Checkpoint, manifest: Manifest, before: Manifest | None, verdict: Verdict, named: bool
) -> list[str]:
    """Keep the manifest, if it has anything new; what went wrong."""
    path, known = manifest_path(checkpoint), int(np.count_nonzero(manifest.known))
    words = [*filter(None, manifest.made_from.split(", ")), *verdict.added]
    manifest.made_from = ", ".join(dict.fromkeys(words))
    changed = before is not None and int(np.count_nonzero(manifest.unlike(before)))
    added = ", ".join(f"{count:,} now from {word}" for word, count in verdict.added.items())
    changes = f"; {changed:,} are other than before" if changed else ""
    said = f"{known:,} of {manifest.known.size:,} experts{added and f', {added}'}{changes}"
    if not known or not (verdict.added or named or changed):
        write(f"manifest {said}\n")
        return []
    try:
        manifest.save(path)
    except OSError as error:
        write(f"manifest {said}; not kept\n")
        advice = "make room, or set" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "set"
        why = error.strerror or error
        return [f"the manifest cannot be written to {path}: {why}; {advice} EXPERTSTREAM_HOME"]
    write(f"manifest {said}: {path}\n")
    return []


def _error(found: Sequence[Found], verdict: Verdict, trunks: list[str], problems: list[str]) -> StorageError:
    """One line, and the copies by name."""
    lines = [str(bad) for bad in verdict.bad] + verdict.differ
    if not lines:
        first, *others = trunks + problems
        return StorageError(first, others)
    total, said = sum(one.read for one in found), []
    if verdict.bad:
        said.append(f"{len(verdict.bad):,} of {total:,} copies of experts are bad")
    if verdict.differ:
        said.append(f"of {len(verdict.differ):,} experts the copies differ and no manifest says which is right")
    advice = "remove them, and let replicate --to fill the drive again"
    if any(bad.drive == MODEL for bad in verdict.bad):
        advice = "fetch the model's files again, or, if they were replaced on purpose, verify --build"
    return StorageError(f"{'; '.join(said)}; {advice}", [*shortened(lines), *trunks, *problems])
