"""The loads of the benchmarks, and the search for the highest rate."""

import random
import statistics

import pytest

from benchmarks.asynchrony import paced
from benchmarks.contenders import _last
from benchmarks.offered import Outcome, lognormal, poisson
from engine.errors import RunError


@pytest.mark.parametrize("edge", [-60, -9, -1, 0, 3, 4, 5, 17, 200])
def test_the_search_ends_at_the_last_step_that_holds(edge: int) -> None:
    assert _last(lambda step: step <= edge) == edge


def test_a_search_without_any_good_rate_ends() -> None:
    with pytest.raises(RunError, match="no rate keeps within the target"):
        _last(lambda step: False)


def test_every_rate_has_the_same_prompts_of_a_seed() -> None:
    length = lognormal(500, 1.0, 1, 4096)
    slow, fast = poisson(5, 40, length, seed=3), poisson(10, 20, length, seed=3)
    assert [each.tokens for each in slow] == [each.tokens for each in fast]
    assert [each.at_s for each in slow] == pytest.approx([2 * each.at_s for each in fast])
    assert all(each.at_s <= 40 for each in slow)
    assert 150 < len(slow) < 250


def test_lengths_are_lognormal_within_their_bounds() -> None:
    rng = random.Random(0)
    draw = lognormal(512, 1.0, 1, 4096)
    lengths = [draw(rng) for _ in range(20_000)]
    assert max(lengths) <= 4096
    assert statistics.median(lengths) == pytest.approx(310, rel=0.05)  # 512 / exp(1/2), cut


def test_figures_of_an_outcome() -> None:
    outcome = Outcome(tokens=[9, 1, 5, 7], ttft=[4.0, 1.0, 2.0, 3.0], given_up=0, late_s=0.0)
    assert (outcome.mean, outcome.p99, outcome.shortest_quarter) == (2.5, 4.0, 1.0)


def test_paced_loads_say_what_they_are() -> None:
    comparison = paced(10.0, quick=True)
    assert comparison.notes[0].startswith("paced: waits instead of computing")
    assert {"asap", "sync", "sync-chunked", "sync-afd"} == set(comparison.layouts)
