"""Causal attention in blocks of queries, by matrix products: what a CPU does best.

A block attends to no key that all of its queries precede, so half of the scores are never taken,
and the query heads that share keys are the rows of one product. torch's fused kernel on CPUs splits
into smaller products, and takes 1.05 to 1.6 times as long up to 4,096 keys (docs/performance.md).
"""

import torch
from torch import Tensor

MOST_KEYS = 8192  # beyond, the fused kernel is as fast and holds fewer scores
_ROWS = 64
_SCORES = (
    1 << 20
)  # held at once, unless one group of heads has more: 4 MiB, so that they stay in cache


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
) -> Tensor:
    """As `engine.model.spans.attend`: query [n, heads, d] are the last n positions of key
    [m, kv_heads, d] and value [m, kv_heads, dv]; returns [n, heads, dv].
    """
    rows, heads, width = query.shape
    keys, kv_heads, value_width = value.shape
    group = heads // kv_heads
    k, v = key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous()
    q = (query * scale).view(rows, kv_heads, group, width).permute(1, 2, 0, 3)
    out = query.new_empty(rows, heads, value_width)
    by_group = out.view(rows, kv_heads, group, value_width).permute(1, 2, 0, 3)
    future = torch.ones(_ROWS, _ROWS, dtype=torch.bool, device=query.device).triu_(1)
    for begin in range(0, rows, _ROWS):
        end = min(begin + _ROWS, rows)
        count, first, last = end - begin, keys - rows + begin, keys - rows + end
        low = 0 if window is None else max(0, first - window + 1)
        together = max(1, _SCORES // (group * count * (last - low)))
        for head in range(0, kv_heads, together):
            part = slice(head, head + together)
            block = q[part, :, begin:end].reshape(-1, group * count, width)
            scores = torch.bmm(block, k[part, low:last].transpose(1, 2))
            by_row = scores.view(-1, group, count, last - low)
            by_row[..., first - low :].masked_fill_(future[:count, :count], float("-inf"))
            if window is not None:
                by_row.masked_fill_(_forgotten(first, last, low, window, query), float("-inf"))
            torch.softmax(scores, -1, out=scores)
            mixed = torch.bmm(scores, v[part, low:last])
            by_group[part, :, begin:end] = mixed.view(-1, group, count, value_width)
    return out


def _forgotten(first: int, last: int, low: int, window: int, like: Tensor) -> Tensor:
    """True where the key at a position in low..last lies before the window of the query at one in
    first..last.
    """
    queries = torch.arange(first, last, device=like.device)[:, None]
    return queries - torch.arange(low, last, device=like.device) >= window
