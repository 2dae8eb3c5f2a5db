"""What Ctrl-C and SIGTERM do when an exception in the middle would do harm."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM)


def leave(number: int, frame: object) -> NoReturn:
    """A handler that ends the process at once. What it started ends by itself."""
    os._exit(128 + number)


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """SIGINT and SIGTERM go to `handler` inside (main thread only; elsewhere nothing changes)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def import_torch() -> None:
    """Imports torch, before whatever needs it.

    A signal meanwhile ends the process: raised while C extensions are loaded, an exception would
    get lost, or spoil the import.
    """
    with handled_by(leave):
        import torch  # noqa: F401
