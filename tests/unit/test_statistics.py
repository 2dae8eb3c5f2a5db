"""Rates, latencies and shares, against what is known to have happened."""

import math
import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.messages import Progress, RankStatus, Snapshot
from engine.control.statistics import MINUTE_S, Statistics
from engine.topology.ranks import RankId

A, E = RankId("attention", 0), RankId("expert", 0)


def snapshot(statistics: Statistics, now: float) -> Snapshot:
    ranks = [RankStatus(A, 1, True), RankStatus(E, 2, True)]
    return statistics.complete(Snapshot(True, 0, 0, 0, 0, ranks), now)


def rank(statistics: Statistics, id_: RankId, now: float, elapsed: float = 0.0) -> RankStatus:
    return statistics.complete_rank(RankStatus(id_, 1, True), now, elapsed)


def report(busy: float, waits: float = 0.0, tokens: int = 0, **more: Any) -> Progress:
    return Progress(busy, tokens, work_items=round(busy * 10), wait_seconds=waits, **more)


def test_nothing_has_happened() -> None:
    statistics = Statistics(ttft_slo_s=2.0)
    empty = snapshot(statistics, 50.0)
    assert (empty.uptime_s, empty.tokens_per_s, empty.goodput, empty.ttft.count) == (0, 0, 0, 0)
    assert (empty.history, empty.ttft_slo_s) == ([], 2.0)
    assert rank(statistics, A, 50.0) == RankStatus(A, 1, True)


def test_results_of_the_last_minute() -> None:
    statistics = Statistics(ttft_slo_s=1.0)
    statistics.submitted(0.0)
    for second in range(200):
        statistics.finished(10, ttft_s=100.0, failed=False, now=second + 0.5)
    for second in range(200, 260):
        for ttft in (0.5, 1.0, 3.0):
            statistics.finished(40, ttft, failed=False, now=second + 0.5)
        statistics.finished(99, 9.0, failed=True, now=second + 0.5)
    now = snapshot(statistics, 260.0)
    assert (now.finished, now.failed, now.prompt_tokens) == (200 + 180, 60, 2000 + 7200)
    assert now.tokens_per_s == pytest.approx(120, rel=0.001)
    assert now.goodput == pytest.approx(2.0, rel=0.001)
    assert now.ttft.p50 == pytest.approx(1.0, rel=0.02)
    assert now.ttft.p90 == pytest.approx(3.0, rel=0.02)
    assert [point.tokens_per_s for point in now.history] == [120.0] * MINUTE_S
    later = snapshot(statistics, 400.0)
    assert (later.tokens_per_s, later.goodput, later.ttft.count) == (0.0, 0.0, 0)
    assert later.finished == 380


def test_without_a_target_every_success_is_good() -> None:
    statistics = Statistics()
    for second in range(100):
        statistics.finished(1, 1e6, failed=False, now=second + 0.5)
    assert snapshot(statistics, 100.0).goodput == pytest.approx(1.0, rel=0.001)


def test_rates_of_the_first_seconds_do_not_count_the_time_before() -> None:
    statistics = Statistics()
    statistics.submitted(1000.25)
    statistics.finished(300, 1.0, failed=False, now=1002.0)
    assert snapshot(statistics, 1003.25).tokens_per_s == pytest.approx(100.0)


def test_a_rank_lately_and_in_all() -> None:
    statistics = Statistics()
    for tick in range(1, 101):  # half computing, a quarter waiting, reported every 0.2 s
        now = tick * 0.2
        statistics.progress(E, report(now / 2, now / 4, tokens=tick * 20), now)
    status = rank(statistics, E, 20.0, elapsed=40.0)
    assert (status.recent_busy, status.recent_waits) == pytest.approx((0.5, 0.25), abs=0.01)
    assert (status.busy, status.waits) == pytest.approx((0.25, 0.125))
    assert status.tokens == 2000
    assert status.tokens_per_s == pytest.approx(100, rel=0.01)
    points = snapshot(statistics, 20.0).history
    assert [point.expert_busy for point in points[1:]] == pytest.approx([0.5] * (len(points) - 1))
    assert all(point.attention_busy == 0 for point in points)
    idle = rank(statistics, E, 30.0, elapsed=50.0)
    assert (idle.recent_busy, idle.recent_waits, idle.tokens_per_s) == (0.0, 0.0, 0.0)


def test_a_long_step_counts_before_its_report() -> None:
    statistics = Statistics()
    statistics.progress(A, report(0.0), 0.0)
    statistics.progress(A, report(0.1, state="computing"), 100.0)
    assert rank(statistics, A, 103.0).recent_busy == pytest.approx(3.1 / 5)
    busy = [point.attention_busy for point in snapshot(statistics, 103.0).history]
    assert busy[-3:] == pytest.approx([1.0, 1.0, 1.0])
    statistics.progress(A, report(8.1, state="waiting"), 108.0)
    busy = [point.attention_busy for point in snapshot(statistics, 108.0).history]
    assert busy[-8:] == pytest.approx([1.0] * 8)
    assert sum(busy) == pytest.approx(8.1)
    later = rank(statistics, A, 112.0)
    assert (later.recent_busy, later.recent_waits) == pytest.approx((0.2, 0.8))


def test_work_after_a_long_pause_is_recent() -> None:
    statistics = Statistics()
    statistics.progress(E, report(0.0), 0.0)
    statistics.progress(E, report(1.0, tokens=500), 3600.0)
    status = rank(statistics, E, 3600.0)
    assert status.recent_busy == pytest.approx(0.2)
    assert status.tokens_per_s == pytest.approx(100)
    assert [p.expert_busy for p in snapshot(statistics, 3600.0).history][-2:] == [0.0, 1.0]


def test_a_report_tells_of_the_time_since_the_last_one_alone() -> None:
    statistics = Statistics()
    statistics.submitted(8.0)
    statistics.progress(E, report(0.0), 10.0)
    statistics.progress(E, report(5.0), 12.0)  # more than there was time for
    busy = [point.expert_busy for point in snapshot(statistics, 13.0).history]
    assert busy == [0.0, 0.0, 1.0, 1.0, 0.0]
    assert rank(statistics, E, 12.0).recent_busy == 1.0


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_new_life_is_added_to_the_old(incarnation: int) -> None:
    statistics = Statistics()
    statistics.progress(E, report(5.0, 2.0, tokens=100), 10.0)
    statistics.progress(RankId("expert", 0, incarnation), report(0.5, 0.5, tokens=30), 12.0)
    status = rank(statistics, E, 12.0, elapsed=12.0)
    assert (status.busy_seconds, status.tokens, status.work_items) == (5.5, 130, 55)
    assert status.waits == pytest.approx(2.5 / 12)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 30.0),  # time that passes
            st.floats(0.0, 1.0),  # share of it that the rank computes
            st.floats(0.0, 1.0),  # share of the rest that it waits
            st.sampled_from(["idle", "computing", "waiting"]),
            st.booleans(),  # whether a new life begins
        ),
        max_size=60,
    ),
    st.floats(0.0, 20.0),
)
def test_shares_are_shares_whatever_is_reported(
    steps: list[tuple[float, float, float, Any, bool]], after: float
) -> None:
    statistics = Statistics()
    now = busy = waits = total = 0.0
    incarnation = 0
    for passed, computing, waiting, state, dies in steps:
        now += passed
        if dies:
            incarnation, busy, waits = incarnation + 1, 0.0, 0.0
        busy += passed * computing
        waits += passed * (1 - computing) * waiting
        total += passed * computing
        report_ = Progress(busy, 0, 0, wait_seconds=waits, state=state)
        statistics.progress(RankId("expert", 0, incarnation), report_, now)
    now += after
    status = rank(statistics, E, now, elapsed=now)
    assert status.busy_seconds == pytest.approx(total)
    for share in (status.busy, status.waits, status.recent_busy, status.recent_waits):
        assert 0.0 <= share <= 1.0
    assert status.recent_busy + status.recent_waits <= 1.0 + 1e-6
    history = snapshot(statistics, now).history
    assert len(history) <= MINUTE_S
    assert all(0.0 <= point.expert_busy <= 1.0 for point in history)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 5.0), st.integers(1, 1000), st.floats(0.001, 100.0)), min_size=1
    )
)
def test_tokens_and_quantiles_against_a_list(events: list[tuple[float, int, float]]) -> None:
    statistics, now, kept = Statistics(), 0.0, []
    for passed, tokens, ttft in events:
        now += passed
        statistics.finished(tokens, ttft, failed=False, now=now)
        kept.append((now, tokens, ttft))
    seen = snapshot(statistics, now)
    oldest = math.floor(now) - MINUTE_S
    lately = sorted(ttft for time, _, ttft in kept if time >= oldest)
    assert seen.ttft.count == len(lately)
    for share, found in ((0.5, seen.ttft.p50), (0.9, seen.ttft.p90), (0.99, seen.ttft.p99)):
        exact = lately[math.ceil(share * len(lately)) - 1]
        assert exact * (1 - 1e-9) <= found <= exact * 1.021
    in_history = sum(t for time, t, _ in kept if oldest <= time < math.floor(now))
    assert sum(point.tokens_per_s for point in seen.history) == in_history


def _footprint(thing: object, seen: set[int]) -> int:
    """Bytes of everything that `thing` holds."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    held: list[Any] = []
    if isinstance(thing, dict):
        held = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set) or type(thing).__name__ == "deque":
        held = list(thing)  # type: ignore[call-overload]
    else:
        held = list(getattr(thing, "__dict__", {}).values())
        held += [getattr(thing, slot, None) for slot in getattr(type(thing), "__slots__", ())]
    return sys.getsizeof(thing) + sum(_footprint(one, seen) for one in held)


def test_memory_does_not_grow_with_the_rate() -> None:
    statistics, draw = Statistics(1.0), random.Random(1)
    sizes = []
    for minute in range(3):
        for event in range(100_000):
            now = minute * 60 + event * 60 / 100_000
            statistics.submitted(now)
            statistics.finished(100, draw.lognormvariate(0, 1), failed=event % 9 == 0, now=now)
            if event % 10 == 0:
                statistics.progress(E, report(now / 2, tokens=event), now)
        sizes.append(_footprint(statistics, set()))
    assert max(sizes) < 2e6
    assert sizes[2] < sizes[1] * 1.1


def test_memory_does_not_grow_with_the_rate_of_reports() -> None:
    sizes = []
    for per_second in (10, 2000):
        statistics = Statistics()
        for tick in range(20 * per_second):
            now = tick / per_second
            statistics.progress(E, report(now / 2, tokens=tick), now)
        assert rank(statistics, E, 20.0).recent_busy == pytest.approx(0.5, abs=0.03)
        sizes.append(_footprint(statistics, set()))
    assert sizes[1] < sizes[0] * 1.5
