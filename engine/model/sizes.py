"""How much memory a role needs: weights exactly, activations as an upper estimate."""

from math import prod

from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.experts import stacked_shapes
from engine.model.sharding import most_rows, shard_config
from engine.model.weights import attention_parameters, is_router

_FLOAT32 = 4
# Rows of [rows, vocabulary] that a caller turns into logits at once.
_LOGITS_ROWS = 256


def weight_bytes(
    config: ModelConfig,
    role: str,
    local_experts: int,
    dtype_bytes: int,
    size: int = 1,
) -> int:
    """Bytes of one rank's parameters; `local_experts` (a layer) counts for the expert role only.

    size: members of an attention group, which divide the heads; the same for each of them.
    """
    if role == "expert":
        numbers = sum(prod(shape) for shape in stacked_shapes(config, local_experts))
        return numbers * len(config.moe_layers) * dtype_bytes
    return sum(
        prod(shape) * (_FLOAT32 if is_router(name) else dtype_bytes)
        for name, shape in attention_parameters(shard_config(config, size)).items()
    )


def kv_bytes_per_token(config: ModelConfig, dtype_bytes: int, size: int = 1) -> int:
    """Bytes that a token's cache takes over all layers, on one of the `size` members of a group."""
    parts = shard_config(config, size).kv_parts
    return sum(map(prod, parts.values())) * config.layers * dtype_bytes


def working_set_bytes(
    config: ModelConfig,
    role: str,
    tokens: int,
    dtype_bytes: int,
    size: int = 1,
) -> int:
    """Upper estimate of the activations of one batch of `tokens` (attention: logits included), or
    of one work item of as many rows (expert: the worst case, all for one expert).

    size: members of an attention group; this is the first one's estimate, who has most rows.
    """
    hidden = config.hidden_size
    if role == "expert":
        # Gathered rows; gate and up, activated and multiplied; the result, also in float32.
        wide = hidden + 4 * config.expert_intermediate + hidden
        return tokens * (wide * dtype_bytes + 2 * hidden * _FLOAT32)

    own = most_rows(tokens, size)
    # All through a layer: the residual stream, the experts' sum, the normed input, the rotation.
    held = own * 4 * hidden * dtype_bytes + tokens * 2 * config.rope.dim * dtype_bytes
    norm = own * 3 * hidden * _FLOAT32
    mixing = tokens * _attention_numbers(shard_config(config, size)) * dtype_bytes
    step = max(mixing, own * _mlp_bytes(config, dtype_bytes))
    # All members' inputs of attention, and partial outputs, padded and as they are exchanged.
    shared = 0 if size == 1 else 4 * own * size * hidden * dtype_bytes + own * hidden * _FLOAT32
    logits = min(tokens, _LOGITS_ROWS) * config.vocab_size * (dtype_bytes + 3 * _FLOAT32)
    return held + norm + step + shared + logits


def _attention_numbers(config: ModelConfig) -> int:
    """Numbers a token at the widest point of attention, between projections and output."""
    shape = config.attention
    if isinstance(shape, GroupedQuery):
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        # Before and after norm and rotation; float32 accumulators count as two.
        return 5 * queries + 4 * keys + config.hidden_size
    width = shape.nope_dim + shape.rope_dim
    projected = shape.heads * (shape.nope_dim + shape.value_dim)
    padded = shape.heads * max(width, shape.value_dim)
    latents = (shape.q_rank or 0) + 2 * (shape.kv_rank + shape.rope_dim)
    return 3 * shape.heads * width + projected + 4 * padded + latents + config.hidden_size


def _mlp_bytes(config: ModelConfig, dtype_bytes: int) -> int:
    """A token's share of the dense or shared MLP and of routing."""
    intermediate = max(config.dense_intermediate, config.shared_intermediate)
    routing = 5 * config.experts * _FLOAT32 + 4 * config.top_k * (8 + _FLOAT32)
    return (4 * intermediate + config.hidden_size) * dtype_bytes + routing
