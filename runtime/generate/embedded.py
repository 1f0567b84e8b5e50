"""Where the embedded default model lies: inside the installed package, or in a checkout's `fixtures/`."""

from __future__ import annotations

from pathlib import Path

import runtime
from runtime.errors import CheckpointError

NOTE = "the embedded default: a small stand-in of the same architecture, trained by this project; not Kimi K3"


def embedded_model() -> Path:
    """The directory of the embedded default. Raises CheckpointError when this installation lacks it."""
    package = Path(runtime.__file__).resolve().parent
    for candidate in (package / "embedded", package.parent / "fixtures" / "embedded"):
        if (candidate / "config.json").is_file():
            return candidate
    raise CheckpointError(
        f"the embedded default model is not in {package / 'embedded'}: this installation is incomplete; "
        "install expertstream again, or name a checkpoint with --model"
    )
