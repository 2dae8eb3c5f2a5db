import os
import signal
import threading

import pytest

from asapctl.interrupts import uninterrupted


def test_a_signal_acts_when_the_block_has_ended() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("inside")
        reached.append("after")
    assert reached == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_are_back_after_an_error_and_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(ValueError, match="x"), uninterrupted():
            raise ValueError("x")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_just_go_on() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
