"""Window layout: nothing overlaps, everything is aligned and inside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.comm.layout import ALIGNMENT, WindowShape, tiles

shapes = st.builds(
    WindowShape,
    rows=st.integers(1, 5000),
    hidden=st.integers(1, 8192),
    top_k=st.integers(1, 16),
    local_experts=st.integers(0, 300),
    payload_bytes=st.sampled_from([2, 4]),
    lanes=st.integers(1, 5),
)


@given(shapes)
def test_arrays_are_aligned_in_order_and_disjoint(shape: WindowShape) -> None:
    rows = shape.rows * shape.hidden * shape.payload_bytes
    arrays = [
        (shape.hidden_at, rows),
        (shape.counts_at, shape.local_experts * 4),
        (shape.row_index_at, shape.rows * min(shape.top_k, shape.local_experts) * 4),
        (shape.weights_at, shape.rows * min(shape.top_k, shape.local_experts) * 4),
        (shape.out_at, rows),
    ]
    end = 0
    for lane in range(shape.lanes):
        for at, size in arrays:
            start = shape.lane_at(lane) + at
            assert start % ALIGNMENT == 0
            assert end <= start < end + ALIGNMENT
            end = start + size
    assert end <= shape.total_bytes < end + ALIGNMENT


@pytest.mark.parametrize("field", ["rows", "hidden", "top_k", "payload_bytes", "lanes"])
def test_a_size_of_zero_is_refused(field: str) -> None:
    sizes = {"rows": 1, "hidden": 1, "top_k": 1, "local_experts": 0, "payload_bytes": 4, "lanes": 1}
    WindowShape(**sizes)
    with pytest.raises(ValueError, match=field):
        WindowShape(**sizes | {field: 0})


@given(st.integers(0, 300), st.integers(1, 50))
def test_tiles_cover_a_batch_in_order(tokens: int, rows: int) -> None:
    cut = list(tiles(tokens, rows))
    assert [i for tile in cut for i in range(tile.start, tile.stop)] == list(range(tokens))
    assert all(1 <= tile.stop - tile.start <= rows for tile in cut)
    assert len(cut) == -(-tokens // rows)
