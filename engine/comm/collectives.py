"""What the members of an attention group do together: exchange rows, add up partial outputs.

Two collectives of a process group, the same for gloo, NCCL and HCCL. All members call the same
methods in the same order with the same number of tokens; a member that is missing makes the others
raise RunError, at once or after the group's timeout. On a device with streams the methods
return when the work is queued, as any operator does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import RunError
from engine.topology.shard import Shard, member_rows, most_rows


class TensorParallel:
    """Member `member` of a group of `size`.

    group: has `_allgather_base` and `alltoall_base` of torch.distributed's Backend; None for a
    member that is alone, for whom every method is the identity.
    """

    def __init__(self, group: Any | None, member: int = 0, size: int = 1) -> None:
        if (group is None) != (size == 1):
            raise ValueError(f"a group of {size} with process group {group}")
        self.shard = Shard(member, size)
        self._group = group

    @classmethod
    def solo(cls) -> TensorParallel:
        """A group of one."""
        return cls(None)

    @property
    def member(self) -> int:
        return self.shard.member

    @property
    def size(self) -> int:
        return self.shard.size

    def rows(self, tokens: int) -> slice:
        """The own rows of a batch of `tokens`."""
        return member_rows(tokens, self.shard)

    def gather(self, rows: Tensor, tokens: int) -> Tensor:
        """The own rows [own, ...] -> all members' [tokens, ...], in order."""
        own = self.rows(tokens)
        if len(rows) != own.stop - own.start:
            raise ValueError(f"{len(rows)} rows of {tokens} tokens, expected {own}")
        if self._group is None or tokens == 0:
            return rows
        most = most_rows(tokens, self.size)
        # Only the last members' rows are padded, so that the padding comes after all tokens.
        return self._all(_padded(rows, most))[:tokens]

    def scatter_sum(self, partial: Tensor) -> Tensor:
        """Every member's [tokens, H] -> the own rows [own, H] of their sum.

        Each member gets all members' parts of its rows and adds them in float32 in the members'
        order: as much traffic as a reduce-scatter, and the same bits on any transport, whoever
        came first.
        """
        tokens = len(partial)
        if self._group is None or tokens == 0:
            return partial
        own, most = self.rows(tokens), most_rows(tokens, self.size)
        sent = _padded(partial, most * self.size)
        parts = torch.empty_like(sent)
        self._wait(self._group.alltoall_base, parts, sent, [], [])
        mine = parts.view(self.size, most, *partial.shape[1:])[:, : own.stop - own.start]
        total = mine[0].to(torch.float32, copy=True)
        for member in range(1, self.size):
            total += mine[member]
        return total.to(partial.dtype)

    def gather_heads(self, part: Tensor, kv_heads: int) -> Tensor:
        """The own key-value heads [n, local, d] -> all `kv_heads` of them [n, kv_heads, d].

        Members that share a head hold the same; it is taken from the first of them.
        """
        if self._group is None:
            return part
        sharing = self.size * part.shape[1] // kv_heads
        parts = self._all(part.contiguous()).view(self.size, *part.shape)[::sharing]
        return parts.transpose(0, 1).flatten(1, 2)

    def _all(self, own: Tensor) -> Tensor:
        """[n, ...] of each member -> [size * n, ...]."""
        assert self._group is not None
        everything = own.new_empty(self.size * len(own), *own.shape[1:])
        if everything.numel():
            self._wait(self._group._allgather_base, everything, own)
        return everything

    def _wait(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise RunError(f"another rank of the attention group is gone: {error}") from error


def _padded(rows: Tensor, count: int) -> Tensor:
    """`rows` [n, ...] and zeros up to `count`, contiguous."""
    if missing := count - len(rows):
        return F.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))
    return rows.contiguous()
