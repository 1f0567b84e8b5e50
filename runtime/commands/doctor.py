"""`doctor`: what a run would use here, and why, a line each; and what stands in its way.

Of the model it asks what `run` asks, through the same call, and stops where `run` would begin to load.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.converted import FILE_NAME, ConvertedTrunk
from runtime.checkpoint.files import descriptor_budget
from runtime.commands.drives import parse_drives
from runtime.commands.loading import COMPILED_ONCE
from runtime.commands.map import disk_text, look
from runtime.commands.terminal import write
from runtime.drives.buffers import HAS_HUGE
from runtime.drives.identity import Identity, same_device
from runtime.drives.mounts import mounts
from runtime.drives.remembered import Remembered
from runtime.errors import CheckpointError, ExpertstreamError, StorageError, UsageError
from runtime.generate import Engine, MemoryPlan, embedded_model
from runtime.generate.embedded import NOTE
from runtime.generate.engine import default_backend, default_threads
from runtime.generate.limits import memory_limit
from runtime.generate.record import versions
from runtime.home import home
from runtime.ops import backend_type
from runtime.text.tokenizer import Tokenizer
from runtime.units import parse_size, size
from runtime.weights.checks import ReadChecks
from runtime.weights.layout import Drives, Layout
from runtime.weights.trunk import Precision

SCHEMA = "expertstream.doctor/1"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FEW_DESCRIPTORS = 512
"""Fewer, and files of a large checkpoint are closed and opened again while it is read."""
LITTLE_ROOM = 100_000_000
"""Bytes that manifests, routes and probes may come to take."""

VIRTUAL = ("virtio", "xen", "virtual")
"""Buses whose disks are said to be rotational whatever they are."""

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """problem: a run would not work; note: it would, and could be better."""

    about: str
    level: Level
    text: str


def doctor(model: Path | None, drives: Sequence[str], trunk: Precision, memory: str | None, as_json: bool) -> int:
    """Look and tell. Returns the status that `run` would end with, 0 when it would work."""
    backend = default_backend()
    findings, error = list(_machine(backend)), None
    for part in (partial(_model, model, drives, backend, trunk, memory, findings), partial(_require_kernels, backend)):
        try:
            part()
        except ExpertstreamError as found:
            if not any(finding.text == str(found) for finding in findings):
                findings.append(Finding(found.code.replace("_", " "), "problem", str(found)))
            error = error or found
    if as_json:
        record: dict[str, Any] = {"schema": SCHEMA, "backend": backend, "findings": [f._asdict() for f in findings]}
        if error is not None:
            record["error"] = {"code": error.code, "message": str(error)}
        write(json.dumps(record) + "\n")
    else:
        write("".join(f"{level:8} {about:12} {_indented(text)}\n" for about, level, text in findings))
    return 0 if error is None else error.exit_code


def _indented(text: str) -> str:
    return text.replace("\n", f"\n{'':22}")


# --- the machine ---


def _machine(backend: str) -> Iterator[Finding]:
    found = versions()
    yield Finding("python", "ok", f"{found.pop('python')} at {sys.executable}")
    yield Finding("versions", "ok", ", ".join(f"{name} {v or 'is not there'}" for name, v in found.items()))
    yield from _kernels()
    yield _mlx(found["mlx"])
    yield Finding("backend", "ok", f"{backend}, since MLX has {'a' if backend == 'mlx' else 'no'} GPU here")
    yield Finding("memory", "ok", str(memory_limit(None)))
    yield _huge_pages()
    yield _descriptors()
    yield _home()


def _kernels() -> Iterator[Finding]:
    threads = default_threads()
    try:
        backend_type("cpu")
    except UsageError as error:
        yield Finding("processor", "note", f"{threads} threads; {error}")
        return
    from runtime.ops.kernels import jit

    portable = jit.VECTORS == "portable"
    instructions = "no vector instructions that are known" if portable else jit.VECTORS
    yield Finding("processor", "note" if portable else "ok", f"{threads} threads, {instructions}")
    missing = jit.uncompiled()
    once = COMPILED_ONCE.partition(": ")[2]
    yield Finding(
        "kernels",
        "note" if missing else "ok",
        f"{missing} are still to be compiled, by the first run: {once}" if missing else "compiled",
    )


def _require_kernels(backend: str) -> None:
    """Raise UsageError where the kernels of a run could not be compiled."""
    if backend == "cpu":
        backend_type(backend)
        from runtime.ops.kernels import jit

        jit.require_compiler()


def _mlx(version: str | None) -> Finding:
    try:
        import mlx.core as mx
    except ImportError as error:
        return Finding("mlx", "note", f"it cannot be imported ({error}): there is no mlx backend")
    device, facts = mx.default_device(), dict[str, Any]()
    with suppress(RuntimeError, ValueError):
        facts = dict(mx.device_info(device))
    kind = "Metal" if mx.metal.is_available() else "CUDA" if mx.cuda.is_available() else "no GPU"
    return Finding("mlx", "ok", f"{version}, {kind}, computes on {facts.get('device_name', device)}")


def _huge_pages() -> Finding:
    about = "huge pages"
    if not HAS_HUGE:
        return Finding(about, "ok", "this system has none to ask for")
    try:
        mode = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding(about, "note", "this kernel has none: reads are cut into shorter ones")
    if mode == "never":
        return Finding(about, "note", f"{HUGE_PAGES} says never: reads are cut into shorter ones; madvise is enough")
    return Finding(about, "ok", f"{mode}, and buffers ask for them")


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("descriptors", "ok", "no limit")
    few = soft < FEW_DESCRIPTORS
    advice = f": ulimit -n {FEW_DESCRIPTORS} spares opening files again" if few else ""
    kept = f"{descriptor_budget()} of them for the model's files"
    return Finding("descriptors", "note" if few else "ok", f"{soft:,} at most, {kept}{advice}")


def _home() -> Finding:
    place = home()
    try:
        there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Finding("home", "note", f"{place} cannot be written: {error.strerror or error}; nothing will be learned")
    return Finding("home", "note" if free < LITTLE_ROOM else "ok", f"{place}, {size(free)} free")


# --- the model ---


class _Planned(Exception):
    """Everything before loading went well."""


def _model(
    model: Path | None,
    drives: Sequence[str],
    backend: str,
    trunk: Precision,
    memory: str | None,
    findings: list[Finding],
) -> None:
    """Add what is found on the way to loading. Raises what `run` would raise."""
    nbytes = None if memory is None else parse_size(memory, "--memory")
    layout = parse_drives(drives, ())
    path = model or embedded_model()

    def opened(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
        findings.extend(_checkpoint(checkpoint, tokenizer, NOTE if model is None else str(path)))
        findings.extend(_drives(layout.paths(path)))
        findings.extend(_converted(checkpoint, layout, trunk))

    def planned(checkpoint: Checkpoint, plan: MemoryPlan, drives: Drives | None, checks: ReadChecks) -> None:
        findings.extend(_reads(drives, checks))
        findings.append(Finding("plan", "ok", str(plan)))
        if plan.streaming:
            findings.append(Finding("trunk", "note", plan.streaming))
        raise _Planned

    with suppress(_Planned):
        Engine.load(path, backend=backend, layout=layout, trunk=trunk, memory=nbytes, prompt=opened, announce=planned)


def _checkpoint(checkpoint: Checkpoint, tokenizer: Tokenizer | None, name: str) -> Iterator[Finding]:
    config = checkpoint.config
    yield Finding("model", "ok", name)
    yield Finding(
        "checkpoint",
        "ok",
        f"{config.num_hidden_layers} layers, {config.num_experts} experts, fingerprint {checkpoint.fingerprint[:16]}",
    )
    for note in checkpoint.notes:
        yield Finding("checkpoint", "note", note)
    if tokenizer is None:
        yield Finding("checkpoint", "note", "it has no tiktoken.model: prompts can be given as ids only")


def _drives(places: dict[str, Path]) -> Iterator[Finding]:
    found, remembered, identities = mounts(), Remembered.load(), dict[str, Identity]()
    for name, path in places.items():
        entry = look(path, found, remembered)
        identity = identities[name] = entry.identity
        where = f"{identity.filesystem} on {identity.source}"
        facts = [where, *(disk_text(disk) for disk in entry.disks), f"read {entry.mode}"]
        why = []
        if entry.mode not in ("direct", "nocache"):
            why.append("what is read goes through the page cache")
        if any(disk.rotational and disk.bus not in VIRTUAL for disk in entry.disks):
            why.append("a disk that turns is far too slow for experts")
        if any(disk.bus == "usb" for disk in entry.disks):
            why.append("drives on one USB hub share what it carries")
        yield Finding(f"drive {name}", "note" if why else "ok", "; ".join([", ".join(facts), *why]))
    for names in same_device(identities):
        yield Finding("drives", "note", f"{' and '.join(names)} are one device, and give no more than one")


def _converted(checkpoint: Checkpoint, layout: Layout, trunk: Precision) -> Iterator[Finding]:
    """Every converted trunk, whether it is asked for or not; one that is and is refused ends the run."""
    for name, path in layout.directories:
        about, file = f"drive {name}", path / FILE_NAME
        if not os.path.lexists(file):
            continue
        try:
            ConvertedTrunk.open(file, checkpoint)
        except CheckpointError as error:
            yield Finding(about, "problem" if trunk == "int8" else "note", str(error))
        except StorageError as error:
            yield Finding(about, "note", str(error))
        else:
            read = "is read" if trunk == "int8" else "only --trunk int8 would read"
            yield Finding(about, "ok", f"its trunk in int8 is this model's, and {read}")


def _reads(drives: Drives | None, checks: ReadChecks) -> Iterator[Finding]:
    if drives is None:
        yield Finding("reads", "ok", "plainly, from the model's directory: its experts are small")
    else:
        for line in drives.lines():
            yield Finding("reads", "note" if line in drives.notes else "ok", line)
    yield Finding("verify", "ok" if checks.active else "note", str(checks))
    for note in checks.notes:
        yield Finding("verify", "note", note)
