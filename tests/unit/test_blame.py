"""Verdicts over batches whose rank died, and over ranks that die too often."""

from engine.control.blame import DEATHS_IN_A_ROW, Blame, Verdict
from engine.schedule.types import Batch, Segment
from engine.topology.ranks import RankId

RANK = RankId("expert", 0)


def batch(id_: int, *keys: int) -> Batch:
    return Batch(id_, tuple(Segment(key, 0, 1) for key in keys))


def test_a_batch_is_run_again_then_taken_apart_and_a_prompt_alone_given_up_at_last() -> None:
    blame = Blame()
    together = batch(0, 1, 2)
    assert blame.judge(together) is Verdict.AGAIN
    assert blame.judge(together) is Verdict.ALONE
    blame.settled(together)
    alone = batch(1, 2)
    assert [blame.judge(alone) for _ in range(3)] == [
        Verdict.AGAIN,
        Verdict.AGAIN,
        Verdict.GIVE_UP,
    ]


def test_deaths_of_different_batches_do_not_add_up() -> None:
    blame = Blame()
    assert [blame.judge(batch(n, 2 * n, 2 * n + 1)) for n in range(9)] == [Verdict.AGAIN] * 9


def test_a_rank_that_dies_of_nothing_in_particular_is_hopeless_at_the_third_time() -> None:
    blame = Blame()
    assert [blame.hopeless(RANK, False) for _ in range(3)] == [False, False, True]


def test_finished_work_starts_the_count_again() -> None:
    blame = Blame()
    proven = [False, False, True, False, False, True]
    assert not any(blame.hopeless(RANK, life) for life in proven)
    assert not blame.hopeless(RankId("expert", 1), False)


def test_one_prompt_may_kill_a_rank_five_times_without_ending_the_instance() -> None:
    blame = Blame()
    verdicts = []
    together, alone = batch(0, 1, 2), batch(1, 2)
    for suspect in (together, together, alone, alone, alone):
        assert not blame.hopeless(RANK, False, suspect)
        verdicts.append(blame.judge(suspect))
    assert verdicts[-1] is Verdict.GIVE_UP


def test_a_rank_that_dies_of_everything_is_hopeless() -> None:
    blame = Blame()
    for number in range(DEATHS_IN_A_ROW - 1):
        assert not blame.hopeless(RANK, False, batch(number, number))
        blame.judge(batch(number, number))
    assert blame.hopeless(RANK, False, batch(9, 9))


def test_answered_prompts_explain_no_later_death() -> None:
    blame = Blame()
    for number in range(DEATHS_IN_A_ROW):
        suspect = batch(number, 5)
        hopeless = blame.hopeless(RANK, False, suspect)
        blame.judge(suspect)
        blame.cleared(5)
    assert hopeless


def test_a_prompt_in_company_is_run_alone_before_it_is_given_up() -> None:
    blame = Blame()
    one = batch(0, 1)
    verdicts = [blame.judge(one, company=True) for _ in range(2)]
    assert verdicts == [Verdict.AGAIN, Verdict.ALONE]
