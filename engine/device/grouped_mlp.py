"""The experts of a work item in launches that do not know the layer.

Triton kernels read the layer and the tokens of each expert from device memory, find the weights by
the layer in a table of addresses, and follow them as pointers. What the host decides (grids, block
sizes, workspace) depends on nothing but the shapes of its arguments, which may be upper bounds. So
an expert rank can queue the work of a dispatch before it knows what the dispatch holds.

Run in Triton's interpreter on a CPU, and compiled to machine code of NVIDIA GPUs, in the tests;
executed on no accelerator so far, and block sizes are reasoned, not measured. With triton-ascend
the same source is meant for NPUs; nothing of that has been compiled.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from engine.device.fused import ExpertTables

# Programs of a launch; a NPU takes no more, and the kernels stride over what is left.
_MOST_PROGRAMS = 65_535
_COMBINE_BLOCK = 1024
_HEIGHTS = (16, 32, 64, 128)


def available() -> bool:
    """Whether Triton is installed and finds the C compiler that it builds its launchers with."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return False
    try:
        _kernels()
    except Exception:  # whatever a broken or foreign installation raises: the plain code runs
        return False
    return True


def workspace_bytes(
    n: int, pairs: int, experts: int, hidden: int, intermediate: int, dtype_bytes: int
) -> int:
    """Device memory that `serve` takes for as long as it runs: an intermediate and a result row
    of each (token, expert) pair, and the places of the pairs.
    """
    tables = 4 * (experts * n + 1 + 3 * _most_tiles(pairs, experts, _HEIGHTS[0]))
    return pairs * (hidden + intermediate) * dtype_bytes + tables


def serve(
    tables: ExpertTables,
    layer: int | Tensor,
    hidden: Tensor,
    counts: Tensor,
    row_index: Tensor,
    weights: Tensor,
    out: Tensor,
) -> None:
    """out[r] = sum over the local experts e that row r goes to of weight * e(hidden[r]).

    As engine.model.experts' serve, with the same roundings and sums in float32 in expert order;
    the same inputs give the same bits. All tensors are on one device. layer: a number, or a tensor
    of one (int32 or int64) there. hidden [n, H], row_index [p] and weights [p] may be longer than
    what is in use: sum(counts) pairs count, and rows without a pair become 0. A row goes to an
    expert at most once. Weights begin at multiples of 16 bytes, as torch allocates them.

    Raises KeyError for a number that is no layer with experts.
    """
    if isinstance(layer, int):
        if layer not in tables.place:
            raise KeyError(f"layer {layer} has no experts; {list(tables.place)} have")
        layer = torch.full((1,), layer, dtype=torch.int32, device=hidden.device)
    n, pairs, experts = len(hidden), len(row_index), len(counts)
    if n == 0:
        return
    if pairs == 0 or experts == 0:
        out.zero_()
        return
    blocks = _blocks(_height(pairs, experts), hidden)
    _launch(tables, layer, hidden, counts, row_index, weights, out, blocks)


def prepare(tables: ExpertTables) -> None:
    """Compiles what `serve` may need for these weights, which takes seconds a variant: not to
    happen with work in hand. Nothing is computed.
    """
    if not tables.layers:
        return
    gate_up = tables.gate_up[0]
    experts, device = len(gate_up), gate_up.device
    layer = torch.full((1,), tables.layers[0], dtype=torch.int32, device=device)
    hidden = torch.zeros(1, gate_up.shape[2], dtype=gate_up.dtype, device=device)
    none = torch.zeros(max(experts, 1), dtype=torch.int32, device=device)
    weights = torch.zeros(1, dtype=torch.float32, device=device)
    out = torch.empty_like(hidden)
    for height in _HEIGHTS:
        blocks = _blocks(height, hidden)
        _launch(tables, layer, hidden, none[:experts], none[:1], weights, out, blocks)


@dataclass(frozen=True)
class _Blocks:
    """A tile of a product: m pairs by n columns, k at a time."""

    m: int
    n: int
    k: int
    warps: int


def _height(pairs: int, experts: int) -> int:
    """Tiles as high as an expert's share of the pairs, so that its weights are read once."""
    return next((m for m in _HEIGHTS if m * experts >= pairs), _HEIGHTS[-1])


def _blocks(height: int, hidden: Tensor) -> _Blocks:
    return _Blocks(height, n=64, k=128 // hidden.element_size(), warps=8 if height == 128 else 4)


def _most_tiles(pairs: int, experts: int, block: int) -> int:
    """At least sum(ceil(count / block)) for any counts of `experts` that sum to `pairs`."""
    return pairs // block + min(pairs, experts)


def _launch(
    tables: ExpertTables,
    layer: Tensor,
    hidden: Tensor,
    counts: Tensor,
    row_index: Tensor,
    weights: Tensor,
    out: Tensor,
    blocks: _Blocks,
) -> None:
    kernels = _kernels()
    (n, width), pairs, experts = hidden.shape, len(row_index), len(counts)
    intermediate = tables.down[0].shape[2]
    most = _most_tiles(pairs, experts, blocks.m)
    tiles = torch.empty(1 + 3 * most, dtype=torch.int32, device=hidden.device)
    slots = torch.full((experts, n), -1, dtype=torch.int32, device=hidden.device)
    middle = hidden.new_empty(pairs, intermediate)
    parts = hidden.new_empty(pairs, width)
    shape = {"BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "BLOCK_K": blocks.k}
    # The interpreter would multiply the integers that it keeps a bfloat16 in; a product of two is
    # exact in float32, so widening first changes nothing.
    shape["WIDEN"] = hidden.dtype == torch.bfloat16 and not isinstance(
        kernels.gate_up, kernels.triton.JITFunction
    )

    def programs(columns: int) -> tuple[int]:
        return (min(most * -(-columns // blocks.n), _MOST_PROGRAMS),)

    kernels.plan[(experts,)](
        counts,
        row_index,
        tiles,
        slots,
        n,
        experts,
        BLOCK_M=blocks.m,
        BLOCK_E=kernels.triton.next_power_of_2(experts),
    )
    kernels.gate_up[programs(intermediate)](
        hidden,
        hidden.stride(0),
        row_index,
        tables.addresses,
        layer,
        tiles,
        middle,
        width,
        intermediate,
        **shape,
        num_warps=blocks.warps,
    )
    kernels.down[programs(width)](
        middle,
        tables.addresses,
        layer,
        tiles,
        parts,
        width,
        intermediate,
        **shape,
        num_warps=blocks.warps,
    )
    kernels.combine[(min(n * -(-width // _COMBINE_BLOCK), _MOST_PROGRAMS),)](
        slots,
        weights,
        parts,
        out,
        out.stride(0),
        n,
        experts,
        width,
        BLOCK_N=_COMBINE_BLOCK,
    )


def _kernels() -> ModuleType:
    # Products are rounded before they are added, as in the plain code; unset, Triton warns.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
    from engine.device import grouped_mlp_kernels

    return grouped_mlp_kernels
