"""Drawing on a terminal that no signal cuts short."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT and SIGTERM act when the block has ended, not inside.

    Half a frame would stay on the screen: whoever draws would no longer know what is there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []

    def later(number: int, frame: FrameType | None) -> None:
        pending.append((number, frame))

    kept = {number: signal.signal(number, later) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    for came, frame in pending:
        handler = kept[signal.Signals(came)]
        if callable(handler):
            handler(came, frame)
        else:
            os.kill(os.getpid(), came)
