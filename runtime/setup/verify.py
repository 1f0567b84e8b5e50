"""Every copy of every expert, read whole and held against the manifest; what the manifest lacks is added to it.

Whose bytes are right, for an expert that the manifest does not know: the model directory's, where it has the expert;
else those of a drive whose own manifest says the same of its copy; else those on which all copies agree. Copies that
differ, with nobody to say which is right, are reported and nothing is put down.

Reading and judging are apart: `read_all` gives what was found, `judge` decides, and touches no file.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from runtime.checkpoint.manifest import Digest, Manifest, digest
from runtime.drives.device import DeviceError
from runtime.drives.jobs import DEPTH
from runtime.progress import Progress
from runtime.setup.copies import Copies
from runtime.weights.checks import mebibytes
from runtime.weights.placement import MODEL, ExpertFiles

GIVE_UP = 64
"""Reads in a row that fail before a drive is left alone."""
LOOK_S = 0.2
"""How often somebody who waits looks whether to stop."""

Key = tuple[int, int]
"""(layer, expert)"""


@dataclass
class Found:
    """What was read of one drive. seen: the digests of what could be read; the rest is `unreadable`, or left alone."""

    copies: Copies
    seen: Manifest
    unreadable: dict[Key, str] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Copies that were read, well or not."""
        return int(np.count_nonzero(self.seen.known)) + len(self.unreadable)

    @property
    def unread(self) -> int:
        """Copies that nobody has tried to read."""
        return int(np.count_nonzero(self.copies.holder.here)) - self.read


@dataclass(frozen=True)
class Bad:
    """A copy that is not what it should be."""

    drive: str
    layer: int
    expert: int
    what: str

    def __str__(self) -> str:
        return f"drive {self.drive}: layer {self.layer} expert {self.expert}: {self.what}"


@dataclass
class Verdict:
    """bad: copies, by drive, layer and expert. differ: lines about experts of which nobody says what they should be.
    added: experts that the manifest knows now, by whose word."""

    bad: list[Bad] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    added: Counter[str] = field(default_factory=Counter)


# -- reading -------------------------------------------------------------------------------------------------------


class _Queue:
    """The copies of a drive, for several threads; empty as soon as `GIVE_UP` reads in a row have failed."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self._keys, self._lock = keys, threading.Lock()
        self._failures = 0

    def take(self) -> Key | None:
        with self._lock:
            return next(self._keys, None) if self._failures < GIVE_UP else None

    def ended(self, well: bool) -> None:
        """A read has."""
        with self._lock:
            self._failures = 0 if well else self._failures + 1


_Result = tuple[Found, Key, Digest | BaseException]


def read_all(found: Sequence[Found], progress: Progress) -> None:
    """Read every copy, all drives at once, into `found`, as it goes. What `progress` raises ends it."""
    unit = found[0].seen.expert_nbytes if found else 0
    total = unit * sum(one.unread for one in found)
    results: SimpleQueue[_Result | None] = SimpleQueue()
    stop = threading.Event()
    for one in found:
        queue = _Queue(one.copies.keys())
        for _ in range(DEPTH):
            threading.Thread(target=_read, args=(one, queue, results, stop), daemon=True).start()
    at_work, done = len(found) * DEPTH, 0
    try:
        while at_work:
            progress(done * unit, total)
            try:
                result = results.get(timeout=LOOK_S)
            except Empty:
                continue
            if result is None:
                at_work -= 1
            else:
                _note(*result)
                done += 1
    finally:
        stop.set()


def _read(one: Found, queue: _Queue, results: SimpleQueue[_Result | None], stop: threading.Event) -> None:
    """A thread's work."""
    while not stop.is_set() and (key := queue.take()) is not None:
        try:
            with one.copies.read(*key) as data:
                results.put((one, key, digest(data)))
            queue.ended(well=True)
        except BaseException as error:  # whoever waits must hear of it
            results.put((one, key, error))
            queue.ended(well=False)
    results.put(None)


def _note(one: Found, key: Key, result: Digest | BaseException) -> None:
    if isinstance(result, Digest):
        one.seen.put(*key, result)
    elif isinstance(result, DeviceError):
        one.unreadable[key] = str(result)
    else:
        raise result


# -- judging -------------------------------------------------------------------------------------------------------

THE_MODEL, A_REPLICA, AGREED, ALONE = (
    "the model directory",
    "a drive's own manifest",
    "copies that agree",
    "a lone copy",
)


def judge(manifest: Manifest, found: Sequence[Found], own: Mapping[str, Manifest]) -> Verdict:
    """Compare what was read with the manifest, which learns what it did not know. own: manifests of drives, by name."""
    verdict = Verdict()
    for one in found:
        if one.copies.name == MODEL:
            new = one.seen.known & ~manifest.known
            manifest.take(one.seen, new)
            verdict.added[THE_MODEL] += int(np.count_nonzero(new))
    layers = list(manifest.rows)
    for row, expert in np.argwhere(~manifest.known).tolist():
        _settle(manifest, (layers[row], expert), found, own, verdict)
    for one in found:
        name = one.copies.name
        verdict.bad += [Bad(name, *key, what) for key, what in one.unreadable.items()]
        if isinstance(one.copies.holder, ExpertFiles):
            verdict.bad += [Bad(name, *odd) for odd in one.copies.holder.odd]
        for row, expert in np.argwhere(one.seen.unlike(manifest)).tolist():
            verdict.bad.append(_bad(manifest, one, (layers[row], expert), own.get(name)))
    verdict.bad.sort(key=lambda bad: (bad.drive, bad.layer, bad.expert))
    verdict.added = +verdict.added
    return verdict


def _bad(manifest: Manifest, one: Found, key: Key, own: Manifest | None) -> Bad:
    """What is wrong with a copy."""
    seen, wanted = one.seen.get(*key), manifest.get(*key)
    assert seen is not None
    assert wanted is not None
    wrong = np.flatnonzero(seen.blocks != wanted.blocks).tolist()
    what = f"{one.copies.place(*key)}: MiB {mebibytes(wrong)} of {len(wanted.blocks)} not as the manifest says"
    if own is not None and (written := own.get(*key)) is not None and written.sha256 == seen.sha256:
        what += ", but what the drive's own manifest says: a copy of other weights"
    return Bad(one.copies.name, *key, what)


def _settle(
    manifest: Manifest, key: Key, found: Sequence[Found], own: Mapping[str, Manifest], verdict: Verdict
) -> None:
    """An expert that the manifest does not know and the model directory cannot tell: what do its copies say?"""
    row, expert = manifest.rows[key[0]], key[1]
    holders = [one for one in found if one.copies.holder.here[row, expert] and key not in one.unreadable]
    read = {one.copies.name: seen for one in holders if (seen := one.seen.get(*key)) is not None}
    if not read or len(read) < len(holders):
        return  # nothing to go by, or not yet all of it
    said = {name: known.get(*key) for name, known in own.items() if name in read}
    vouched = {s.sha256: s for name, s in said.items() if s is not None and s.sha256 == read[name].sha256}
    by_content: dict[bytes, list[str]] = {}
    for name, seen in read.items():
        by_content.setdefault(seen.sha256, []).append(name)
    if len(vouched) == 1:
        right, word = next(iter(vouched.values())), A_REPLICA
    elif len(by_content) == 1:
        right, word = next(iter(read.values())), AGREED if len(read) > 1 else ALONE
    else:
        groups = sorted(by_content.values(), key=len, reverse=True)
        hint = f"; most likely right: {' and '.join(groups[0])}" if 2 * len(groups[0]) > len(read) > 2 else ""
        sides = " from ".join(" and ".join(names) for names in groups)
        verdict.differ.append(f"layer {key[0]} expert {expert}: drives differ, {sides}{hint}")
        return
    manifest.put(*key, right)
    verdict.added[word] += 1
