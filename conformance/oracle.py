"""mlx-lm's own `kimi_k3`, run as an independent oracle in float32 on the CPU.

Nothing of it is changed: its layers are wrapped from outside to see what leaves them. bf16 weights are widened so
that every activation is float32; the routed experts stay MXFP4. Its two latent norms use 1e-6, as ours do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from trajectory import Pass


class MlxLm:
    """A checkpoint loaded by mlx-lm, and one sequence running through it."""

    def __init__(self, path: Path) -> None:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        with _plain_cpu():
            self._model: Any = load_model(path)[0]
            floats = mx.floating
            wide = tree_map(
                lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, floats) else p, self._model.parameters()
            )
            self._model.update(wide)
            mx.eval(self._model.parameters())
            self._cache = self._model.make_cache()
        self._seen: list[Any] = []
        inner = self._model.model
        inner.layers = [_Tapped(layer, self._seen) for layer in inner.layers]

    def feed(self, ids: npt.NDArray[np.int64]) -> Pass:
        """Run the next tokens of the sequence; the logits are those of all rows."""
        import mlx.core as mx

        self._seen.clear()
        with _plain_cpu():
            logits = self._model(mx.array(ids)[None], cache=self._cache)[0]
            assert logits.dtype == mx.float32
            return Pass([np.array(h[0]) for h in self._seen], np.array(logits))


class _Tapped:
    """A decoder layer that also notes its output."""

    def __init__(self, layer: Any, seen: list[Any]) -> None:
        self._layer = layer
        self._seen = seen
        self.is_linear = layer.is_linear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        h, blocks = self._layer(*args, **kwargs)
        self._seen.append(h)
        return h, blocks


@contextmanager
def _plain_cpu() -> Iterator[None]:
    """MLX on the CPU, its graph compiler off (it would run a C++ compiler in the middle of the comparison)."""
    import mlx.core as mx

    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()
        mx.set_default_device(device)
