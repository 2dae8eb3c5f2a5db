"""The policy when groups are lost, batches retried and prompts cancelled."""

from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.policy import AsapPolicy
from engine.schedule.types import Assignment, Request

MIN, MAX, EXCLUSIVE, WAIT = 100, 200, 400, 1.0


def make_policy(groups: int = 1, lanes: int = 2) -> AsapPolicy:
    return AsapPolicy(groups, lanes, MIN, MAX, EXCLUSIVE, WAIT)


def start(policy: AsapPolicy, lengths: list[int]) -> list[Assignment]:
    for key, tokens in enumerate(lengths):
        policy.add(Request(key, tokens, 0.0))
    policy.drain()
    return policy.next(0.0)


def test_a_lost_group_gets_nothing_until_it_has_recovered() -> None:
    policy = make_policy()
    (assignment,) = start(policy, [100, 100, 100])
    lost = policy.lost(0)
    assert lost == list(assignment.batches)
    assert (policy.waiting, policy.running) == (1, 0)
    policy.retry(lost)
    assert (policy.waiting, policy.running) == (3, 0)
    assert policy.next(9.0) == []
    assert policy.next_deadline(9.0) is None
    policy.recovered(0)
    assert policy.next_deadline(9.0) == 9.0
    assert policy.next(9.0) == [assignment]  # whole, under its own ids, before what waits


def test_an_idle_group_can_be_lost_too() -> None:
    policy = make_policy(groups=2)
    assert policy.lost(0) == []
    assert policy.lost(0) == []  # it died again before it was ready
    (assignment,) = start(policy, [100, 100, 100, 100])
    assert assignment.group == 1
    policy.recovered(0)
    assert [a.group for a in policy.next(0.0)] == [0]


def test_another_group_takes_over() -> None:
    policy = make_policy(groups=2)
    first, second = start(policy, [100] * 4)
    policy.retry(policy.lost(first.group))
    assert policy.next(0.0) == []
    for batch in second.batches:
        policy.finished(second.group, batch.id)
    (again,) = policy.next(0.0)
    assert (again.group, again.batches) == (second.group, first.batches)


def test_prompts_of_a_batch_alone() -> None:
    policy = make_policy(lanes=3)
    (assignment,) = start(policy, [30, 30, 40])
    (batch,) = policy.lost(0)
    alone = policy.alone(batch)
    assert [single.segments for single in alone] == [(segment,) for segment in batch.segments]
    assert len({batch.id, *(single.id for single in alone)}) == 4
    policy.retry(alone)
    policy.recovered(0)
    assert [a.batches for a in policy.next(0.0)] == [tuple(alone)]
    assert assignment.batches == (batch,)


def test_a_long_prompt_is_retried_by_itself() -> None:
    policy = make_policy(groups=2)
    assignments = start(policy, [100, 401])
    for assignment in assignments:
        policy.retry(policy.lost(assignment.group))
    policy.recovered(0)
    policy.recovered(1)
    assert {a.batches for a in policy.next(0.0)} == {a.batches for a in assignments}


def test_cancelled_prompts_never_start() -> None:
    policy = make_policy()
    for key, tokens in enumerate([60, 60, 30, 401]):
        policy.add(Request(key, tokens, 0.0))
    assert policy.cancel(1)
    assert policy.cancel(3)
    assert not policy.cancel(3)
    assert policy.waiting == 2
    policy.drain()
    (assignment,) = policy.next(0.0)
    started = [s.key for batch in assignment.batches for s in batch.segments]
    assert started == [0, 2]
    assert not policy.cancel(0)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=30),
    groups=st.integers(1, 3),
    lanes=st.integers(1, 3),
    fates=st.lists(st.sampled_from(["finish", "lose", "lose and split"]), max_size=40),
)
def test_every_prompt_finishes_once_whatever_is_lost(
    lengths: list[int], groups: int, lanes: int, fates: list[str]
) -> None:
    policy = make_policy(groups, lanes)
    running = start(policy, lengths)
    finished: list[int] = []
    while running or policy.waiting:
        fate = fates.pop() if fates else "finish"
        assignment = running.pop(0)
        if fate == "finish":
            for batch in assignment.batches:
                policy.finished(assignment.group, batch.id)
                finished.extend(segment.key for segment in batch.segments)
        else:
            lost = policy.lost(assignment.group)
            assert lost == list(assignment.batches)
            if fate == "lose and split":
                lost = [single for batch in lost for single in policy.alone(batch)]
            policy.retry(lost)
            policy.recovered(assignment.group)
        running += policy.next(0.0)
    assert sorted(finished) == list(range(len(lengths)))
    assert (policy.waiting, policy.running) == (0, 0)
