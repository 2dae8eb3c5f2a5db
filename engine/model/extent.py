"""How many layers and experts a checkpoint holds, by the names of its tensors alone."""

import re
from collections.abc import Iterable

from engine.model.architecture import ModelConfig

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"model\.layers\.([0-9]{1,9})\.\w+\.experts\.(?:([0-9]{1,9})\.|gate_up_proj)")


def layer_of(name: str) -> int | None:
    """The layer of a tensor; None for those of no layer."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def extent_problems(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Where the config has more layers or experts than there are tensors of.

    Fused experts have no number; their shape tells how many they are.
    """
    layers = 0
    experts: dict[int, int] = {}  # of a layer
    for name in names:
        if (layer := layer_of(name)) is not None:
            layers = max(layers, layer + 1)
        if match := _EXPERT.match(name):
            layer, expert = int(match[1]), match[2]
            held = config.experts if expert is None else int(expert) + 1
            experts[layer] = max(experts.get(layer, 0), held)
    if config.layers > layers:
        return [
            f"the model has {config.layers} layers, but the weights hold {layers} "
            "(model.layers.0 and on)"
        ]
    for layer in config.moe_layers:
        if config.experts > experts.get(layer, 0):
            return [
                f"layers have {config.experts} experts, but the weights hold "
                f"{experts.get(layer, 0)} of layer {layer}"
            ]
    return []
