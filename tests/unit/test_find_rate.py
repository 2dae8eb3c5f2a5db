"""The search for the highest rate: where it ends, and that it ends."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.find_rate import Found, Search, Trial, find_rate, find_rate_async

rates = st.floats(0.01, 10_000)


@given(edge=rates, start=rates, tolerance=st.floats(0.01, 0.5), stride=st.floats(1.05, 4.0))
def test_it_ends_within_the_tolerance_below_the_edge(
    edge: float, start: float, tolerance: float, stride: float
) -> None:
    found = find_rate(
        lambda rate: rate <= edge, start, tolerance=tolerance, stride=stride, most_trials=1000
    )
    assert found.rate <= edge < found.rate * (1 + tolerance) * (1 + 1e-9)
    assert found.too_high is not None
    assert edge < found.too_high
    tried = [trial.rate for trial in found.trials]
    assert len(set(tried)) == len(tried)
    assert tried[0] == start


def test_it_doubles_or_halves_and_then_bisects_between_logarithms() -> None:
    up = find_rate(lambda rate: rate <= 5, 1.0, tolerance=0.5)
    assert [trial.rate for trial in up.trials] == pytest.approx([1, 2, 4, 8, 32**0.5])
    assert up == Found(4.0, up.trials)
    down = find_rate(lambda rate: rate <= 3, 16.0, tolerance=0.5)
    assert [trial.rate for trial in down.trials] == pytest.approx([16, 8, 4, 2, 8**0.5])


@pytest.mark.parametrize(("met", "rate", "last"), [(True, 8.0, None), (False, 0.0, 0.125)])
def test_it_ends_where_there_is_no_edge(met: bool, rate: float, last: float | None) -> None:
    found = find_rate(lambda rate: met, 1.0, most_trials=4)
    assert (found.rate, found.too_high) == (rate, last)
    assert len(found.trials) == 4


def test_a_search_can_be_told_step_by_step_and_by_a_coroutine() -> None:
    search = Search(1.0, tolerance=0.2)
    assert (search.next_rate, search.found) == (1.0, Found(0.0, ()))
    search.tell(True)
    assert search.next_rate == 2.0
    assert search.found == Found(1.0, (Trial(1.0, True),))

    async def meets(rate: float) -> bool:
        await asyncio.sleep(0)
        return rate <= 3

    found = asyncio.run(find_rate_async(meets, 1.0, tolerance=0.2))
    assert found == find_rate(lambda rate: rate <= 3, 1.0, tolerance=0.2)


@pytest.mark.parametrize(
    "wrong", [{"start": 0.0}, {"tolerance": 0.0}, {"stride": 1.0}, {"most_trials": 0}]
)
def test_numbers_that_no_search_ends_with(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Search(**({"start": 1.0} | wrong))  # type: ignore[arg-type]
