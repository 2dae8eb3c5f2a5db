"""The controller's accounts, without sockets: messages in, messages out, time as an argument."""

import msgspec

from engine.control.messages import (
    BatchDone,
    Drain,
    Hello,
    PrefillResult,
    Progress,
    Ready,
    Refused,
    Results,
    Run,
    Snapshot,
    Submit,
    Watch,
    Welcome,
)
from engine.topology.ranks import RankId
from helpers.controllers import AGREEMENT, CLIENT, RANKS, make, prompt, sent, started


def test_nothing_runs_before_every_rank_is_ready() -> None:
    controller = make()
    controller.handle(b"a", Hello(RANKS[0], 1, AGREEMENT), 0.0)
    assert sent(controller, b"a") == [Welcome()]
    controller.handle(b"a", Ready(0.5), 0.0)
    controller.handle(CLIENT, Submit([prompt(1, 12), prompt(2, 12)]), 0.0)
    controller.handle(CLIENT, Drain(), 0.0)
    assert controller.schedule(0.0) is None
    assert not controller.outbox
    controller.handle(b"e", Hello(RANKS[1], 2, AGREEMENT), 1.0)
    controller.handle(b"e", Ready(0.5), 1.0)
    controller.schedule(1.0)
    assert [run.lane for run in sent(controller, b"a") if isinstance(run, Run)] == [0, 1]


def test_prompts_are_aggregated_up_to_what_the_slowest_expert_rank_measured() -> None:
    ranks = [*RANKS, RankId("expert", 1)]
    controller = make(ranks, min_batch_tokens=None)
    assert controller.snapshot(0.0).min_batch_tokens is None
    for id_, inflection in zip(ranks, (None, 4, 8), strict=True):
        peer = str(id_).encode()
        controller.handle(peer, Hello(id_, 1, AGREEMENT), 0.0)
        controller.handle(peer, Ready(0.5, inflection), 0.0)
    controller.schedule(0.0)
    assert controller.snapshot(0.0).min_batch_tokens == 8
    controller.handle(CLIENT, Submit([prompt(n, 3) for n in range(6)]), 0.0)
    controller.schedule(0.0)
    runs = [run for run in sent(controller, b"attention 0") if isinstance(run, Run)]
    assert [run.batch.tokens for run in runs] == [9, 9]


def test_a_rank_that_disagrees_is_refused_by_name() -> None:
    controller = make()
    other = msgspec.structs.replace(AGREEMENT, hidden_size=16, dtype="bfloat16")
    controller.handle(b"a", Hello(RANKS[0], 1, other), 0.0)
    (refused,) = sent(controller, b"a")
    assert isinstance(refused, Refused)
    assert "hidden_size is 16 here and 8" in refused.reason
    assert "dtype is 'bfloat16'" in refused.reason
    controller.handle(b"x", Hello(RankId("expert", 9), 1, AGREEMENT), 0.0)
    assert sent(controller, b"x") == [Refused("expert 9 is not part of this instance")]
    assert not controller.ready


def test_results_go_back_under_the_clients_own_keys() -> None:
    controller = started()
    controller.handle(b"one", Submit([prompt(5, 6)]), 1.0)
    controller.handle(b"two", Submit([prompt(5, 6)]), 2.0)
    controller.handle(b"two", Drain(), 2.0)
    controller.schedule(3.0)
    (run,) = sent(controller, b"attention 0")
    assert isinstance(run, Run)
    keys = [request.key for request in run.requests]
    assert len(set(keys)) == 2
    results = [PrefillResult(keys[0], token_id=7), PrefillResult(keys[1], error="disk full")]
    controller.handle(b"attention 0", BatchDone(run.batch.id, results), 4.0)
    answers = dict(controller.outbox)
    one, two = answers[b"one"], answers[b"two"]
    assert isinstance(one, Results)
    assert isinstance(two, Results)
    assert one.results == [PrefillResult(5, token_id=7, queue_s=2.0, compute_s=1.0)]
    assert two.results[0].key == 5
    assert two.results[0].error == "disk full"
    snapshot = controller.snapshot(5.0)
    assert (snapshot.finished, snapshot.failed, snapshot.running, snapshot.waiting) == (1, 1, 0, 0)


def test_busy_share_counts_from_the_first_batch() -> None:
    controller = started()
    controller.handle(CLIENT, Submit([prompt(1, 6)]), 100.0)
    controller.handle(CLIENT, Drain(), 100.0)
    controller.schedule(100.0)
    controller.handle(b"expert 0", Progress(busy_seconds=2.0, tokens=6, work_items=2), 104.0)
    controller.outbox.clear()
    controller.handle(CLIENT, Watch(), 104.0)
    (snapshot,) = sent(controller, CLIENT)
    assert isinstance(snapshot, Snapshot)
    assert [rank.busy for rank in snapshot.ranks] == [0.0, 0.5]
