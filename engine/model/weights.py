"""Which stored tensor is which parameter, for both roles.

Parameters of the attention side carry the checkpoint's names but for the MoE module, which
families spell differently. Experts come one by one or fused into one tensor a layer.
"""

import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec
import torch

from engine.model.architecture import ModelConfig
from engine.model.attention import AttentionModel
from engine.model.experts import Shape3, stacked_shapes
from engine.model.extent import layer_of


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class FusedExperts(NamedTuple):
    """All experts of a layer in two tensors.

    gate_up is [experts, 2 * intermediate, H] and down [experts, H, intermediate]; transposed, the
    last two dimensions of both are swapped.
    """

    gate_up: str
    down: str
    transposed: bool


class SeparateExperts(NamedTuple):
    """Three tensors an expert; `projections` are the names of gate, up and down."""

    prefix: str
    projections: tuple[str, str, str]

    def names(self, expert: int) -> tuple[str, str, str]:
        gate, up, down = (f"{self.prefix}.{expert}.{name}.weight" for name in self.projections)
        return gate, up, down


def swap(shape: Shape3) -> Shape3:
    """The shape of the same tensor with its last two dimensions swapped."""
    return shape[0], shape[2], shape[1]


def resolve_tie(stored: Collection[str], config: ModelConfig) -> ModelConfig:
    """The config as this checkpoint means it: a head that is stored is used, even if the config
    ties it to the embedding (as transformers does when the two differ).
    """
    if config.tied_embeddings and "lm_head.weight" in stored:
        return msgspec.structs.replace(config, tied_embeddings=False)
    return config


@functools.lru_cache(maxsize=2)  # a plan asks for it again and again
def attention_parameters(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every parameter and buffer of AttentionModel with its shape. Allocates nothing."""
    with torch.device("meta"):
        state = AttentionModel(config).state_dict()
    return MappingProxyType({name: tuple(tensor.shape) for name, tensor in state.items()})


def is_router(parameter: str) -> bool:
    """Routers are kept in float32 whatever the dtype of the rest."""
    return ".mlp.gate." in parameter


def stored_name(stored: Collection[str], config: ModelConfig, parameter: str) -> str:
    """The checkpoint's name of an attention-side parameter; the usual one if it has none."""
    spellings = [parameter.replace(".mlp.", f".{name}.") for name in config.names.moe_modules]
    return next((name for name in spellings if name in stored), spellings[0])


def expert_source(
    stored: Mapping[str, Shaped], config: ModelConfig, layer: int
) -> FusedExperts | SeparateExperts:
    """How the checkpoint keeps the experts of a layer."""
    gate = stored_name(stored, config, f"model.layers.{layer}.mlp.gate.weight")
    prefix = gate.removesuffix("gate.weight") + "experts"
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    if gate_up not in stored and down not in stored:
        return SeparateExperts(prefix, config.names.expert_projections)
    found = tuple(stored[name].shape for name in (gate_up, down) if name in stored)
    shapes = stacked_shapes(config, config.experts)
    swapped = tuple(swap(shape) for shape in shapes)
    return FusedExperts(gate_up, down, transposed=found == swapped and found != shapes)


def claims(
    stored: Mapping[str, Shaped], config: ModelConfig
) -> dict[str, dict[str, tuple[int, ...]]]:
    """What each role reads of a checkpoint: role to tensor name to the shape it must have."""
    config = resolve_tie(stored, config)
    attention = {
        stored_name(stored, config, name): shape
        for name, shape in attention_parameters(config).items()
    }
    experts: dict[str, tuple[int, ...]] = {}
    for layer in config.moe_layers:
        experts |= _expert_claims(expert_source(stored, config, layer), config)
    return {"attention": attention, "expert": experts}


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that checkpoints carry and prefill rightly leaves out: rotary frequencies, which
    follow from the config, and the multi-token-prediction layers after the last one.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return True
    layer = layer_of(name)
    extra = range(config.layers, config.layers + config.extra_layers)
    return layer is not None and layer in extra


def _expert_claims(
    source: FusedExperts | SeparateExperts, config: ModelConfig
) -> dict[str, tuple[int, ...]]:
    if isinstance(source, SeparateExperts):
        hidden, intermediate = config.hidden_size, config.expert_intermediate
        shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
        return {
            name: shape
            for expert in range(config.experts)
            for name, shape in zip(source.names(expert), shapes, strict=True)
        }
    gate_up, down = stacked_shapes(config, config.experts)
    if source.transposed:
        gate_up, down = swap(gate_up), swap(down)
    return {source.gate_up: gate_up, source.down: down}
