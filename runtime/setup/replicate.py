"""Copies of the hottest experts for another drive: chosen, compared with what is there, read, written, read back.

Nothing is removed: what the target holds counts against the budget and stays. A copy that is there and right is not
written again; one that is wrong is, where `replicate` wrote it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from runtime.checkpoint import Checkpoint
from runtime.checkpoint.manifest import Digest, Manifest, Table, digest
from runtime.drives.buffers import Buffer
from runtime.drives.device import DeviceError
from runtime.progress import Progress
from runtime.setup.copies import Copies
from runtime.setup.target import Target
from runtime.setup.usage import Uses, hottest_first
from runtime.setup.verify import LOOK_S, Key

SAVE_EVERY = 256
"""Copies after which the target's manifest is written once more: 4.5 GB of them."""


_Fetched = tuple[Buffer | None, Digest | None, str]
"""(bytes of an expert, their digest), or why there are none."""


@dataclass(frozen=True)
class Plan:
    """What the target is to hold: `there`, what it holds, and `new`, the hottest of the rest. colder: of the former,
    those that would not have been chosen."""

    there: list[Key]
    new: list[Key]
    colder: int


def choose(checkpoint: Checkpoint, counts: Uses, available: Table, here: Table, budget_bytes: int) -> Plan:
    """As many experts as the budget allows, among those that some source has or the target holds."""
    layers, room = checkpoint.config.moe_layers, budget_bytes // checkpoint.expert_nbytes
    order = [place for place in hottest_first(counts) if available[place] or here[place]]
    there = [(layers[row], expert) for row, expert in order if here[row, expert]]
    new = [(layers[row], expert) for row, expert in order if not here[row, expert]]
    colder = sum(here[place] for place in order[room:])
    return Plan(there, new[: max(0, room - len(there))], int(colder))


@dataclass
class Outcome:
    """right: copies that were there; written: of them `replaced`. lost: experts of which no source gives the bytes.
    foreign: files of the right name that hold something else, and that replicate did not write."""

    right: int = 0
    written: int = 0
    replaced: int = 0
    lost: list[str] = field(default_factory=list)
    foreign: list[Key] = field(default_factory=list)


class Replication:
    """One run of it. seen: digests of what the target holds; ours: whether replicate wrote there before."""

    def __init__(self, sources: Sequence[Copies], target: Target, manifest: Manifest, seen: Manifest, ours: bool):
        self.outcome = Outcome()
        self.learned = 0
        """Experts that the manifest did not know."""
        self._sources, self._target, self.manifest = sources, target, manifest
        self._seen, self._ours = seen, ours
        self._done = self._total = 0

    def run(self, plan: Plan, progress: Progress) -> None:
        """Do what is planned. `outcome` tells what was done, also when this raises: StorageError, or as `progress`."""
        if not self._ours and (odd := [(layer, expert) for layer, expert, _ in self._target.files.odd]):
            self.outcome.foreign = odd
            return
        todo = [key for key in plan.there if not self._is_right(key)]
        self.outcome.right = len(plan.there) - len(todo)
        self._total = len(todo) + len(plan.new)
        self._each(todo, self._compare, progress)
        if self.outcome.foreign:
            return
        if plan.new:
            self._target.save(self.manifest)
        self._each(plan.new, self._write, progress)

    def _is_right(self, key: Key) -> bool:
        seen, wanted = self._seen.get(*key), self.manifest.get(*key)
        return seen is not None and wanted is not None and seen.sha256 == wanted.sha256

    def _compare(self, key: Key, data: memoryview, found: Digest) -> None:
        """Here are the right bytes of a copy that is there."""
        seen = self._seen.get(*key)
        if seen is not None and seen.sha256 == found.sha256:
            self.outcome.right += 1
        elif not self._ours:
            self.outcome.foreign.append(key)
        else:
            self._write(key, data, found)
            self.outcome.replaced += 1

    def _write(self, key: Key, data: memoryview, found: Digest) -> None:
        self._target.put(*key, data, found)
        self.outcome.written += 1
        if self.outcome.written % SAVE_EVERY == 0:
            self._target.save(self.manifest)

    def _each(self, keys: Sequence[Key], do: Callable[[Key, memoryview, Digest], None], progress: Progress) -> None:
        """Do something with the right bytes of each expert, while a thread reads the next one."""
        unit = self.manifest.expert_nbytes
        ahead: Future[_Fetched] | None = None
        for number, key in enumerate(keys):
            now = ahead or self._begin(key)
            while not wait((now,), LOOK_S).done:
                progress(self._done * unit, self._total * unit)
            ahead = self._begin(keys[number + 1]) if number + 1 < len(keys) else None
            buffer, found, why = now.result()
            if buffer is None or found is None:
                self.outcome.lost.append(f"layer {key[0]} expert {key[1]}: {why}")
            else:
                if self.manifest.get(*key) is None:
                    self.manifest.put(*key, found)
                    self.learned += 1
                try:
                    do(key, buffer.view, found)
                finally:
                    buffer.release()
            self._done += 1
            progress(self._done * unit, self._total * unit)

    def _begin(self, key: Key) -> Future[_Fetched]:
        """Fetch on a daemon thread: an executor's would have the program wait at its end for a read that hangs."""
        coming: Future[_Fetched] = Future()

        def fetch() -> None:
            try:
                coming.set_result(self._fetch(key))
            except BaseException as error:
                coming.set_exception(error)

        threading.Thread(target=fetch, name="drives-source", daemon=True).start()
        return coming

    def _fetch(self, key: Key) -> _Fetched:
        """The expert from the first source that gives what the manifest says. Where that says nothing, the first source
        that has the expert decides, which is the model's directory if it has."""
        wanted, reasons = self.manifest.get(*key), []
        row = self.manifest.rows[key[0]]
        holders = [source for source in self._sources if source.holder.here[row, key[1]]]
        for source in holders if wanted is not None else holders[:1]:
            try:
                buffer = source.fetch(*key)
            except DeviceError as error:
                reasons.append(f"drive {source.name}: {error}")
                continue
            found = digest(buffer.view)
            if wanted is None or found.sha256 == wanted.sha256:
                return buffer, found, ""
            buffer.release()
            reasons.append(f"drive {source.name}: {source.place(*key)} is not as the manifest says")
        return None, None, "; ".join(reasons) or "no source has it, to compare the copy that is there with"
