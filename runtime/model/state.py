"""What the model carries from token to token: KDA's recurrent state and MLA's latent cache.

Nothing here depends on position, and AttnRes carries nothing (Kimi K3 specification 3.9). A forward pass reads the
state and commits the new one only when it has succeeded, so a cancelled or failed pass leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy.typing as npt

from runtime.config import ModelConfig
from runtime.ops import Array, LatentCache, Ops


@dataclass(frozen=True)
class KdaState:
    """One KDA layer: S [n, D, D] (rows: key channels) and the last K−1 inputs of each convolution [K−1, P]."""

    s: Array
    q_history: Array
    k_history: Array
    v_history: Array


LayerState: TypeAlias = KdaState | LatentCache


@dataclass
class State:
    """One sequence: `length` tokens seen, one entry per layer."""

    length: int
    capacity: int
    layers: list[LayerState]

    def copy(self) -> State:
        """The same sequence, to go on from independently. Recurrent states are shared: no pass changes one."""
        layers = [layer if isinstance(layer, KdaState) else layer.copy() for layer in self.layers]
        return State(self.length, self.capacity, layers)

    def commit(self, layers: list[LayerState], rows: int) -> None:
        """Make the outcome of a pass over `rows` tokens the current state."""
        self.layers = layers
        self.length += rows
        for layer in layers:
            if not isinstance(layer, KdaState):
                layer.length = self.length


def new_state(config: ModelConfig, ops: Ops, capacity: int) -> State:
    """The state before the first token, with room for `capacity` tokens."""
    kda = config.linear_attn_config
    history = (kda.short_conv_kernel_size - 1, config.kda_width)

    def layer_state(layer: int) -> LayerState:
        if config.is_kda(layer):
            return KdaState(
                ops.zeros(kda.num_heads, kda.head_dim, kda.head_dim),
                ops.zeros(*history),
                ops.zeros(*history),
                ops.zeros(*history),
            )
        return ops.latent_cache(capacity, config.kv_lora_rank, config.qk_rope_head_dim)

    return State(0, capacity, [layer_state(layer) for layer in range(config.num_hidden_layers)])


def state_nbytes(config: ModelConfig, context: int, element_size: int) -> int:
    """Bytes of the state at `context` tokens, with elements of `element_size` bytes."""
    kda = config.linear_attn_config
    recurrent = kda.num_heads * kda.head_dim**2 + 3 * (kda.short_conv_kernel_size - 1) * config.kda_width
    latent = context * (config.kv_lora_rank + config.qk_rope_head_dim)
    layers = range(config.num_hidden_layers)
    return element_size * sum(recurrent if config.is_kda(layer) else latent for layer in layers)


def arrays_of_state(state: State, ops: Ops) -> dict[str, npt.NDArray[Any]]:
    """Everything the state remembers, by name. On some backends the arrays are the state's own."""
    return {
        f"{number}.{name}": ops.numpy(getattr(layer, name))[: None if isinstance(layer, KdaState) else state.length]
        for number, layer in enumerate(state.layers)
        for name in _parts(layer)
    }


def state_of_arrays(
    config: ModelConfig, ops: Ops, capacity: int, length: int, arrays: Mapping[str, npt.NDArray[Any]]
) -> State:
    """The state after `length` tokens that `arrays_of_state` was given, with room for `capacity` tokens.

    Raises KeyError for an array that is missing, ValueError for one of another shape than the model's.
    """
    state = new_state(config, ops, capacity)
    for number, layer in enumerate(state.layers):
        found = {name: arrays[f"{number}.{name}"] for name in _parts(layer)}
        if isinstance(layer, KdaState):
            for name, array in found.items():
                if array.shape != tuple(getattr(layer, name).shape):
                    raise ValueError(f"{number}.{name}: {array.shape}")
            state.layers[number] = KdaState(**{name: ops.vector(array) for name, array in found.items()})
            continue
        for name, array in found.items():
            if array.shape != (length, *getattr(layer, name).shape[1:]):
                raise ValueError(f"{number}.{name}: {array.shape}")
            setattr(layer, name, ops.vector(array))
        layer.length = length
    state.length = length
    return state


def _parts(layer: LayerState) -> tuple[str, ...]:
    return tuple(field.name for field in fields(layer)) if isinstance(layer, KdaState) else layer.parts
