import random

import pytest

from asapctl.prefill_view import duration, progress_text
from engine.control.durations import Durations
from engine.control.messages import RankStatus, Snapshot
from engine.offline.stats import Tally
from engine.topology.ranks import RankId


def test_progress() -> None:
    tally = Tally()
    tally.prompts, tally.ok, tally.failed, tally.prompt_tokens = 40, 19, 1, 5000
    tally.first_admission = 100.0
    ranks = [
        RankStatus(RankId("expert", 0), 1, True, busy=0.25),
        RankStatus(RankId("attention", 0), 1, True, busy=0.5),
    ]
    text = progress_text(tally, 500, 1000, Snapshot(True, 0, 0, 0, 0, ranks), now=110.0)
    # Half of the bytes are read and half of those prompts are done: a quarter in 10 s.
    assert text == (
        "20 prompts | 1 failed | 500 tokens/s | 25% | 30 s left\nattention 0 50%  expert 0 25%"
    )


def test_progress_before_anything_and_of_a_pipe() -> None:
    tally = Tally()
    assert progress_text(tally, 0, 0, None, now=1.0) == "0 prompts"
    tally.first_admission = 0.0
    assert progress_text(tally, 10, None, None, now=1.0) == "0 prompts | 0 tokens/s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.4, "5 s"), (65, "1 min 05 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quantiles_are_close_without_keeping_every_value() -> None:
    draw = random.Random(2)
    values = [draw.lognormvariate(0, 2) for _ in range(5000)]
    durations = Durations()
    assert (durations.mean, durations.quantile(0.99)) == (0.0, 0.0)
    for value in values:
        durations.add(value)
    exact = sorted(values)[round(0.99 * len(values)) - 1]
    assert exact <= durations.quantile(0.99) <= exact * 1.02
    assert durations.quantile(1.0) == max(values)
    assert durations.mean == pytest.approx(sum(values) / len(values))
    durations.add(0.0)
