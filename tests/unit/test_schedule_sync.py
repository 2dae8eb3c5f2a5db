"""Groups in lockstep: what a step holds, and what becomes of prompts when groups are lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.build import make_policy
from engine.schedule.policy import AsapPolicy
from engine.schedule.sync import LockstepPolicy
from engine.schedule.types import Assignment, Request, Segment

MAX, CHUNK = 100, 64


def add_all(policy: LockstepPolicy, lengths: Sequence[int]) -> None:
    for key, tokens in enumerate(lengths):
        policy.add(Request(key, tokens, float(key)))


def keys(step: Sequence[Assignment]) -> list[list[int]]:
    assert all(len(assignment.batches) == 1 for assignment in step)
    return [[s.key for s in assignment.batches[0].segments] for assignment in step]


def finish(policy: LockstepPolicy, step: Sequence[Assignment]) -> None:
    for assignment in step:
        policy.finished(assignment.group, assignment.batches[0].id)


def test_the_next_prompt_goes_to_the_group_with_the_fewest_tokens() -> None:
    policy = LockstepPolicy(3, MAX)
    add_all(policy, [50, 20, 30, 15, 40])
    step = policy.next(0.0)
    assert keys(step) == [[0], [1, 3], [2, 4]]
    assert [a.group for a in step] == [0, 1, 2]
    assert {a.step for a in step} == {step[0].step}
    assert step[0].step is not None
    assert step[0].step.id == step[0].batches[0].id
    assert step[0].step.most_tokens == 70


def test_a_group_that_nothing_is_left_for_gets_a_batch_without_segments() -> None:
    policy = LockstepPolicy(3, MAX)
    add_all(policy, [50])
    step = policy.next(0.0)
    assert keys(step) == [[0], [], []]
    assert (policy.waiting, policy.running) == (0, 1)
    assert len({a.batches[0].id for a in step}) == 3


def test_no_group_starts_before_all_have_finished_and_nothing_waits_for_company() -> None:
    policy = LockstepPolicy(2, MAX)
    assert policy.next(0.0) == []
    add_all(policy, [10, 20])
    assert policy.next_deadline(0.0) == 0.0
    first = policy.next(0.0)
    policy.add(Request(2, 30, 0.0))
    assert policy.next_deadline(0.0) is None
    policy.finished(0, first[0].batches[0].id)
    assert policy.next(1.0) == []
    policy.finished(1, first[1].batches[0].id)
    assert keys(policy.next(1.0)) == [[2], []]


def test_only_a_prompt_by_itself_exceeds_the_budget() -> None:
    policy = LockstepPolicy(2, MAX)
    add_all(policy, [60, 40, 61, 300, 1])
    step = policy.next(0.0)
    assert keys(step) == [[0], [1]]
    finish(policy, step)
    step = policy.next(0.0)
    assert keys(step) == [[2, 4], [3]]


def test_batches_beside_a_long_prompt_may_be_as_large_as_it() -> None:
    policy = LockstepPolicy(3, MAX)
    add_all(policy, [300, 90, 80, 70, 60, 160, 50, 1])
    step = policy.next(0.0)
    assert keys(step) == [[0], [1, 4], [2, 3]]
    finish(policy, step)
    assert keys(policy.next(0.0)) == [[5], [6], [7]]


def test_cut_prompts_go_on_in_their_group_before_what_waits() -> None:
    policy = LockstepPolicy(2, MAX, CHUNK)
    add_all(policy, [100, 10, 10, 70])
    step = policy.next(0.0)
    assert [a.batches[0].segments for a in step] == [
        (Segment(0, 0, 64),),
        (Segment(1, 0, 10), Segment(2, 0, 10), Segment(3, 0, 44)),
    ]
    finish(policy, step)
    assert policy.running == 2
    add_all(policy, [])
    policy.add(Request(4, 100, 4.0))
    assert [a.batches[0].segments for a in policy.next(0.0)] == [
        (Segment(0, 64, 36),),
        (Segment(3, 44, 26), Segment(4, 0, 38)),
    ]


def test_after_a_loss_all_wait_until_every_group_is_back_and_batches_run_again() -> None:
    policy = LockstepPolicy(2, MAX)
    add_all(policy, [30, 30, 30, 30, 30])
    step = policy.next(0.0)
    for group in (1, 0):
        policy.retry(policy.lost(group))
    policy.recovered(1)
    assert policy.next(0.0) == []
    policy.recovered(0)
    again = policy.next(0.0)
    assert [a.batches for a in again] == [a.batches for a in step]


def test_a_cut_prompt_starts_from_its_beginning_after_a_loss() -> None:
    policy = LockstepPolicy(2, MAX, CHUNK)
    add_all(policy, [150, 150])
    finish(policy, policy.next(0.0))
    step = policy.next(0.0)
    policy.finished(0, step[0].batches[0].id)  # prompt 0 is between two of its batches
    assert policy.lost(0) == []
    (batch,) = policy.lost(1)
    assert batch.segments == (Segment(1, 0, 150),)
    policy.retry([batch])
    assert (policy.waiting, policy.running) == (2, 0)
    policy.recovered(0)
    policy.recovered(1)
    step = policy.next(0.0)
    assert keys(step) == [[1], []]
    finish(policy, step)
    assert policy.next(0.0)[0].batches[0].segments == (Segment(0, 0, 64),)


def test_prompts_under_suspicion_have_a_step_to_themselves() -> None:
    policy = LockstepPolicy(3, MAX)
    add_all(policy, [10, 10, 10, 40, 10])
    policy.next(0.0)
    for group in range(3):
        batches = policy.lost(group)
        policy.retry(policy.alone(batches[0]) if group == 0 else batches)
        policy.recovered(group)
    steps = []
    while step := policy.next(0.0):
        steps.append([k for k in keys(step) if k])
        finish(policy, step)
    assert sorted(k for step in steps for batch in step for k in batch) == [0, 1, 2, 3, 4]
    assert [[0]] in steps
    assert [[3]] in steps


def test_cancel_forgets_only_what_has_not_started() -> None:
    policy = LockstepPolicy(1, MAX)
    add_all(policy, [60, 60])
    policy.next(0.0)
    assert not policy.cancel(0)
    assert policy.cancel(1)
    assert (policy.waiting, policy.running) == (0, 1)


def test_a_batch_that_does_not_run_cannot_finish() -> None:
    policy = LockstepPolicy(2, MAX)
    add_all(policy, [60])
    step = policy.next(0.0)
    with pytest.raises(KeyError):
        policy.finished(0, step[1].batches[0].id)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    groups=st.integers(1, 5),
    chunk=st.sampled_from([None, 1, 50, CHUNK]),
    losses=st.sets(st.integers(0, 20), max_size=3),
)
def test_every_token_is_computed_once_in_order_whatever_is_lost(
    lengths: list[int], groups: int, chunk: int | None, losses: set[int]
) -> None:
    policy = LockstepPolicy(groups, MAX, chunk)
    add_all(policy, lengths)
    done: dict[int, int] = {}  # tokens by key, on ranks that live
    place: dict[int, int] = {}
    complete: set[int] = set()
    steps = 0
    while step := policy.next(0.0):
        steps += 1
        assert [a.group for a in step] == list(range(groups))
        assert any(a.batches[0].segments for a in step)
        for assignment in step:
            for s in assignment.batches[0].segments:
                assert s.start == done.get(s.key, 0)
                if s.start:
                    assert place[s.key] == assignment.group
        if steps in losses:
            for group in range(groups):
                policy.retry(policy.lost(group))
            for group in range(groups):
                policy.recovered(group)
            done = {key: tokens for key, tokens in done.items() if key in complete}
            continue
        for assignment in step:
            (batch,) = assignment.batches
            for s in batch.segments:
                done[s.key] = s.start + s.length
                place[s.key] = assignment.group
                if done[s.key] == lengths[s.key]:
                    complete.add(s.key)
            if not losses:  # afterwards, cut prompts run whole
                limit = MAX if chunk is None else chunk
                beside = [a.batches[0] for a in step if len(a.batches[0].segments) == 1]
                assert batch.tokens <= max([limit, *(alone.tokens for alone in beside)])
                assert chunk is None or batch.tokens <= chunk
            policy.finished(assignment.group, batch.id)
    assert done == dict(enumerate(lengths))
    assert (policy.waiting, policy.running) == (0, 0)


def test_policies_have_names() -> None:
    def made(name: str) -> object:
        return make_policy(name, 2, 2, 10, MAX, 1000, CHUNK, 0.02)

    assert isinstance(made("asap"), AsapPolicy)
    for name in ("sync", "sync-chunked", "sync-afd"):
        assert isinstance(made(name), LockstepPolicy)
    with pytest.raises(ValueError, match="fifo"):
        made("fifo")
