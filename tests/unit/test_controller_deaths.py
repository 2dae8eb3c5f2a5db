"""The controller when ranks die, clients cancel, and the instance quits. No sockets."""

from engine.control.controller import Controller
from engine.control.messages import (
    BatchDone,
    Cancel,
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
from helpers.controllers import AGREEMENT, CLIENT, RANKS, prompt, sent, started

ATTENTION, EXPERT = RANKS
SUPERVISOR = b"supervisor"


def supervised() -> Controller:
    controller = started()
    controller.handle(SUPERVISOR, Supervise(), 0.0)
    return controller


def next_life(rank: RankId) -> RankId:
    return RankId(rank.role, rank.rank, rank.incarnation + 1)


def die(controller: Controller, rank: RankId, batch: int | None, work_items: int = 1) -> RankId:
    successor = next_life(rank)
    death = RankDied(rank, successor, f"{rank} was ended by SIGKILL", batch, work_items)
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


def test_cancelled_prompts_are_forgotten_or_their_results_dropped() -> None:
    controller = supervised()
    controller.handle(CLIENT, Submit([prompt(key, 12) for key in (1, 2, 3)]), 1.0)
    run, other = runs(controller, b"attention 0")
    controller.handle(CLIENT, Cancel([1, 3, 77]), 2.0)
    assert controller.policy.waiting == 0
    for done in (run, other):
        results = [PrefillResult(request.key) for request in done.requests]
        controller.handle(b"attention 0", BatchDone(done.batch.id, results), 3.0)
    ((result,),) = (m.results for m in sent(controller, CLIENT) if isinstance(m, Results))
    assert result.key == 2
    assert not controller.busy


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
    for done in (run, other):
        results = [PrefillResult(request.key) for request in done.requests]
        controller.handle(b"attention 0", BatchDone(done.batch.id, results), 3.0)
    controller.schedule(3.0)
    assert sent(controller, SUPERVISOR) == [Ended(None)]
