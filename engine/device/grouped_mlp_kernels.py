"""The Triton kernels of grouped_mlp; imports triton, so that module imports this one late.

Everything that depends on the work item (the layer, how many tokens each expert has) is read from
device memory, so a launch can be queued before the host knows it. Work is handed out by striding
over it: the number of programs is free, and programs without work end at once. Only builtins of
triton.language are used, none of its library functions: those can be interpreted only if triton
was imported for that. Nothing here adds up in an order that depends on timing.
"""

# A docstring in a kernel would be compiled with it, and types are Triton's to find out.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl

# Compiled once for all numbers of tokens and wherever in a message the routing lies.
_jit = triton.jit(
    do_not_specialize=["n"],
    do_not_specialize_on_alignment=["counts", "row_index", "weights"],
)


@triton.jit
def _add(a, b):
    return a + b


# One program an expert. tiles: their number, then (expert, first pair, end of the expert's pairs)
# of each run of at most BLOCK_M pairs. slots [experts, n]: the pair that is this row's at this
# expert; the others are left alone.
@_jit
def plan(
    counts,
    row_index,
    tiles,
    slots,
    n,
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_E)
    before = tl.load(counts + others, mask=others < expert, other=0)
    begin = tl.reduce(before, 0, _add)
    tile = tl.reduce((before + BLOCK_M - 1) // BLOCK_M, 0, _add)
    count = tl.load(counts + expert)
    end = begin + count
    for first in range(begin, end, BLOCK_M):
        entry = tiles + 1 + 3 * (tile + (first - begin) // BLOCK_M)
        tl.store(entry, expert)
        tl.store(entry + 1, first)
        tl.store(entry + 2, end)
        pairs = first + tl.arange(0, BLOCK_M)
        rows = tl.load(row_index + pairs, mask=pairs < end, other=0)
        tl.store(slots + expert * n + rows, pairs, mask=pairs < end)
    if expert == experts - 1:
        tl.store(tiles, tile + (count + BLOCK_M - 1) // BLOCK_M)


# middle [p, I] = silu(x gate^T) * (x up^T) with x = hidden[row_index]. addresses [layers, 2].
@_jit
def gate_up(
    hidden,
    hidden_stride,
    row_index,
    addresses,
    layer,
    tiles,
    middle,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    address = tl.load(addresses + 2 * tl.load(layer))
    weight = tl.multiple_of(address.to(tl.pointer_type(hidden.dtype.element_ty)), 16)
    tile_count = tl.load(tiles)
    work = tile_count * ((inner + BLOCK_N - 1) // BLOCK_N)
    # Tiles of one expert follow each other and use the same weights.
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        entry = tiles + 1 + 3 * (item % tile_count)
        expert = tl.load(entry).to(tl.int64)
        pairs = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
        live = pairs < tl.load(entry + 2)
        rows = tl.load(row_index + pairs, mask=live, other=0).to(tl.int64)
        columns = item // tile_count * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < inner
        x_at = hidden + rows[:, None] * hidden_stride
        gate_at = weight + expert * (2 * inner * width) + columns[None, :] * width
        gate = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        up = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for begin in range(0, width, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(x_at + k[None, :], mask=live[:, None] & (k[None, :] < width), other=0.0)
            there = inside[None, :] & (k[:, None] < width)
            gate_weight = tl.load(gate_at + k[:, None], mask=there, other=0.0)
            up_weight = tl.load(gate_at + inner * width + k[:, None], mask=there, other=0.0)
            if WIDEN:
                x = x.to(tl.float32)
                gate_weight = gate_weight.to(tl.float32)
                up_weight = up_weight.to(tl.float32)
            gate = tl.dot(x, gate_weight, gate, input_precision="ieee")
            up = tl.dot(x, up_weight, up, input_precision="ieee")
        # Rounded where the plain operators round.
        kept = middle.dtype.element_ty
        gate = gate.to(kept).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(kept).to(tl.float32)
        result = (active * up.to(kept).to(tl.float32)).to(kept)
        middle_at = middle + pairs.to(tl.int64)[:, None] * inner + columns[None, :]
        tl.store(middle_at, result, mask=live[:, None] & inside[None, :])


# parts [p, H] = middle down^T.
@_jit
def down(
    middle,
    addresses,
    layer,
    tiles,
    parts,
    width,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    address = tl.load(addresses + 2 * tl.load(layer) + 1)
    weight = tl.multiple_of(address.to(tl.pointer_type(middle.dtype.element_ty)), 16)
    tile_count = tl.load(tiles)
    work = tile_count * ((width + BLOCK_N - 1) // BLOCK_N)
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        entry = tiles + 1 + 3 * (item % tile_count)
        expert = tl.load(entry).to(tl.int64)
        pairs = tl.load(entry + 1) + tl.arange(0, BLOCK_M)
        live = pairs < tl.load(entry + 2)
        pairs = pairs.to(tl.int64)
        columns = item // tile_count * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < width
        x_at = middle + pairs[:, None] * inner
        weight_at = weight + expert * (width * inner) + columns[None, :] * inner
        total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for begin in range(0, inner, BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            x = tl.load(x_at + k[None, :], mask=live[:, None] & (k[None, :] < inner), other=0.0)
            there = inside[None, :] & (k[:, None] < inner)
            w = tl.load(weight_at + k[:, None], mask=there, other=0.0)
            if WIDEN:
                x = x.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision="ieee")
        parts_at = parts + pairs[:, None] * width + columns[None, :]
        tl.store(parts_at, total.to(parts.dtype.element_ty), mask=live[:, None] & inside[None, :])


# out[row] = sum over the experts, in their order, of weight * part. slots: -1 where there is none.
@_jit
def combine(
    slots,
    weights,
    parts,
    out,
    out_stride,
    n,
    experts,
    width,
    BLOCK_N: tl.constexpr,
):
    blocks = (width + BLOCK_N - 1) // BLOCK_N
    for item in range(tl.program_id(0), n * blocks, tl.num_programs(0)):
        row = (item // blocks).to(tl.int64)
        columns = item % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < width
        total = tl.full([BLOCK_N], 0.0, tl.float32)
        for expert in range(0, experts):
            pair = tl.load(slots + expert * n + row).to(tl.int64)
            if pair >= 0:
                part = tl.load(parts + pair * width + columns, mask=inside, other=0.0)
                total += tl.load(weights + pair) * part.to(tl.float32)
        tl.store(out + row * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)
