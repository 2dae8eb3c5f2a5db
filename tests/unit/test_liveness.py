"""Who has stalled: silence with work, measured against how long a step should take."""

from engine.control.liveness import QUIET_S, Liveness
from engine.control.messages import Progress
from engine.topology.ranks import RankId

ATTENTION, EXPERT, OTHER = RankId("attention", 0), RankId("expert", 0), RankId("expert", 1)


def report(predicted_s: float = 0.0, waits_for: tuple[int, ...] = ()) -> Progress:
    return Progress(
        busy_seconds=0.0,
        tokens=0,
        work_items=0,
        predicted_s=predicted_s,
        waits_for=list(waits_for),
    )


def make() -> Liveness:
    liveness = Liveness()
    for rank in (ATTENTION, EXPERT, OTHER):
        liveness.heard(rank, 0.0)
    return liveness


def test_an_idle_instance_may_be_silent_for_ever() -> None:
    assert make().stalled(1e6, working=()) == {}


def test_silence_counts_from_the_assignment_not_from_the_last_report() -> None:
    liveness = make()
    liveness.assigned(ATTENTION, 1000.0)
    assert liveness.stalled(1000.0 + QUIET_S, {0}) == {}
    assert liveness.stalled(1001.0 + QUIET_S, {0}) == {ATTENTION: QUIET_S + 1}


def test_a_long_step_is_no_stall_until_five_times_its_prediction() -> None:
    liveness = make()
    liveness.heard(ATTENTION, 0.0, report(predicted_s=100.0))
    assert liveness.stalled(499.0, {0}) == {}
    assert liveness.stalled(501.0, {0}) == {ATTENTION: 501.0}


def test_the_expert_that_is_waited_for_is_named_and_not_the_one_that_waits() -> None:
    liveness = make()
    for now in range(1000, 1030):
        liveness.heard(ATTENTION, float(now), report(waits_for=(1,)))
    assert liveness.stalled(1029.0, {0}) == {OTHER: 29.0}


def test_an_expert_that_makes_headway_may_keep_others_waiting() -> None:
    liveness = make()
    for now in range(1000, 1030):
        liveness.heard(ATTENTION, float(now), report(waits_for=(0,)))
        liveness.heard(EXPERT, float(now), report())
    assert liveness.stalled(1029.0, {0}) == {}


def test_a_wait_that_ended_is_forgotten() -> None:
    liveness = make()
    liveness.heard(ATTENTION, 1000.0, report(waits_for=(0,)))
    liveness.heard(ATTENTION, 1001.0, report())
    liveness.heard(ATTENTION, 1020.0, report(waits_for=(0,)))
    assert liveness.stalled(1021.0, {0}) == {}


def test_the_dead_are_not_stalled() -> None:
    liveness = make()
    liveness.heard(ATTENTION, 1000.0, report(waits_for=(0,)))
    liveness.gone(EXPERT)
    liveness.heard(RankId("expert", 0, 1), 1000.0)
    liveness.heard(ATTENTION, 1015.0, report(waits_for=(0,)))
    assert liveness.stalled(1015.0, {0}) == {}
    liveness.gone(ATTENTION)
    assert liveness.stalled(1e6, {0}) == {}


def test_who_may_be_quiet_for_less_stalls_earlier() -> None:
    liveness = Liveness(quiet_s=3.0)
    liveness.heard(ATTENTION, 1000.0, None)
    liveness.assigned(ATTENTION, 1000.0)
    assert liveness.stalled(1003.0, {0}) == {}
    assert liveness.stalled(1004.0, {0}) == {ATTENTION: 4.0}


def test_in_lockstep_an_expert_is_late_once_everybody_waits_for_it() -> None:
    liveness = Liveness(in_lockstep=True)
    slow = RankId("attention", 1)
    for rank in (ATTENTION, slow, EXPERT):
        liveness.heard(rank, 0.0)
    for now in range(1000, 1030):
        liveness.heard(ATTENTION, float(now), report(waits_for=(0,)))
        liveness.heard(slow, float(now), report(predicted_s=100.0))
    assert liveness.stalled(1029.0, {0, 1}) == {}
    for now in range(1030, 1060):
        liveness.heard(ATTENTION, float(now), report(waits_for=(0,)))
        liveness.heard(slow, float(now), report(waits_for=(0,)))
    assert liveness.stalled(1059.0, {0, 1}) == {EXPERT: 29.0}
