"""Causal attention in blocks of queries, by matrix products: what a CPU does best.

A block attends to no key that all of its queries precede, so half of the scores are never taken,
and the query heads that share keys are the rows of one product. torch's fused kernel on CPUs splits
into smaller products, and takes longer up to 8,192 keys (docs/performance.md).
"""

import torch
from torch import Tensor

from engine.model.products import linear

MOST_KEYS = 8192  # beyond, the fused kernel is as fast and holds fewer scores
_ROWS = 256  # of a product: queries times the heads that share keys
_QUERIES = 64  # at least, however many heads share keys


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
) -> Tensor:
    """As `engine.model.spans.attend`: query [n, heads, d] are the last n positions of key
    [m, kv_heads, d] and value [m, kv_heads, dv]; returns [n, heads, dv].
    """
    rows, heads, width = query.shape
    keys, kv_heads, value_width = value.shape
    group = heads // kv_heads
    size = max(_QUERIES, _ROWS // group)
    k, v = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
    q = query.view(rows, kv_heads, group, width).permute(1, 2, 0, 3)
    out = query.new_empty(rows, heads, value_width)
    by_group = out.view(rows, kv_heads, group, value_width).permute(1, 2, 0, 3)
    future = torch.ones(size, size, dtype=torch.bool, device=query.device).triu_(1)
    for begin in range(0, rows, size):
        end = min(begin + size, rows)
        count, first, last = end - begin, keys - rows + begin, keys - rows + end
        low = 0 if window is None else max(0, first - window + 1)
        block = q[:, :, begin:end].clone(memory_format=torch.contiguous_format).mul_(scale)
        for head in range(kv_heads):
            scores = linear(block[head].view(group * count, width), k[head, low:last])
            by_row = scores.view(group, count, last - low)
            by_row[..., first - low :].masked_fill_(future[:count, :count], float("-inf"))
            if window is not None:
                by_row.masked_fill_(_forgotten(first, last, low, window, query), float("-inf"))
            torch.softmax(scores, -1, out=scores)
            mixed = linear(scores, v[head, low:last].T)
            by_group[head, :, begin:end] = mixed.view(group, count, value_width)
    return out


def _forgotten(first: int, last: int, low: int, window: int, like: Tensor) -> Tensor:
    """True where the key at a position in low..last lies before the window of the query at one in
    first..last.
    """
    queries = torch.arange(first, last, device=like.device)[:, None]
    return queries - torch.arange(low, last, device=like.device) >= window
