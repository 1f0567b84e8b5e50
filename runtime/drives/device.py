"""The one interface of everything bytes are read from: a drive behind the operating system, the same behind limits,
or a virtual one."""

from __future__ import annotations

from typing import Protocol

from runtime.drives.jobs import Fault


class DeviceError(Exception):
    """A read that did not give its bytes. `fault` is what the scheduler is told, the message what a person is."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class Device(Protocol):
    """Blocking reads of one drive; safe to call from several threads at once."""

    @property
    def name(self) -> str:
        """The drive's name, as in its `DriveSpec`."""

    @property
    def alignment(self) -> int:
        """Of file offsets and addresses, for reads that need no copy: a power of two."""

    @property
    def mode(self) -> str:
        """How bytes come, found out by a real read: `direct`, `nocache`, `buffered: reason`, `virtual`."""

    def read(self, file: str, offset: int, into: memoryview) -> int:
        """Fill `into` with the bytes of `file` from `offset`; returns the bytes moved on the device, at least as many.

        Writes nothing outside `into`. Where the address of `into` and the offset differ modulo the alignment, the
        device goes through a buffer of its own. Raises DeviceError once the read has really ended; `into` may then
        hold anything.
        """

    def close(self) -> None:
        """Give back descriptors. Reads under way may fail."""


class DeviceInFront:
    """A device before another one, `inner`; what a subclass does not change is as it is there."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def alignment(self) -> int:
        return self.inner.alignment

    @property
    def mode(self) -> str:
        return self.inner.mode

    def read(self, file: str, offset: int, into: memoryview) -> int:
        return self.inner.read(file, offset, into)

    def close(self) -> None:
        self.inner.close()
