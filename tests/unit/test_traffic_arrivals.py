"""Arrivals: Poisson's, and scaled ones."""

import math
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.traffic.arrivals import Arrival, mean_rate, poisson, scale
from engine.traffic.lengths import parse_lengths

LENGTHS = parse_lengths("uniform:1-1000")
FACTORS = st.floats(0.01, 100)
TRACES = st.lists(
    st.builds(Arrival, st.floats(0, 1e6), st.integers(1, 200_000)), max_size=20
).map(sorted)  # fmt: skip


def test_gaps_are_exponential_and_lengths_are_of_the_distribution() -> None:
    arrivals = poisson(5.0, LENGTHS, 1, count=20_000)
    times = [arrival.at_s for arrival in arrivals]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert min(gaps) > 0
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.03)
    assert pvariance(gaps) == pytest.approx(1 / 25, rel=0.05)
    assert fmean(arrival.tokens for arrival in arrivals) == pytest.approx(LENGTHS.mean, rel=0.03)
    assert mean_rate(arrivals) == pytest.approx(5, rel=0.03)


def test_it_ends_at_the_duration_or_at_the_count() -> None:
    arrivals = poisson(50.0, LENGTHS, 3, duration_s=100.0)
    assert arrivals[-1].at_s <= 100 < poisson(50.0, LENGTHS, 3, count=10_000)[-1].at_s
    assert len(arrivals) == pytest.approx(5000, rel=0.1)
    assert poisson(50.0, LENGTHS, 3, duration_s=100.0, count=7) == arrivals[:7]
    assert poisson(50.0, LENGTHS, 3, duration_s=1.0, count=10_000) == [
        arrival for arrival in arrivals if arrival.at_s <= 1
    ]
    assert len(poisson(1e-9, LENGTHS, 3, duration_s=1.0)) == 1


@given(st.integers(0, 5), st.floats(1e-3, 1e3))
def test_a_seed_means_the_same_at_every_rate(seed: int, rate: float) -> None:
    ours, at_one = poisson(rate, LENGTHS, seed, count=20), poisson(1.0, LENGTHS, seed, count=20)
    assert [each.tokens for each in ours] == [each.tokens for each in at_one]
    assert [each.at_s * rate for each in ours] == pytest.approx([each.at_s for each in at_one])
    assert ours != poisson(rate, LENGTHS, seed + 1, count=20)


def test_gaps_do_not_depend_on_lengths() -> None:
    fixed = poisson(2.0, parse_lengths("fixed:5"), 4, count=30)
    assert [each.at_s for each in fixed] == [
        each.at_s for each in poisson(2.0, LENGTHS, 4, count=30)
    ]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_rates_that_there_are_not(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        poisson(rate, LENGTHS, 0, count=1)
    for factors in ({"rate": rate}, {"lengths": rate}):
        with pytest.raises(ValueError, match="above 0"):
            scale([], **factors)


def test_without_an_end() -> None:
    with pytest.raises(ValueError, match="an end"):
        poisson(1.0, LENGTHS, 0)


@given(TRACES, FACTORS, FACTORS)
def test_scaled_ones(arrivals: list[Arrival], rate: float, lengths: float) -> None:
    scaled = scale(arrivals, rate=rate, lengths=lengths)
    assert len(scaled) == len(arrivals)
    assert scaled == sorted(scaled, key=lambda arrival: arrival.at_s)
    for new, old in zip(scaled, arrivals, strict=True):
        assert new.at_s == pytest.approx(old.at_s / rate)
        assert new.tokens >= 1
        assert abs(new.tokens - old.tokens * lengths) <= (1 if new.tokens == 1 else 0.5)
    assert mean_rate(scaled) == pytest.approx(mean_rate(arrivals) * rate)


@given(TRACES, FACTORS, st.integers(1, 200_000))
def test_those_that_are_too_long_then_are_left_out(
    arrivals: list[Arrival], lengths: float, most: int
) -> None:
    scaled = scale(arrivals, lengths=lengths)
    kept = scale(arrivals, lengths=lengths, max_length=most)
    assert kept == [arrival for arrival in scaled if arrival.tokens <= most]


def test_scaled_by_nothing_is_the_same() -> None:
    arrivals = [Arrival(0.0, 3), Arrival(0.5, 1)]
    assert scale(arrivals) == arrivals
    assert scale(arrivals, rate=2, lengths=0.1, max_length=1) == [(0.0, 1), (0.25, 1)]


def test_the_mean_rate() -> None:
    assert mean_rate([Arrival(1.0, 1), Arrival(1.5, 1), Arrival(3.0, 1)]) == 1.0
    assert mean_rate([Arrival(1.0, 1), Arrival(1.0, 1)]) == 0.0
    assert mean_rate([Arrival(1.0, 1)]) == mean_rate([]) == 0.0
