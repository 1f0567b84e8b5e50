"""A checkpoint on disk, checked once, then read by name or by expert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.checkpoint.files import Files
from runtime.checkpoint.headers import TensorSpan
from runtime.checkpoint.inventory import EXPERT_TENSORS, Shape, expert_prefix
from runtime.checkpoint.mxfp4 import Bytes, PackedExpert, check_scales
from runtime.checkpoint.survey import Survey, survey
from runtime.config import ModelConfig

_NUMPY: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4"), "U8": np.dtype("u1")}

Spans = tuple[TensorSpan, TensorSpan, TensorSpan, TensorSpan, TensorSpan, TensorSpan]


class Checkpoint:
    """An opened checkpoint directory. Safe to read from any number of threads.

    `config`; `fingerprint`, SHA-256 over config bytes, headers and sizes of the files with text tensors, whatever
    the path; `expert_nbytes`, the bytes of one routed expert; `trunk_nbytes`, of everything else; `experts_here`
    [MoE layers, experts], which of them are in the directory; `scattered`, how
    many of those are not one run; `notes`, what was found odd but usable.
    """

    def __init__(self, path: Path, found: Survey):
        self.path = path
        self.config: ModelConfig = found.config
        self.fingerprint = found.fingerprint
        self.expert_nbytes = found.experts.nbytes
        self.trunk_nbytes = sum(span.nbytes for span in found.trunk.values())
        self.notes: list[str] = []
        self._specs, self._trunk, self._experts = found.specs, found.trunk, found.experts
        self._one_run = found.experts.one_run()
        self.experts_here: npt.NDArray[np.bool_] = np.all(found.experts.offset >= 0, axis=-1)
        self.scattered = int(np.count_nonzero(self.experts_here & ~self._one_run))
        self._files = Files()

    @classmethod
    def open(cls, path: Path | str, *, experts_elsewhere: bool = False) -> Checkpoint:
        """Check a directory against its config. Raises CheckpointError naming everything that does not match.

        With `experts_elsewhere` routed experts may be missing; those must not be asked for here.
        """
        path = Path(path)
        checkpoint = cls(path, survey(path, experts_elsewhere=experts_elsewhere))
        try:
            checkpoint._take_notes()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def close(self) -> None:
        """Close the files. Reading afterwards is an error."""
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def reads(self) -> int:
        """System calls that read tensors since the checkpoint was opened."""
        return self._files.reads

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read since the checkpoint was opened."""
        return self._files.bytes_read

    def names(self) -> Iterator[str]:
        """The released names of all text tensors, the trunk's first."""
        yield from self._specs
        for layer in self._experts.row:
            for expert in range(self.config.num_experts):
                yield from (expert_prefix(layer, expert) + name for name in EXPERT_TENSORS)

    def trunk_names(self) -> tuple[str, ...]:
        """The released names of the tensors that are no routed expert's."""
        return tuple(self._specs)

    def span(self, name: str) -> TensorSpan:
        """Where a trunk tensor lies, as it stands in the file. KeyError when the model has no such tensor."""
        return self._trunk[name]

    def read(self, name: str) -> npt.NDArray[Any]:
        """A trunk tensor in the model's shape: BF16 as uint16, F32 as float32.

        A_log comes as [num_heads], a convolution as [P, K], dt_bias as [P], however the file holds them.
        KeyError when the model has no such tensor; StorageError when it cannot be read.
        """
        return self._in_shape(name, self._read_stored(name))

    def view(self, name: str, data: memoryview) -> npt.NDArray[Any]:
        """A trunk tensor as `read` gives it, in its stored bytes, which somebody has read.

        Where their address does not fit the dtype, it is a copy.
        """
        span = self._trunk[name]
        values = np.frombuffer(data[: span.nbytes], _NUMPY[span.dtype])
        return self._in_shape(name, values if values.flags.aligned else values.copy())

    def view_rows(self, name: str, data: memoryview) -> npt.NDArray[Any]:
        """Rows of a trunk matrix as `read_rows` gives them, in their bytes, which somebody has read."""
        span, columns = self._trunk[name], self._specs[name].shape[1]
        values = np.frombuffer(data, _NUMPY[span.dtype]).reshape(-1, columns)
        return values if values.flags.aligned else values.copy()

    def _in_shape(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """All stored values of a trunk tensor in the model's shape."""
        shape = self._specs[name].shape
        return stored[: math.prod(shape)].reshape(shape)

    def read_rows(self, name: str, first: int, last: int) -> npt.NDArray[Any]:
        """Rows `first` to `last` of a trunk matrix [rows, columns], as `read` gives them, and no others are read.

        KeyError when the model has no such tensor; StorageError when it cannot be read.
        """
        span, columns = self._trunk[name], self._specs[name].shape[1]
        values: npt.NDArray[Any] = np.empty((last - first, columns), _NUMPY[span.dtype])
        self._files.read(span.path, span.offset + first * columns * values.itemsize, _bytes_of(values), name)
        return values

    def expert_spans(self, layer: int, expert: int) -> Spans:
        """Where the six tensors of an expert lie, in the order of `PackedExpert`."""
        self._row(layer, expert)
        a, b, c, d, e, f = (self._experts.span(layer, expert, column) for column in range(len(EXPERT_TENSORS)))
        return a, b, c, d, e, f

    def expert_start(self, layer: int, expert: int) -> tuple[Path, int]:
        """(file, offset) of the first byte of an expert that is one run: what a barrier asks of each of its experts."""
        row, table = self._row(layer, expert), self._experts
        return table.paths[table.shard[row, expert, 0]], int(table.offset[row, expert, 0])

    def is_one_run(self, layer: int, expert: int) -> bool:
        """Whether the six tensors of an expert follow each other without a gap in one file."""
        return bool(self._one_run[self._row(layer, expert), expert])

    def disk_order(self, layer: int, experts: Iterable[int]) -> list[int]:
        """The experts of a layer in the order they lie on disk, which need not be that of their ids."""
        row = self._experts.row[layer]
        return sorted(
            experts, key=lambda expert: (self._experts.shard[row, expert, 0], self._experts.offset[row, expert, 0])
        )

    def read_expert(self, layer: int, expert: int, out: Any = None, *, check: bool = True) -> PackedExpert:
        """The packed bytes of a routed expert, as views into one buffer of `expert_nbytes`.

        `out` is a writable buffer of at least that many bytes to read into, else a new one is made. One read when
        the tensors form one run, else six. With `check`, a scale of 255 (NaN) raises CheckpointError naming the
        tensor. Raises StorageError naming layer, expert and place.
        """
        spans = self.expert_spans(layer, expert)
        buffer: Bytes = np.empty(self.expert_nbytes, np.uint8) if out is None else np.frombuffer(out, np.uint8)
        if buffer.size < self.expert_nbytes:
            raise ValueError(f"an expert has {self.expert_nbytes} bytes, the buffer {buffer.size}")
        buffer = buffer[: self.expert_nbytes]
        what = f"layer {layer} expert {expert}"
        if self.is_one_run(layer, expert):
            self._files.read(spans[0].path, spans[0].offset, _bytes_of(buffer), what)
        else:
            start = 0
            for span in spans:
                part = buffer[start : start + span.nbytes]
                self._files.read(span.path, span.offset, _bytes_of(part), f"{what} ({span.name})")
                start += span.nbytes
        return self.view_expert(layer, expert, buffer, check=check)

    def view_expert(self, layer: int, expert: int, buffer: Bytes, *, check: bool = True) -> PackedExpert:
        """The six tensors of an expert as views into its bytes [expert_nbytes], which somebody has read.

        With `check`, a scale of 255 (NaN) raises CheckpointError naming the tensor.
        """
        packed = PackedExpert(*(buffer[part].reshape(shape) for part, shape in self._parts))
        if check:
            for column in (1, 3, 5):
                name = expert_prefix(layer, expert) + EXPERT_TENSORS[column]
                check_scales(packed[column], f"layer {layer} expert {expert}, {name}")
        return packed

    @cached_property
    def _parts(self) -> list[tuple[slice, Shape]]:
        """Where each of the six tensors is in an expert's bytes, and its shape."""
        specs = self._experts.specs
        ends = np.cumsum([spec.nbytes for spec in specs]).tolist()
        return [(slice(end - spec.nbytes, end), spec.shape) for end, spec in zip(ends, specs, strict=True)]

    @property
    def scale_ranges(self) -> tuple[tuple[str, int, int], ...]:
        """(name, first byte, behind the last one) of the three scale tensors in an expert's bytes."""
        scales = ((EXPERT_TENSORS[column], self._parts[column][0]) for column in (1, 3, 5))
        return tuple((name, part.start, part.stop) for name, part in scales)

    def _row(self, layer: int, expert: int) -> int:
        """The layer's row in the expert table. IndexError for an expert that does not exist."""
        row = self._experts.row.get(layer)
        if row is None or not 0 <= expert < self.config.num_experts:
            raise IndexError(f"there is no routed expert {expert} in layer {layer}")
        return row

    def _read_stored(self, name: str) -> npt.NDArray[Any]:
        """All values of a trunk tensor, flat, padding included."""
        span = self._trunk[name]
        values: npt.NDArray[Any] = np.empty(math.prod(span.shape), _NUMPY[span.dtype])
        self._files.read(span.path, span.offset, _bytes_of(values), name)
        return values

    def _take_notes(self) -> None:
        """Say what is odd: padding of A_log that is not zero, experts that take six reads."""
        for name, spec in self._specs.items():
            kept = math.prod(spec.shape)
            if math.prod(self._trunk[name].shape) > kept:
                dropped = np.count_nonzero(self._read_stored(name)[kept:])
                if dropped:
                    self.notes.append(f"{name}: {dropped} entries past the {kept} heads are not zero, and are not used")
        if self.scattered:
            total = self._one_run.size
            self.notes.append(f"{self.scattered} of {total} experts are not one run and take six reads each")


def _bytes_of(values: npt.NDArray[Any]) -> memoryview:
    return values.data.cast("B")
