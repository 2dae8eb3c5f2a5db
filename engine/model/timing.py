"""Which part of the model is being computed, for a trace. While nobody listens it costs a look."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

# Called with a part's name; what it returns is open while the part is computed.
Listener = Callable[[str], AbstractContextManager[None]]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """`listener` hears of every part that is computed inside, instead of any other one."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def part(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the function is a part of the model, called `name`."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if _listener is None:
                return function(*args, **kwargs)
            with _listener(name):
                return function(*args, **kwargs)

        return called

    return decorate
