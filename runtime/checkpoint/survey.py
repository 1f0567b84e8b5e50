"""Holds the files of a checkpoint against the inventory, and remembers where everything lies.

Every difference is collected, so that one error names them all. The headers are read file by file and the places
of half a million expert tensors kept in arrays: at the released size a survey takes seconds and a few tens of
megabytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.headers import FETCH_AGAIN, Header, TensorSpan, read_weight_map, scan, truncation
from runtime.checkpoint.inventory import (
    EXPERT_TENSORS,
    LAYERS,
    TensorSpec,
    expert_inventory,
    expert_prefix,
    released_name,
    trunk_inventory,
)
from runtime.config import CONFIG_NAME, ModelConfig, read_config
from runtime.errors import CheckpointError, unreadable

INDEX_NAME = "model.safetensors.index.json"
SHARD_PATTERN = "model*.safetensors"
MAX_LINES = 20
STRAY = "stray file"
DUPLICATE = "duplicate"

_EXPERT = re.compile(
    re.escape(LAYERS) + r"([0-9]{1,9})\.block_sparse_moe\.experts\.([0-9]{1,9})\.(w[123]\.weight_(?:packed|scale))"
)
_COLUMN = {name: column for column, name in enumerate(EXPERT_TENSORS)}


class ExpertTable:
    """Where every routed expert's six tensors lie: 10 bytes a tensor.

    `shard[m, e, c]` is an index into `paths` and `offset[m, e, c]` a byte in that file, −1 when not found; m counts
    the MoE layers, c the tensors in the order of `EXPERT_TENSORS`.
    """

    def __init__(self, config: ModelConfig):
        self.row = {layer: row for row, layer in enumerate(config.moe_layers)}
        self.specs = tuple(expert_inventory(config).values())
        self.nbytes = sum(spec.nbytes for spec in self.specs)
        self.paths: list[Path] = []
        places = (len(self.row), config.num_experts, len(EXPERT_TENSORS))
        self.shard: npt.NDArray[np.uint16] = np.zeros(places, np.uint16)
        self.offset: npt.NDArray[np.int64] = np.full(places, -1, np.int64)

    def one_run(self) -> npt.NDArray[np.bool_]:
        """[m, e]: whether the six tensors form one gap-free run, so that one read fetches the expert."""
        sizes = np.array([spec.nbytes for spec in self.specs[:-1]])
        follows = np.diff(self.offset, axis=-1) == sizes
        follows &= self.shard[..., 1:] == self.shard[..., :1]
        return np.asarray(follows.all(axis=-1))

    def span(self, layer: int, expert: int, column: int) -> TensorSpan:
        """One tensor's place."""
        row, spec = self.row[layer], self.specs[column]
        return TensorSpan(
            expert_prefix(layer, expert) + EXPERT_TENSORS[column],
            spec.dtype,
            spec.shape,
            self.paths[int(self.shard[row, expert, column])],
            int(self.offset[row, expert, column]),
            spec.nbytes,
        )


@dataclass
class Findings:
    """What differs between a checkpoint and its config, by kind: a count, and the first few lines of each."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Kind → (what, how many tensors that is), no more than can be shown."""

    def add(self, kind: str, line: str, count: int = 1) -> None:
        self.counts[kind] += count
        lines = self.lines.setdefault(kind, [])
        if len(lines) < MAX_LINES:
            lines.append((line, count))

    def raise_for(self, path: Path) -> None:
        """Raise one CheckpointError naming what was found, or return when nothing was."""
        if not self.counts:
            return
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        shown = []
        for kind, lines in self.lines.items():
            lines = lines[: max(1, MAX_LINES // len(self.lines))]
            shown += [f"{kind}: {line}" for line, _ in lines]
            if more := self.counts[kind] - sum(count for _, count in lines):
                shown.append(f"{kind}: ... and {more} more")
        raise CheckpointError(
            f"{path} is not the checkpoint its {CONFIG_NAME} describes: {counts}; {self._advice()}", shown
        )

    def _advice(self) -> str:
        """What to do about it: nothing needs fetching that is merely too much."""
        if self.counts.keys() <= {STRAY, DUPLICATE}:
            return "remove the files that do not belong"
        return f"fetch {'the other' if STRAY in self.counts else 'these'} files again"


@dataclass
class Survey:
    """A checkpoint that has been found whole. `trunk` has the span of every tensor outside the routed experts.

    `fingerprint` leaves files without a text tensor out: the model is the same with and without its vision part.
    """

    config: ModelConfig
    trunk: dict[str, TensorSpan]
    specs: dict[str, TensorSpec]
    experts: ExpertTable
    fingerprint: str


def survey(directory: Path, *, experts_elsewhere: bool = False) -> Survey:
    """Look through a checkpoint directory. Raises CheckpointError naming everything that is wrong with it,
    StorageError for what cannot be read.

    With `experts_elsewhere`, a routed expert of which nothing is here is no fault: another place may have it.
    """
    config_bytes = read_config(_checked(directory) / CONFIG_NAME)
    config = ModelConfig.from_json(config_bytes, str(directory / CONFIG_NAME))
    index = directory / INDEX_NAME
    # A link that leads nowhere is not an index that nobody fetched.
    listed = {file_name for _, file_name in read_weight_map(index)} if os.path.lexists(index) else None
    paths = sorted({*directory.glob(SHARD_PATTERN), *_present(directory, listed or ())})
    if not paths:
        raise CheckpointError(f"{directory} has a {CONFIG_NAME} but no {SHARD_PATTERN}; fetch the weights too")
    surveyor = _Surveyor(config, paths, experts_elsewhere)
    digest = hashlib.sha256(b"%d\n" % len(config_bytes) + config_bytes)
    for path in paths:
        try:
            header = scan(path)
        except CheckpointError as error:
            if listed is None or path.name in listed:
                surveyor.findings.add("unreadable file", str(error).removesuffix(FETCH_AGAIN))
                surveyor.unread.add(path.name)
            else:
                surveyor.set_aside(path)
            continue
        if listed is not None and path.name not in listed and surveyor.is_stray(header, index):
            surveyor.set_aside(path)
            continue
        if any(released_name(span.name, config.num_hidden_layers) for span in header.spans):
            digest.update(b"%d %d\n" % (header.file_nbytes, len(header.raw)) + header.raw)
        surveyor.take(header)
    if listed is not None:
        surveyor.compare_index(index)
    surveyor.find_missing()
    surveyor.findings.raise_for(directory)
    return Survey(config, surveyor.trunk, surveyor.specs, surveyor.experts, digest.hexdigest())


def _present(directory: Path, names: Iterable[str]) -> Iterator[Path]:
    """The files of these names that are in the directory itself; the index may say anything."""
    for name in names:
        path = directory / name
        if path.parent == directory and path.name == name != ".." and os.path.lexists(path):
            yield path


def _checked(directory: Path) -> Path:
    """The directory, when it can hold a checkpoint."""
    wanted = f"a checkpoint is a directory with {CONFIG_NAME} and {SHARD_PATTERN}"
    try:
        if not directory.exists():
            raise CheckpointError(f"{directory} does not exist; {wanted}")
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is a file; {wanted}: give its directory")
        names = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise unreadable(directory, error) from None
    if CONFIG_NAME not in names:
        state = "is empty" if not names else f"has no {CONFIG_NAME}"
        raise CheckpointError(f"{directory} {state}; {wanted}")
    return directory


class _Surveyor:
    """The state of one survey."""

    def __init__(self, config: ModelConfig, paths: list[Path], experts_elsewhere: bool = False):
        self.config = config
        self.experts_elsewhere = experts_elsewhere
        self.specs = trunk_inventory(config)
        self.trunk: dict[str, TensorSpan] = {}
        self.experts = ExpertTable(config)
        self.experts.paths = paths
        self.findings = Findings()
        self.unread: set[str] = set()
        """Names of files that are absent or damaged: what the index puts there is not missing as well."""
        self.excused: set[str] = set()
        self.seen = array("q")
        """A hash of each (tensor name, file name), to compare with the index without keeping either."""

    def take(self, header: Header) -> None:
        """Hold the tensors of one file against the inventory."""
        shard, file_name = self.experts.paths.index(header.path), header.path.name
        for span in header.spans:
            self.seen.append(hash((span.name, file_name)))
            expert = _EXPERT.fullmatch(span.name)
            if not (expert and self._take_expert(span, shard, int(expert[1]), int(expert[2]), expert[3])):
                self._take_trunk(span)
        if header.promised_nbytes > header.file_nbytes:
            for span in header.truncated:
                self.findings.add("truncated", f"{header.path.name}: {truncation(span, header.file_nbytes)}")

    def is_stray(self, header: Header, index: Path) -> bool:
        """Whether a file that the index does not name holds tensors of the model, but only such as others hold."""
        layers = self.config.num_hidden_layers
        held = {name for span in header.spans if (name := released_name(span.name, layers))}
        if not held:
            return False
        held.difference_update(released_name(name, layers) for name, _ in read_weight_map(index))
        return not any(map(self._is_known, held))

    def set_aside(self, path: Path) -> None:
        """Leave a file out that does not belong."""
        self.findings.add(STRAY, f"{path.name}, which {INDEX_NAME} does not name, does not belong here; remove it")
        self.unread.add(path.name)

    def _take_expert(self, span: TensorSpan, shard: int, layer: int, expert: int, name: str) -> bool:
        row = self.experts.row.get(layer)
        if row is None or expert >= self.config.num_experts:
            return False
        column = _COLUMN[name]
        if self.experts.offset[row, expert, column] >= 0:
            first = self.experts.paths[int(self.experts.shard[row, expert, column])]
            self.findings.add(DUPLICATE, f"{span.name} is in {first.name} and in {span.path.name}")
        self.experts.shard[row, expert, column] = shard
        self.experts.offset[row, expert, column] = span.offset
        spec = self.experts.specs[column]
        if span.shape != spec.shape or span.dtype != spec.dtype:
            self._check(span, spec)
        return True

    def _take_trunk(self, span: TensorSpan) -> None:
        name = released_name(span.name, self.config.num_hidden_layers)
        if name is None:
            return
        if (expert := _EXPERT.fullmatch(name)) and name != span.name:
            shard = self.experts.paths.index(span.path)
            if self._take_expert(span, shard, int(expert[1]), int(expert[2]), expert[3]):
                return
        spec = self.specs.get(name)
        if spec is None:
            self.findings.add("extra", f"{span.name} in {span.path.name}, unknown to the config")
            return
        if name in self.trunk:
            self.findings.add(DUPLICATE, f"{name} is in {self.trunk[name].path.name} and in {span.path.name}")
        self.trunk[name] = span
        self._check(span, spec)

    def _check(self, span: TensorSpan, spec: TensorSpec) -> None:
        if span.dtype != spec.dtype:
            self.findings.add("wrong type", f"{span.name} in {span.path.name} is {span.dtype}, wanted {spec.dtype}")
        if not spec.accepts(span.shape):
            wanted = " or ".join(str(list(shape)) for shape in spec.stored or (spec.shape,))
            self.findings.add(
                "wrong shape", f"{span.name} in {span.path.name} is {list(span.shape)}, the config wants {wanted}"
            )

    def compare_index(self, index: Path) -> None:
        """Hold the files against the index; name missing files and tensors that are not where it says."""
        present = {path.name for path in self.experts.paths}
        absent: Counter[str] = Counter()
        listed = array("q")
        for name, file_name in read_weight_map(index):
            if file_name not in present:
                released = released_name(name, self.config.num_hidden_layers)
                if released is None or (self.experts_elsewhere and _EXPERT.fullmatch(released)):
                    continue  # vision files need not be there, nor experts that other drives hold
                absent[file_name] += 1
            listed.append(hash((name, file_name)))
        for file_name, tensors in sorted(absent.items()):
            self.findings.add("missing file", f"{file_name}, which {index.name} says holds {tensors} tensors")
        self.unread |= absent.keys()
        differing = np.setxor1d(np.array(self.seen, np.int64), np.array(listed, np.int64))
        if differing.size:
            self._name_misplaced(index, set(differing.tolist()))

    def _name_misplaced(self, index: Path, differing: set[int]) -> None:
        """Read index and headers once more to put names to the hashes that only one of them has."""
        wanted: dict[str, str] = {}
        for name, file_name in read_weight_map(index):
            released = released_name(name, self.config.num_hidden_layers)
            if released and file_name in self.unread:
                self.excused.add(released)
            elif released and hash((name, file_name)) in differing:
                wanted[name] = file_name
        for path in self.experts.paths:
            for span in scan(path).spans if path.name not in self.unread else ():
                if hash((span.name, path.name)) not in differing:
                    continue
                released = released_name(span.name, self.config.num_hidden_layers)
                if span.name in wanted:
                    line = f"{span.name} is in {path.name}, {index.name} says {wanted.pop(span.name)}"
                    self.findings.add("misplaced", line)
                elif released and released not in self.excused:
                    self.findings.add("not in the index", f"{span.name} in {path.name}")
        for name, file_name in wanted.items():
            if not self._is_known(name):  # else it will be found missing
                self.findings.add("in the index only", f"{name}, said to be in {file_name}")

    def _is_known(self, name: str) -> bool:
        """Whether the model has a tensor that a file may hold under this name."""
        name = released_name(name, self.config.num_hidden_layers) or ""
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return name in self.specs
        return int(expert[1]) in self.experts.row and int(expert[2]) < self.config.num_experts

    def find_missing(self) -> None:
        """Name what no file has: tensors of the trunk one by one, experts by ranges."""
        for name in self.specs:
            if name not in self.trunk and name not in self.excused:
                self.findings.add("missing", name)
        for layer, row in self.experts.row.items():
            absent = self.experts.offset[row] < 0
            if self.experts_elsewhere:
                absent[absent.all(axis=1)] = False
            if absent.any():
                self._excuse(layer, absent)
                self._name_missing_experts(layer, absent)

    def _excuse(self, layer: int, absent: npt.NDArray[np.bool_]) -> None:
        """Clear what is only missing because its file is."""
        for expert, column in np.argwhere(absent) if self.excused else ():
            if expert_prefix(layer, int(expert)) + EXPERT_TENSORS[column] in self.excused:
                absent[expert, column] = False

    def _name_missing_experts(self, layer: int, absent: npt.NDArray[np.bool_]) -> None:
        whole = np.flatnonzero(absent.all(axis=1)).tolist()
        for first, last in ranges(whole):
            which = str(first) if first == last else f"{{{first}..{last}}}"
            tensors = (last - first + 1) * len(EXPERT_TENSORS)
            self.findings.add("missing", f"{LAYERS}{layer}.block_sparse_moe.experts.{which}.*", tensors)
        for expert, column in np.argwhere(absent & ~absent.all(axis=1, keepdims=True)).tolist():
            self.findings.add("missing", expert_prefix(layer, expert) + EXPERT_TENSORS[column])


def ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The runs of consecutive numbers in an ascending list, as (first, last)."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]
