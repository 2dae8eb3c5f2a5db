"""How much a prompt makes a model compute, counted from its sizes."""

from math import prod
from typing import NamedTuple

from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.weights import attention_parameters

# Looked up, and applied to the last token alone.
_NOT_EVERY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


class Flops(NamedTuple):
    """Floating-point operations over all layers: of a token by itself, and of its attention to one
    earlier token.
    """

    token: float
    pair: float


def prefill_flops(config: ModelConfig) -> Flops:
    """Two operations a weight that a token meets: its matrices, and those of its top-k experts;
    and for each pair two a feature of the head, for the score and for the sum of values.
    """
    matrices = sum(
        prod(shape)
        for name, shape in attention_parameters(config).items()
        if len(shape) == 2 and name not in _NOT_EVERY_TOKEN
    )
    expert = 3 * config.hidden_size * config.expert_intermediate
    experts = expert * config.top_k * len(config.moe_layers)
    shape = config.attention
    width = (
        2 * shape.head_dim
        if isinstance(shape, GroupedQuery)
        else shape.nope_dim + shape.rope_dim + shape.value_dim
    )
    return Flops(2.0 * (matrices + experts), 2.0 * shape.heads * width * config.layers)
