import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.topology.placement import place_experts


@given(st.integers(1, 300), st.data())
def test_every_expert_has_one_rank_and_ranks_are_even(total: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, total))
    places = place_experts(total, ranks)
    assert len(places) == ranks
    assert [expert for place in places for expert in place] == list(range(total))
    assert max(map(len, places)) - min(map(len, places)) <= 1


def test_a_rank_without_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="8 experts cannot be placed on 9 ranks"):
        place_experts(8, 9)
