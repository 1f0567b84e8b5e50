"""What the operating system itself counts: the one witness that a read came from a device and not from memory."""

from __future__ import annotations

from pathlib import Path

_PROCESS, _THREAD = Path("/proc/self/io"), Path("/proc/thread-self/io")


def device_bytes_read(this_thread: bool = False) -> int | None:
    """Bytes that this process, or this thread of it, had fetched from storage; None where the system does not say."""
    try:
        lines = (_THREAD if this_thread else _PROCESS).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
