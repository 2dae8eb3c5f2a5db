"""Keys from the terminal, one at a time and unechoed; the terminal is left as it was found."""

import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Literal, TypeAlias

Key: TypeAlias = Literal[
    "up", "down", "page up", "page down", "home", "end", "sort", "quit", "tab", "back tab",
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9",
]  # fmt: skip

_NAMES: dict[bytes, Key] = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"k": "up",
    b"j": "down",
    b" ": "page down",
    b"s": "sort",
    b"S": "sort",
    b"q": "quit",
    b"Q": "quit",
    b"\t": "tab",
    b"\x1b[Z": "back tab",
    b"0": "0",
    b"1": "1",
    b"2": "2",
    b"3": "3",
    b"4": "4",
    b"5": "5",
    b"6": "6",
    b"7": "7",
    b"8": "8",
    b"9": "9",
}
_SEQUENCE = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|O.)")  # whole, known or not


class Keys:
    """Standard input, where it is a terminal. Without one there are no keys, and `read` waits."""

    def __init__(self) -> None:
        self._fd: int | None = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._pending = b""

    def __enter__(self) -> "Keys":
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def read(self, timeout_s: float) -> list[Key]:
        """Names of the keys pressed, after at most `timeout_s`; "quit" when the terminal went."""
        inputs = [] if self._fd is None else [self._fd]
        if not select.select(inputs, [], [], timeout_s)[0]:
            self._pending = b""  # a lone escape
            return []
        assert self._fd is not None
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            return ["quit"]
        self._pending += data
        return list(self._take())

    def _take(self) -> Iterator[Key]:
        while self._pending:
            sequence = _SEQUENCE.match(self._pending)
            if sequence is None and self._pending[:1] == b"\x1b" and len(self._pending) < 16:
                return  # the rest of it is on its way
            code = sequence[0] if sequence else self._pending[:1]
            self._pending = self._pending[len(code) :]
            if code in _NAMES:
                yield _NAMES[code]
