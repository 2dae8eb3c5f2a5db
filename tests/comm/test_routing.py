"""plan_dispatch against a loop over tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.comm.routing import plan_dispatch


def naive(experts: Tensor, weights: Tensor, span: range) -> tuple[list[int], ...]:
    pairs = sorted(
        (int(e), token, float(weights[token, slot]))
        for token, chosen in enumerate(experts)
        for slot, e in enumerate(chosen)
        if int(e) in span
    )
    rows = sorted({token for _, token, _ in pairs})
    return (
        rows,
        [sum(e == expert for e, _, _ in pairs) for expert in span],
        [rows.index(token) for _, token, _ in pairs],
        [weight for _, _, weight in pairs],
    )


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[range]]:
    total = draw(st.integers(1, 12))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=4)))
    edges = [0, *cuts, total]
    bounds = [range(a, b) for a, b in itertools.pairwise(edges)]
    tokens, k = draw(st.integers(0, 20)), draw(st.integers(1, total))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    experts = torch.rand(tokens, total, generator=seeded).topk(k).indices
    return experts, torch.rand(tokens, k, generator=seeded), bounds


@given(routings())
def test_equals_the_naive_loop(routing: tuple[Tensor, Tensor, list[range]]) -> None:
    experts, weights, bounds = routing
    parts = plan_dispatch(experts, weights, bounds)
    assert len(parts) == len(bounds)
    for part, span in zip(parts, bounds, strict=True):
        rows, counts, row_index, pair_weights = naive(experts, weights, span)
        assert part.rows.tolist() == rows
        assert part.counts.tolist() == counts
        assert part.row_index.tolist() == row_index
        assert part.weights.tolist() == pair_weights
        assert (part.n, part.p) == (len(rows), len(row_index))


def test_dtypes() -> None:
    (part,) = plan_dispatch(torch.tensor([[0, 1]]), torch.ones(1, 2), [range(2)])
    assert part.rows.dtype == torch.int64
    assert part.counts.dtype == part.row_index.dtype == torch.int32
    assert part.weights.dtype == torch.float32


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_of_no_rank_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        plan_dispatch(torch.tensor([[0, wrong]]), torch.ones(1, 2), [range(2), range(2, 4)])
