"""Bytes of a file or a pipe -> numbered lines, without ever holding more than one of them.

Lines end at LF alone, so CR, U+2028 and the other Unicode separators stay inside the JSON that
they belong to.
"""

import os
import select
from collections.abc import Callable

import msgspec

from engine.errors import RunError

MAX_LINE_BYTES = 64 << 20
_CHUNK = 1 << 18
_BOM = b"\xef\xbb\xbf"


class Line(msgspec.Struct, frozen=True):
    """One line that holds something. `data` is None when it was longer than the limit.

    size: its bytes in the file, with its end and the blank lines before it.
    """

    number: int
    data: bytes | None
    size: int = 0


class LineReader:
    """Reads the lines of a file descriptor; never blocks in `take`.

    A pipe may pause for as long as it likes while results of earlier lines come in. A regular
    file is always ready. The descriptor stays open and is the caller's.
    """

    def __init__(
        self,
        fd: int,
        limit: int = MAX_LINE_BYTES,
        check_start: Callable[[bytes], None] = lambda data: None,
        name: str = "the input",
    ) -> None:
        """check_start: sees the first bytes before anything is taken, and may raise."""
        self._fd = fd
        self._name = name
        self._check_start: Callable[[bytes], None] | None = check_start
        self._limit = limit
        self._buffer = bytearray()
        self._scanned = 0  # bytes of the buffer that are known to hold no LF
        self._skipping = False  # inside a line that is over the limit
        self._number = 0
        self._at_end = False
        self._size = 0  # bytes of the line that is being read, and of blank ones before it

    @property
    def ended(self) -> bool:
        """True once every line has been taken."""
        return self._at_end and not self._buffer and not self._skipping

    def wait(self, timeout_s: float) -> None:
        """Return when there may be something to take, or after `timeout_s`."""
        if not self._at_end:
            select.select([self._fd], [], [], timeout_s)

    def take(self) -> Line | None:
        """The next line that is not blank, or None: nothing there yet, or `ended`."""
        while not self.ended:
            end = self._buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(self._buffer)
                if len(self._buffer) > self._limit:
                    self._skipping = True
                if self._skipping:
                    self._clear()
                if self._at_end:
                    end = len(self._buffer)
                elif self._fill():
                    continue
                else:
                    return None
            line = self._cut(end)
            if line is not None:
                return line
        return None

    def _cut(self, end: int) -> Line | None:
        """Remove the line that ends at `end` from the buffer; None when it is blank."""
        self._number += 1
        data = bytes(self._buffer[:end])
        self._size += min(end + 1, len(self._buffer))
        del self._buffer[: end + 1]
        self._scanned = 0
        if self._number == 1:
            data = data.removeprefix(_BOM)
        if self._skipping or len(data) > self._limit:
            self._skipping = False
            return self._line(None)
        data = data.strip(b" \t\r")
        return self._line(data) if data else None

    def _line(self, data: bytes | None) -> Line:
        size, self._size = self._size, 0
        return Line(self._number, data, size)

    def _clear(self) -> None:
        self._size += len(self._buffer)
        self._buffer.clear()
        self._scanned = 0

    def _fill(self) -> bool:
        """Read what is there; False when that is nothing for now. Raises RunError."""
        if not select.select([self._fd], [], [], 0)[0]:
            return False
        try:
            chunk = os.read(self._fd, _CHUNK)
        except BlockingIOError:  # another reader was faster
            return False
        except OSError as error:
            raise RunError(f"{self._name}: cannot read: {error.strerror}") from None
        if self._check_start is not None:
            self._check_start(chunk)
            self._check_start = None
        self._at_end = not chunk
        self._buffer += chunk
        return True
