"""The controller when ranks die, clients cancel, and the instance quits. No sockets."""

from engine.control.controller import Controller
from engine.control.messages import (
    BatchDone,
    Cancel,
    ClientGone,
    Drain,
    Ended,
    Hello,
    KillRank,
    PrefillResult,
    Quit,
    RankDied,
    Ready,
    Results,
    Run,
    Submit,
    Supervise,
    Welcome,
)
from engine.topology.ranks import RankId
from helpers.controllers import AGREEMENT, CLIENT, RANKS, TEAM, prompt, sent, started

ATTENTION, EXPERT = RANKS
SUPERVISOR = b"supervisor"


def supervised(ranks: list[RankId] = RANKS) -> Controller:
    controller = started(ranks)
    controller.handle(SUPERVISOR, Supervise(), 0.0)
    return controller


def next_life(rank: RankId) -> RankId:
    return RankId(rank.role, rank.rank, rank.incarnation + 1)


def die(
    controller: Controller,
    rank: RankId,
    batch: int | None,
    work_items: int = 1,
    collateral: bool = False,
) -> RankId:
    successor = next_life(rank)
    reason = f"{rank} was ended by SIGKILL"
    death = RankDied(rank, successor, reason, batch, work_items, collateral)
    controller.handle(SUPERVISOR, death, 5.0)
    return successor


def live(controller: Controller, rank: RankId) -> bytes:
    peer = f"{rank} life {rank.incarnation}".encode()
    controller.handle(peer, Hello(rank, 9, AGREEMENT), 6.0)
    assert Welcome() in sent(controller, peer)
    controller.handle(peer, Ready(0.1), 6.0)
    return peer


def runs(controller: Controller, peer: bytes) -> list[Run]:
    controller.schedule(7.0)
    return [message for message in sent(controller, peer) if isinstance(message, Run)]


def test_a_dead_groups_batches_go_whole_to_its_next_life() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in range(2)]), 1.0)
    first = runs(controller, b"attention 0")
    successor = die(controller, ATTENTION, batch=None)
    assert runs(controller, b"attention 0") == []
    peer = live(controller, successor)
    assert runs(controller, peer) == first


def test_a_result_of_a_life_that_is_over_is_passed_over() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in range(2)]), 1.0)
    run, _ = runs(controller, b"attention 0")
    die(controller, ATTENTION, batch=None)
    done = BatchDone(run.batch.id, [PrefillResult(r.key) for r in run.requests])
    controller.handle(b"attention 0", done, 5.0)
    assert sent(controller, CLIENT) == []
    assert controller.running == 0
    assert controller.policy.waiting == 2


def test_a_hello_before_the_news_of_the_death_has_to_be_repeated() -> None:
    controller = supervised()
    early = next_life(EXPERT)
    controller.handle(b"early", Hello(early, 9, AGREEMENT), 4.0)
    assert sent(controller, b"early") == []
    die(controller, EXPERT, batch=None)
    controller.handle(b"early", Hello(early, 9, AGREEMENT), 6.0)
    assert sent(controller, b"early") == [Welcome()]


def is_taken_apart(controller: Controller, peer: bytes, suspect: Run) -> bool:
    """Whether the prompts of `suspect` run one by one now."""
    again = runs(controller, peer)
    ids = {run.batch.id for run in again}
    return [len(run.requests) for run in again] == [1, 1] and suspect.batch.id not in ids


def test_a_batch_that_kills_its_group_twice_is_taken_apart() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(1, 6), prompt(2, 6), prompt(3, 12)]), 1.0)
    suspect, _ = runs(controller, b"attention 0")
    second = die(controller, ATTENTION, suspect.batch.id)
    peer = live(controller, second)
    assert runs(controller, peer)[0] == suspect
    peer = live(controller, die(controller, second, suspect.batch.id))
    assert is_taken_apart(controller, peer, suspect)


def test_a_batch_that_kills_an_expert_twice_leaves_its_group_by_the_groups_death() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(1, 6), prompt(2, 6), prompt(3, 12)]), 1.0)
    suspect, innocent = runs(controller, b"attention 0")
    second = die(controller, EXPERT, suspect.batch.id)
    assert sent(controller, SUPERVISOR) == []  # its group sends again what it had dispatched
    live(controller, second)
    die(controller, second, suspect.batch.id)
    (kill,) = sent(controller, SUPERVISOR)
    assert isinstance(kill, KillRank)
    assert kill.id == ATTENTION
    peer = live(controller, die(controller, ATTENTION, innocent.batch.id))
    assert is_taken_apart(controller, peer, suspect)


def test_a_prompt_that_kills_alone_is_given_up_and_its_client_told() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(1, 12), prompt(2, 12)]), 1.0)
    rank, peer = ATTENTION, b"attention 0"
    for _ in range(3):
        suspect, other = runs(controller, peer)
        rank = die(controller, rank, suspect.batch.id)
        peer = live(controller, rank)
    ((result,),) = (m.results for m in sent(controller, CLIENT) if isinstance(m, Results))
    assert (result.key, result.error) == (
        1,
        "given up after 3 deaths of the rank that ran it: attention 0 was ended by SIGKILL",
    )
    assert runs(controller, peer) == [Run(other.batch, 0, other.requests)]


def test_a_rank_that_dies_of_nothing_ends_the_instance() -> None:
    controller = supervised()
    rank = EXPERT
    for _ in range(3):
        rank = die(controller, rank, batch=None, work_items=0)
    (ended,) = sent(controller, SUPERVISOR)
    assert isinstance(ended, Ended)
    assert ended.reason is not None
    assert ended.reason.startswith("expert 0 died too often")


def answers(controller: Controller, to: bytes) -> list[PrefillResult]:
    messages = [m for m in sent(controller, to) if isinstance(m, Results)]
    return [result for message in messages for result in message.results]


def done(controller: Controller, run: Run) -> None:
    results = [PrefillResult(request.key) for request in run.requests]
    controller.handle(b"attention 0", BatchDone(run.batch.id, results), 3.0)


def test_a_cancelled_prompt_never_starts_and_each_is_answered_once() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in (1, 2, 3)]), 1.0)
    first, second = runs(controller, b"attention 0")
    controller.handle(CLIENT, Cancel([1, 3, 77]), 2.0)
    assert controller.policy.waiting == 0
    assert answers(controller, CLIENT) == [PrefillResult(3, error="cancelled", refused=True)]
    done(controller, first)
    done(controller, second)
    assert [result.key for result in answers(controller, CLIENT)] == [1, 2]
    assert not controller.busy
    assert runs(controller, b"attention 0") == []


def test_what_a_dead_client_asked_for_starves_nobody() -> None:
    controller = supervised()
    controller.handle(b"http-7", Submit([prompt(key, 12) for key in range(50)]), 1.0)
    first, second = runs(controller, b"attention 0")
    controller.handle(CLIENT, Submit([prompt(1, 12)]), 2.0)
    controller.handle(SUPERVISOR, ClientGone(b"http-7"), 2.0)
    assert controller.policy.waiting == 1
    done(controller, first)
    done(controller, second)
    controller.handle(CLIENT, Drain(), 3.0)
    (run,) = runs(controller, b"attention 0")
    done(controller, run)
    assert [result.key for result in answers(controller, CLIENT)] == [1]
    assert not controller.busy


def test_a_rank_that_hangs_while_it_starts_again_is_killed() -> None:
    controller = supervised()
    die(controller, EXPERT, batch=None)
    controller.schedule(14.0)
    assert sent(controller, SUPERVISOR) == []
    assert controller.snapshot(16.0).problems == [
        "expert 0 has work and has made no progress for 11 s"
    ]
    controller.schedule(66.0)
    (kill,) = sent(controller, SUPERVISOR)
    assert isinstance(kill, KillRank)
    assert kill.id == next_life(EXPERT)
    controller.schedule(67.0)
    assert sent(controller, SUPERVISOR) == []  # once is enough


def test_deaths_of_lives_that_were_long_do_not_add_up() -> None:
    controller = supervised()
    rank, now = EXPERT, 0.0
    for _ in range(6):
        now += 100.0
        successor = next_life(rank)
        controller.handle(SUPERVISOR, RankDied(rank, successor, "killed", None, 0), now)
        peer = f"{successor} life {successor.incarnation}".encode()
        controller.handle(peer, Hello(successor, 9, AGREEMENT), now)
        controller.handle(peer, Ready(0.1), now)
        rank = successor
    assert sent(controller, SUPERVISOR) == []


def test_quit_finishes_what_is_there_and_takes_no_more() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(1, 12), prompt(2, 12)]), 1.0)
    run, other = runs(controller, b"attention 0")
    controller.handle(b"other", Quit(), 2.0)
    controller.schedule(2.0)
    assert sent(controller, SUPERVISOR) == []
    controller.handle(CLIENT, Submit([prompt(9, 12)]), 2.0)
    (refused,) = sent(controller, CLIENT)
    assert isinstance(refused, Results)
    assert refused.results == [PrefillResult(9, error="the instance is stopping", refused=True)]
    done(controller, run)
    done(controller, other)
    controller.schedule(3.0)
    assert sent(controller, SUPERVISOR) == [Ended(None)]


def test_every_member_of_a_group_is_given_its_batches_and_the_first_one_answers() -> None:
    controller = supervised(TEAM)
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in range(2)]), 1.0)
    first = runs(controller, b"attention 0")
    assert len(first) == 2
    assert runs(controller, b"attention 1") == first
    for run in first:
        results = [PrefillResult(request.key) for request in run.requests]
        controller.handle(b"attention 0", BatchDone(run.batch.id, results), 2.0)
    assert len([m for m in sent(controller, CLIENT) if isinstance(m, Results)]) == 2


def test_a_group_gets_its_batches_again_when_all_its_members_live_again() -> None:
    controller = supervised(TEAM)
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in range(2)]), 1.0)
    first = runs(controller, b"attention 0")
    new = [die(controller, TEAM[1], batch=None), die(controller, TEAM[0], None, collateral=True)]
    follower = live(controller, new[0])
    assert runs(controller, follower) == []  # its leader is still on the way
    leader = live(controller, new[1])
    assert runs(controller, leader) == first
    assert runs(controller, follower) == first


def test_a_member_that_dies_along_with_another_is_no_witness() -> None:
    controller = supervised(TEAM)
    controller.handle(CLIENT, Submit([prompt(1, 6), prompt(2, 6), prompt(3, 12)]), 1.0)
    suspect, _ = runs(controller, b"attention 0")
    members = TEAM[:2]
    for _ in range(2):
        first, second = members
        # Both computed it, and one died of it.
        members = [
            die(controller, first, suspect.batch.id, work_items=0),
            die(controller, second, suspect.batch.id, work_items=0, collateral=True),
        ]
        leader, _ = (live(controller, member) for member in members)
        again = runs(controller, leader)
        if members[0].incarnation == 1:
            assert again[0] == suspect  # one death so far, not two
    assert [len(run.requests) for run in again] == [1, 1]


def test_members_that_are_ended_along_with_another_do_not_end_the_instance() -> None:
    controller = supervised(TEAM)
    member = TEAM[1]
    for _ in range(4):  # without any work, and never by their own fault
        member = die(controller, member, batch=None, work_items=0, collateral=True)
        live(controller, member)
    assert not [m for m in sent(controller, SUPERVISOR) if isinstance(m, Ended)]
