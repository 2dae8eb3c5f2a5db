from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.policy import AsapPolicy
from engine.schedule.types import Assignment, Request

MIN, MAX, EXCLUSIVE, WAIT = 100, 200, 400, 1.0


def make_policy(groups: int = 1, lanes: int = 2) -> AsapPolicy:
    return AsapPolicy(groups, lanes, MIN, MAX, EXCLUSIVE, WAIT)


def add_all(policy: AsapPolicy, lengths: Sequence[int], arrival: float = 0.0) -> None:
    first = policy.waiting + policy.running
    for key, tokens in enumerate(lengths, start=first):
        policy.add(Request(key, tokens, arrival))


def keys(assignment: Assignment) -> list[list[int]]:
    return [[segment.key for segment in batch.segments] for batch in assignment.batches]


def finish(policy: AsapPolicy, assignment: Assignment) -> None:
    for batch in assignment.batches:
        policy.finished(assignment.group, batch.id)


def test_prompts_aggregate_to_the_inflection_point_and_batches_go_in_sets() -> None:
    policy = make_policy()
    add_all(policy, [60, 60, 30, 30, 30, 30])
    (assignment,) = policy.next(0.0)
    assert keys(assignment) == [[0, 1], [2, 3, 4, 5]]
    assert (policy.waiting, policy.running) == (0, 6)
    finish(policy, assignment)
    assert (policy.waiting, policy.running) == (0, 0)


def test_a_batch_that_the_next_prompt_would_overfill_is_closed_early() -> None:
    policy = make_policy()
    add_all(policy, [90, 150, 10])
    policy.drain()
    (assignment,) = policy.next(0.0)
    assert keys(assignment) == [[0], [1]]


def test_a_prompt_over_the_budget_is_alone_in_its_batch() -> None:
    policy = make_policy(lanes=3)
    add_all(policy, [10, 300, 10])
    policy.drain()
    (assignment,) = policy.next(0.0)
    assert keys(assignment) == [[0], [1], [2]]


def test_a_lone_batch_waits_for_company_but_not_longer_than_told() -> None:
    policy = make_policy()
    add_all(policy, [150], arrival=5.0)
    assert policy.next(5.0) == []
    assert policy.next_deadline(5.0) == 6.0
    add_all(policy, [10], arrival=5.5)  # not a whole batch: no reason to start early
    assert policy.next(5.9) == []
    assert policy.next_deadline(5.9) == 6.0
    (assignment,) = policy.next(6.0)
    assert keys(assignment) == [[0], [1]]
    assert policy.next_deadline(6.0) is None


def test_nothing_waits_for_company_once_drained() -> None:
    policy = make_policy()
    add_all(policy, [10])
    assert policy.next(0.0) == []
    policy.drain()
    assert policy.next_deadline(0.0) == 0.0
    assert [keys(a) for a in policy.next(0.0)] == [[[0]]]


def test_a_later_prompt_waits_again_after_a_drain() -> None:
    policy = make_policy(groups=2)
    add_all(policy, [10])
    policy.drain()
    assert len(policy.next(0.0)) == 1
    add_all(policy, [10])
    assert policy.next(0.0) == []


def test_limits_are_inclusive() -> None:
    policy = make_policy()
    add_all(policy, [90, MAX - 90, EXCLUSIVE])
    (assignment,) = policy.next(0.0)
    assert keys(assignment) == [[0, 1], [2]]


def test_a_long_prompt_has_a_group_to_itself_and_need_not_wait() -> None:
    policy = make_policy(groups=2)
    add_all(policy, [50, 401, 50, 100])
    first, second = policy.next(0.0)
    assert keys(first) == [[0, 2], [3]]  # its oldest prompt came before the long one
    assert keys(second) == [[1]]
    assert first.group != second.group


def test_a_long_prompt_overtakes_what_still_waits_for_company() -> None:
    policy = make_policy()
    add_all(policy, [50, 401])
    (assignment,) = policy.next(0.0)
    assert keys(assignment) == [[1]]


def test_long_and_short_prompts_are_served_in_the_order_they_came() -> None:
    policy = make_policy()
    add_all(policy, [401, 100, 100, 402, 100, 100])
    served = []
    while policy.waiting:
        (assignment,) = policy.next(0.0)
        served.append(keys(assignment))
        assert policy.next(0.0) == []  # the only group is busy
        assert policy.next_deadline(0.0) is None
        finish(policy, assignment)
    assert served == [[[0]], [[1], [2]], [[3]], [[4], [5]]]


def test_a_group_is_idle_only_when_all_its_batches_are_done() -> None:
    policy = make_policy()
    add_all(policy, [100] * 4)
    (assignment,) = policy.next(0.0)
    policy.finished(0, assignment.batches[1].id)
    assert policy.next(0.0) == []
    with pytest.raises(KeyError):
        policy.finished(0, assignment.batches[1].id)
    policy.finished(0, assignment.batches[0].id)
    assert len(policy.next(0.0)) == 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=5"):
        AsapPolicy(1, 2, 5, 4, 10, 0.0)
    with pytest.raises(ValueError, match="groups=0"):
        AsapPolicy(0, 2, 1, 4, 10, 0.0)
    with pytest.raises(ValueError, match="without tokens"):
        make_policy().add(Request(0, 0, 0.0))


class Run:
    """Drives a policy through random steps of time, and keeps account of what it did."""

    def __init__(self, groups: int, lanes: int) -> None:
        self.policy = make_policy(groups, lanes)
        self.groups, self.lanes = groups, lanes
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.started: dict[int, int] = {}  # key -> number of the assignment
        self.active: dict[int, Assignment] = {}
        self.assignments: list[Assignment] = []

    def add(self, tokens: int) -> None:
        request = Request(len(self.requests), tokens, self.now)
        self.requests[request.key] = request
        self.policy.add(request)

    def step(self) -> None:
        for assignment in self.policy.next(self.now):
            assert assignment.group not in self.active
            self.active[assignment.group] = assignment
            for batch in assignment.batches:
                for segment in batch.segments:
                    assert segment.key not in self.started
                    assert segment.start == 0
                    assert segment.length == self.requests[segment.key].tokens
                    self.started[segment.key] = len(self.assignments)
            self.assignments.append(assignment)
        if len(self.active) < self.groups:  # no idle group while something waited long enough
            for key in self.requests.keys() - self.started.keys():
                assert self.now - self.requests[key].arrival < WAIT
                assert self.requests[key].tokens <= EXCLUSIVE
        assert self.policy.waiting == len(self.requests) - len(self.started)

    def finish(self, index: int) -> None:
        if self.active:
            group = sorted(self.active)[index % len(self.active)]
            finish(self.policy, self.active.pop(group))


lengths = st.one_of(st.integers(1, 120), st.integers(1, 700))
events = st.one_of(
    st.tuples(st.just("add"), lengths),
    st.tuples(st.just("finish"), st.integers(0, 7)),
    st.tuples(st.just("wait"), st.integers(1, 4)),
)


@given(st.integers(1, 3), st.integers(1, 3), st.lists(events, max_size=60))
def test_any_run_of_events(groups: int, lanes: int, script: list[tuple[str, int]]) -> None:
    run = Run(groups, lanes)
    for event, value in script:
        if event == "add":
            run.add(value)
        elif event == "finish":
            run.finish(value)
        else:
            run.now += value * WAIT / 4
        run.step()
    run.policy.drain()
    run.step()
    while run.active:
        run.finish(0)
        run.step()

    # Every request exactly once (`step` checks "at most").
    assert run.started.keys() == run.requests.keys()
    assert (run.policy.waiting, run.policy.running) == (0, 0)

    batches = [batch for assignment in run.assignments for batch in assignment.batches]
    assert len({batch.id for batch in batches}) == len(batches)
    for batch in batches:
        assert batch.tokens <= MAX or len(batch.segments) == 1
        # The last prompt was let in because the ones before it were not enough.
        assert batch.tokens - batch.segments[-1].length < MIN
    for assignment in run.assignments:
        assert 1 <= len(assignment.batches) <= lanes
        if any(batch.tokens > EXCLUSIVE for batch in assignment.batches):
            assert len(assignment.batches) == 1

    # Nobody starves: short prompts start in the order they came, and so do long ones.
    for is_long in (False, True):
        order = [
            run.started[key]
            for key, request in run.requests.items()
            if (request.tokens > EXCLUSIVE) == is_long
        ]
        assert all(before <= after for before, after in pairwise(order))


@given(st.lists(lengths, min_size=1, max_size=40), st.integers(1, 3))
def test_work_that_is_ready_starts_in_the_order_of_its_first_prompt(
    prompts: list[int], lanes: int
) -> None:
    policy = make_policy(groups=1, lanes=lanes)
    add_all(policy, prompts)
    policy.drain()
    firsts = []
    while policy.waiting:
        (assignment,) = policy.next(0.0)
        firsts.append(assignment.batches[0].segments[0].key)
        finish(policy, assignment)
    assert firsts == sorted(firsts)
