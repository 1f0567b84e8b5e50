"""mlx-lm as an arm: its own loader and model, greedy, a line on stderr for each token and a record on stdout.

    python -m benchmarks.peer_mlx_lm MODEL IDS MAX_NEW

On a machine without a GPU its graph compiler is off, which would need a C++ compiler.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model


def main(path: Path, ids: list[int], max_new: int) -> None:
    """Generate, and say so."""
    if not mx.metal.is_available() and mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()
    model: Any
    model, config = load_model(path)
    cache, text = model.make_cache(), config.get("text_config", config)
    fed, said = ids, list[int]()
    while len(said) < max_new:
        began = time.perf_counter()
        token = int(mx.argmax(model(mx.array(fed)[None], cache=cache)[0, -1]))
        said.append(token)
        fed = [token]
        print(f"{len(said):5} {token:7} {(time.perf_counter() - began) * 1000:10.1f} ms", file=sys.stderr, flush=True)
        if token == text.get("eos_token_id"):
            break
    print(json.dumps({"token_ids": said}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(f"[{sys.argv[2]}]"), int(sys.argv[3]))
