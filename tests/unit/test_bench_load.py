"""Open-loop load: when prompts are sent, what becomes of them, and the figures of it."""

import asyncio
import time
from dataclasses import asdict

import msgspec
import pytest

from engine.bench.load import GIVEN_UP, Outcome, offer
from engine.bench.summary import Times, summarize
from engine.bench.workload import PromptPool
from engine.errors import RunError
from engine.traffic.arrivals import Arrival


class Fake:
    """Answers prompts of 1 token at once, fails those of 2, and never answers those of 3."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, float]] = []
        self.cancelled: list[int] = []
        self.start = time.monotonic()

    async def first_token(self, key: int, tokens: int) -> None:
        self.sent.append((key, tokens, time.monotonic() - self.start))
        try:
            if tokens == 2:
                raise RunError("it broke")
            if tokens == 3:
                await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise


def test_prompts_are_sent_at_their_times_whatever_the_others_do() -> None:
    target = Fake()
    arrivals = [Arrival(0.0, 3), Arrival(0.0, 2), Arrival(0.02, 3), Arrival(0.04, 1)]
    outcomes = asyncio.run(offer(arrivals, target, patience_s=0.03))
    assert [sent[:2] for sent in target.sent] == [(0, 3), (1, 2), (2, 3), (3, 1)]
    assert all(sent[2] >= at for sent, (at, _) in zip(target.sent, arrivals, strict=True))
    assert [each.error for each in outcomes] == [GIVEN_UP, "it broke", GIVEN_UP, None]
    assert sorted(target.cancelled) == [0, 2]
    assert [(each.at_s, each.tokens) for each in outcomes] == arrivals
    # What is given up has waited from its own time until the end, not from when it was sent.
    waits = [outcomes[0].ttft_s, outcomes[2].ttft_s]
    assert waits[0] >= 0.07 - 1e-3
    assert waits[0] - waits[1] == pytest.approx(0.02, abs=0.01)
    assert all(0 <= each.late_s <= each.ttft_s for each in outcomes)


def test_a_driver_that_is_late_says_so_and_ttft_counts_from_the_time_of_arrival() -> None:
    class Slow(Fake):
        async def first_token(self, key: int, tokens: int) -> None:
            await super().first_token(key, tokens)
            time.sleep(0.02)  # blocks the loop, as an overloaded driver does

    _, second = asyncio.run(offer([Arrival(0.0, 1), Arrival(0.001, 1)], Slow(), patience_s=1))
    assert second.late_s >= 0.015
    assert second.ttft_s >= second.late_s + 0.02 - 1e-3


def test_no_prompts_and_a_load_that_is_interrupted() -> None:
    assert asyncio.run(offer([], Fake(), patience_s=1)) == []
    target = Fake()

    async def interrupted() -> None:
        load = asyncio.create_task(offer([Arrival(0.0, 3), Arrival(60.0, 1)], target, patience_s=1))
        while not target.sent:
            await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load

    asyncio.run(interrupted())
    assert target.cancelled == [0]


def outcome(tokens: int, ttft_s: float, error: str | None = None, at_s: float = 0.0) -> Outcome:
    return Outcome(at_s, tokens, 0.001 * tokens, ttft_s, error)


def test_figures_of_a_load() -> None:
    outcomes = [
        outcome(9, 4.0, at_s=6.0),
        outcome(1, 1.0),
        outcome(5, 2.0),
        outcome(7, 3.0, GIVEN_UP),
        outcome(8, 0.1, "it broke"),
    ]
    found = summarize(outcomes, slo_s=2.0)
    assert (found.requests, found.answered, found.failed, found.given_up) == (5, 3, 1, 1)
    assert found.ttft == Times(2.5, 2.0, 4.0, 4.0)
    assert found.seconds == 10.0
    assert (found.tokens_per_s, found.requests_per_s) == (1.5, 0.3)
    assert (found.within_slo, found.goodput) == (0.4, 0.2)
    assert (found.late_median_s, found.late_most_s) == pytest.approx((0.007, 0.009))
    classes = [(each.least, each.most, each.requests) for each in found.by_length]
    assert classes == [(1, 5, 2), (7, 7, 1), (8, 8, 1), (9, 9, 1)]
    assert [each.within_slo for each in found.by_length] == [1.0, 0.0, 0.0, 0.0]
    assert found.by_length[2].ttft is None
    assert msgspec.json.decode(msgspec.json.encode(found)) == asdict(found)


def test_percentiles_are_of_the_nearest_rank() -> None:
    found = summarize([outcome(1, float(number)) for number in range(1, 201)])
    assert found.ttft == Times(100.5, 100.0, 180.0, 198.0)
    assert (found.within_slo, found.goodput, found.by_length[0].within_slo) == (None, None, None)


def test_figures_where_nothing_was_answered() -> None:
    found = summarize([outcome(1, 0.0, "refused")], slo_s=1.0)
    assert (found.ttft, found.tokens_per_s, found.goodput) == (None, 0.0, 0.0)


def test_prompts_of_a_pool_have_their_lengths_and_begin_differently() -> None:
    pool = PromptPool(50, 4096)
    prompts = [pool.prompt(key, 50) for key in range(200)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 200
    assert prompts[7] == PromptPool(50, 4096).prompt(7, 50)
