"""What made a number: the commit, the libraries, the machine, the drives and the model."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from runtime.checkpoint import Checkpoint
from runtime.drives.identity import identify, same_device
from runtime.generate import record

LIBRARIES = ("numpy", "numba", "llvmlite", "mlx", "mlx-lm", "tiktoken", "psutil", "xxhash", "scipy", "pytest-benchmark")

Record = dict[str, Any]


def commit(checkout: Path) -> Record:
    """The commit of a checkout and whether files differ from it; nulls where it is none, or git is not there."""
    with suppress(OSError, subprocess.SubprocessError):
        found, changed = (
            subprocess.run(["git", *words], cwd=checkout, capture_output=True, text=True, timeout=30, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
        return {"commit": found.strip(), "dirty": bool(changed.strip())}
    return {"commit": None, "dirty": None}


def versions() -> Record:
    """Of this project, Python and the libraries that numbers depend on; null for what is not there."""
    return dict(record.versions(LIBRARIES))


def machine() -> Record:
    """Processor, memory, system, and how busy it was when the session began."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "swap_bytes": psutil.swap_memory().total,
        "load_average": list(os.getloadavg()),
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return platform.processor() or platform.machine()


def drives(places: Mapping[str, Path]) -> dict[str, Record]:
    """What the drive below each directory says of itself."""
    return {name: asdict(identify(path)) for name, path in places.items()}


def one_device(places: Mapping[str, Path]) -> list[tuple[str, ...]]:
    """Groups of names that are one physical device."""
    return same_device({name: identify(path) for name, path in places.items()})


def model(path: Path) -> Record:
    """Which model it is, as the run record says, and the size of its experts."""
    with Checkpoint.open(path, experts_elsewhere=True) as checkpoint:
        config = checkpoint.config
        return {
            "path": str(path),
            "fingerprint": checkpoint.fingerprint,
            "layers": config.num_hidden_layers,
            "moe_layers": len(config.moe_layers),
            "experts": config.num_experts,
            "experts_per_token": config.num_experts_per_token,
            "expert_bytes": checkpoint.expert_nbytes,
        }
