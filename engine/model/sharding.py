"""Which part of attention each member of a tensor-parallel group holds. Pure: no torch.

Heads are divided (Megatron-LM, arXiv 1909.08053, section 3): the projections that make heads by
rows, the one that reads them by columns, so that the members' outputs add up to the whole. All
else (norms, embedding, gates, MLPs, head, what MLA's heads share) is whole on every member, since
members divide the tokens there.
"""

from typing import NamedTuple

import msgspec

from engine.model.architecture import GroupedQuery, ModelConfig
from engine.topology.shard import Shard, member_rows, most_rows

__all__ = [
    "Cut",
    "Shard",
    "cut",
    "is_zero",
    "kv_pieces",
    "member_rows",
    "most_rows",
    "problems",
    "shard_config",
]

_BY_HEAD = {"q_proj", "q_b_proj", "kv_b_proj"}
_BY_KV_HEAD = {"k_proj", "v_proj"}
# How many sizes of a group a message lists at most.
_SHOWN = 8


class Cut(NamedTuple):
    """begin..end of dimension `dim` of a stored tensor."""

    dim: int
    begin: int
    end: int


def problems(config: ModelConfig, size: int) -> list[str]:
    """Why attention cannot be divided over `size` members, and what would do. Empty: it can."""
    if _fits(config, size):
        return []
    shape = config.attention
    heads = f"{shape.heads} attention heads"
    if isinstance(shape, GroupedQuery):
        heads += f" and {shape.kv_heads} key-value heads"
    able = [str(n) for n in range(1, min(shape.heads, 1024) + 1) if _fits(config, n)]
    listed = ", ".join(able[:_SHOWN]) + (", ..." if len(able) > _SHOWN else "")
    return [f"{heads} cannot be divided evenly over {size} ranks (possible: {listed})"]


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The model as one member of `size` sees it: with its own heads only.

    Members beyond the number of key-value heads share one: each has a whole one. Raises ValueError
    where `problems` has something to say.
    """
    if size == 1:
        return config
    if found := problems(config, size):
        raise ValueError("; ".join(found))
    shape = config.attention
    if isinstance(shape, GroupedQuery):
        kv_heads = shape.kv_heads // kv_pieces(config, size)
        local = msgspec.structs.replace(shape, heads=shape.heads // size, kv_heads=kv_heads)
        return msgspec.structs.replace(config, attention=local)
    latent = msgspec.structs.replace(shape, heads=shape.heads // size)
    return msgspec.structs.replace(config, attention=latent)


def kv_pieces(config: ModelConfig, size: int) -> int:
    """Into how many different parts the members' key-value caches divide the whole one.

    MLA: 1, its latents are shared by all heads. Otherwise member m has part m * pieces // size.
    """
    shape = config.attention
    return min(size, shape.kv_heads) if isinstance(shape, GroupedQuery) else 1


def cut(parameter: str, shape: tuple[int, ...], config: ModelConfig, shard: Shard) -> Cut | None:
    """What the member holds of a parameter of AttentionModel.

    shape: of the whole tensor, as `config`, which is the whole model's, has it. None: all of it.
    """
    if shard.size == 1 or ".self_attn." not in parameter:
        return None
    projection, kind = parameter.rsplit(".", 2)[-2:]
    if projection in _BY_HEAD:
        return _piece(0, shape[0], shard.member, shard.size)
    if projection in _BY_KV_HEAD:
        pieces = kv_pieces(config, shard.size)
        return _piece(0, shape[0], shard.member * pieces // shard.size, pieces)
    if projection == "o_proj" and kind == "weight":
        return _piece(1, shape[1], shard.member, shard.size)
    return None


def is_zero(parameter: str, shard: Shard) -> bool:
    """Whether the member has zeros for it, because the sum of all members must have it once."""
    return shard.member > 0 and parameter.endswith(".self_attn.o_proj.bias")


def _piece(dim: int, total: int, index: int, pieces: int) -> Cut:
    width = total // pieces
    return Cut(dim, index * width, (index + 1) * width)


def _fits(config: ModelConfig, size: int) -> bool:
    shape = config.attention
    if size < 1 or shape.heads % size:
        return False
    if not isinstance(shape, GroupedQuery):
        return True
    return shape.kv_heads % size == 0 or size % shape.kv_heads == 0
