"""Causal attention of one span of a prompt over its keys so far."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device.fused import fused
from engine.model.blocked_attention import MOST_KEYS, blocked_attention
from engine.model.timing import part

# Queries a masked block holds. A mask costs block * keys, so this bounds memory on long prompts.
_BLOCK = 512


class Span(NamedTuple):
    """`length` consecutive rows of a packed batch: positions start.. of one prompt."""

    start: int
    length: int


@part("core")
def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    """Each query attends to all keys up to its own position, or to the last `window` of those.

    query [n, heads, d] holds the last n of the positions of key [m, kv_heads, d] and value
    [m, kv_heads, dv], dv <= d. Returns [n, heads, dv].
    """
    if (attention := fused(query.device).attend) is not None:
        mixed = attention(query, key, value, window, scale)
        if mixed is not None:
            return mixed
    rows, keys, value_dim = query.shape[0], key.shape[0], value.shape[-1]
    if query.device.type == "cpu" and query.dtype == torch.float32 and keys <= MOST_KEYS:
        return blocked_attention(query, key, value, window, scale)
    if value_dim < query.shape[-1]:
        # The memory-saving kernels want equal widths; zeros are cheaper than all the scores.
        value = F.pad(value, (0, query.shape[-1] - value_dim))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if rows == keys and (window is None or window >= keys):
        whole = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return whole[0].transpose(0, 1)[..., :value_dim]

    out = query.new_empty(rows, query.shape[1], value_dim)
    for begin in range(0, rows, _BLOCK):
        end = min(begin + _BLOCK, rows)
        first, last = keys - rows + begin, keys - rows + end  # the block's positions
        low = 0 if window is None else max(0, first - window + 1)
        block = F.scaled_dot_product_attention(
            q[:, :, begin:end],
            k[:, :, low:last],
            v[:, :, low:last],
            attn_mask=_mask(first, last, low, window, query.device),
            scale=scale,
            enable_gqa=grouped,
        )
        out[begin:end] = block[0].transpose(0, 1)[..., :value_dim]
    return out


def _mask(first: int, last: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """True where the query at a position in first..last sees the key at one in low..last."""
    back = (
        torch.arange(first, last, device=device)[:, None]
        - torch.arange(low, last, device=device)[None]
    )
    visible = back >= 0
    return visible if window is None else visible & (back < window)
