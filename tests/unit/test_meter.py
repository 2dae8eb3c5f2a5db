"""What a rank tells of its time."""

import pytest

from engine.worker import meter as module
from engine.worker.black_box import BlackBox, create_black_box
from engine.worker.meter import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_a_wait_counts_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    meter = Meter(BlackBox(create_black_box()))
    with meter.waiting(with_work=True):
        clock.now += 3.0
        assert meter.wait_seconds == 3.0  # a rank whose peer has stopped reports meanwhile
        clock.now += 1.0
    clock.now += 10.0
    assert meter.wait_seconds == 4.0
    with meter.waiting(with_work=False):
        clock.now += 5.0
        assert meter.wait_seconds == 4.0
    with meter.computing(batch=1, tokens=7):
        clock.now += 2.0
    assert (meter.wait_seconds, meter.busy_seconds, meter.tokens) == (4.0, 2.0, 7)


def test_what_is_written_to_disk_counts_in_a_prediction() -> None:
    meter = Meter(BlackBox(create_black_box()))
    meter.predict(0.0, file_bytes=10**9)
    assert meter.predicted_s >= 10
