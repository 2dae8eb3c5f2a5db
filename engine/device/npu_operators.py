"""torch-npu's fused operators in place of the plain torch code of engine.model.

Written to the operators' own documentation in torch-npu 2.13.0 and checked against a stand-in that
keeps to it; not run on an Ascend device. What each cannot say is left to the plain code, by
returning None, or said in plain torch here:

- rms_norm, rotate: nothing. Neighbouring pairs are put into halves first, which is the layout that
  engine.model wants anyway; the documented range of cosine and sine is [-1, 1], and
  engine.model.rope does not call this where YaRN scales them beyond.
- attend: keys and values of equal width only, so MLA's narrower values are padded with zeros. The
  documentation calls the operator one for training; only its forward pass is used.
- gate: it selects. Sigmoid weights are taken from the logits of the selected, since the operator
  always normalizes them and a model may not.
- experts: one product for all experts, but the host must know the counts (it waits for them once
  an item), and the sum over experts is plain torch. `grouped_mlp` needs neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.device import grouped_mlp
from engine.device.fused import ExpertTables, FusedOperators

_WEIGHED_BY_SIGMOID, _BY_TWO_BEST = 1, 1  # npu_moe_gating_top_k: norm_type, group_select_mode
_CAUSAL, _BAND = 3, 4  # npu_fusion_attention: sparse_mode; from the last query and key backwards
_MASK = 2048  # the size that both of them want the mask in, whatever the lengths
_ONE_OUTPUT, _BY_ROWS, _ENDS = (
    2,
    0,
    0,
)  # npu_grouped_matmul: split_item, group_type, group_list_type
_PAIRS = 16_384  # (token, expert) pairs a product takes at least; bounds what lies in between
_FLOAT32 = 4


def operators(torch_npu: Any, triton: bool) -> FusedOperators:
    """torch_npu: the imported library. triton: its experts, rather than npu_grouped_matmul."""
    npu = NpuOperators(torch_npu)
    by_name: dict[str, Any] = {  # some return None at times, and their callers ask
        "rms_norm": npu.rms_norm,
        "rotate": npu.rotate,
        "attend": npu.attend,
        "gate": npu.gate,
        "experts": grouped_mlp.serve if triton else npu.experts,
        "prepare": grouped_mlp.prepare if triton else None,
    }
    return FusedOperators(**by_name)


def workspace_bytes(n: int, pairs: int, hidden: int, intermediate: int, dtype_bytes: int) -> int:
    """Device memory that `NpuOperators.experts` takes while it runs, at most: the rows, middle and
    results of a run of experts, and the sum.
    """
    run = min(pairs, _PAIRS + n)
    row = hidden * (2 * dtype_bytes + _FLOAT32) + 3 * intermediate * dtype_bytes
    return run * row + n * hidden * _FLOAT32


@dataclass(frozen=True)
class NpuOperators:
    """The signatures of engine.device.fused.FusedOperators."""

    torch_npu: Any

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.numel() == 0:
            return torch.empty_like(x)
        normed: Tensor = self.torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
        return normed

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if x.numel() == 0:
            return x
        # As layout BSND with one sequence; angles as 1S1D, the same for both halves.
        cos, sin = (torch.cat((part, part), dim=-1)[None, :, None] for part in (cos, sin))
        turned: Tensor = self.torch_npu.npu_rotary_mul(x[None], cos, sin, rotary_mode="half")
        return turned[0]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor | None:
        rows, heads, width = query.shape
        keys, value_width = key.shape[0], value.shape[-1]
        if rows == 0 or heads > 256 or width > 768 or keys > 1 << 20:
            return None
        if value_width < width:
            value = F.pad(value, (0, width - value_width))
        banded = window is not None and window < keys
        mixed: Tensor = self.torch_npu.npu_fusion_attention(
            query[None],
            key[None],
            value[None],
            heads,
            "BSND",
            atten_mask=_later(query.device),
            scale=scale,
            pre_tockens=window - 1 if banded and window is not None else keys,
            next_tockens=0,
            sparse_mode=_BAND if banded else _CAUSAL,
        )[0]
        return mixed[0, ..., :value_width]

    def gate(
        self, logits: Tensor, router: Any, bias: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """router: an engine.model.architecture.Router."""
        if logits.numel() == 0:
            return None
        if router.kind == "softmax":
            if router.top_k > 1024:
                return None
            weights, experts, _ = self.torch_npu.npu_moe_gating_top_k_softmax(
                logits, k=router.top_k
            )
        else:
            groups, chosen = router.groups, router.top_groups
            if groups == chosen:
                groups, chosen = 1, 1  # all of them: no choice, and no limits on groups
            if not _selects(logits.shape[1], groups):
                return None
            _, experts, _ = self.torch_npu.npu_moe_gating_top_k(
                logits,
                router.top_k,
                bias=None if bias is None else bias.to(logits.dtype),
                k_group=chosen,
                group_count=groups,
                group_select_mode=_BY_TWO_BEST,
                norm_type=_WEIGHED_BY_SIGMOID,
            )
            weights = logits.gather(1, experts.long()).sigmoid()
        if router.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts.long(), weights * router.scaling

    def experts(
        self,
        tables: ExpertTables,
        layer: int | Tensor,
        hidden: Tensor,
        counts: Tensor,
        row_index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        place = tables.place[int(layer)]
        # The operator wants [experts, in, out] and takes a transposed view without a copy.
        gate_up = tables.gate_up[place].transpose(1, 2)
        down = tables.down[place].transpose(1, 2)
        tokens: list[int] = counts.tolist()
        total = torch.zeros_like(out, dtype=torch.float32)
        begin = 0
        for first, last in _runs(tokens):
            sizes = tokens[first:last]
            end = begin + sum(sizes)
            rows = row_index[begin:end]
            ends = torch.tensor(list(accumulate(sizes)), device=hidden.device)
            both = self._product(hidden.index_select(0, rows), gate_up[first:last], ends)
            inner = self.torch_npu.npu_swiglu(both, dim=-1)
            result = self._product(inner, down[first:last], ends).float()
            result *= weights[begin:end, None]
            # An expert at a time: its rows are distinct, so the order of a sum is that of experts.
            for where, part in zip(rows.split(sizes), result.split(sizes), strict=True):
                if len(where):
                    total.index_add_(0, where, part)
            begin = end
        out.copy_(total)

    def _product(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x [p, in] by weight [experts, in, out]; expert e has the rows before ends[e]."""
        product: Tensor = self.torch_npu.npu_grouped_matmul(
            [x],
            [weight],
            group_list=ends,
            split_item=_ONE_OUTPUT,
            group_type=_BY_ROWS,
            group_list_type=_ENDS,
        )[0]
        return product


@cache
def _later(device: torch.device) -> Tensor:
    """True where the operator must not look: above the diagonal."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)


def _selects(experts: int, groups: int) -> bool:
    """Whether npu_moe_gating_top_k takes that many: at most 2048, more than two a group, and
    groups rounded up to 32 experts at most 2048 together.
    """
    if experts % groups:
        return False
    size = experts // groups
    return size > 2 and -(-size // 32) * 32 * groups <= 2048


def _runs(tokens: list[int]) -> Iterator[tuple[int, int]]:
    """Consecutive experts that go into one product: (first, one past the last), each run with at
    least one token. It is cut once it has _PAIRS, so one has fewer than that and an expert's more.
    """
    first, pairs = 0, 0
    for expert, count in enumerate(tokens):
        pairs += count
        if pairs and (pairs >= _PAIRS or expert == len(tokens) - 1):
            yield first, expert + 1
            first, pairs = expert + 1, 0
