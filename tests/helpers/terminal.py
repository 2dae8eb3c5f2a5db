"""The installed program in a terminal of its own, with keys pressed as a user would."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType

from helpers.program import ASAPCTL

_CONTROL = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()].|[=>78])")


class Terminal:
    """`asapctl` with `arguments`, on a terminal of `columns` x `rows`."""

    def __init__(
        self, *arguments: str, env: dict[str, str], columns: int = 80, rows: int = 24
    ) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self._slave)
        env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [ASAPCTL, *arguments],
            env={"TERM": "xterm-256color", **env},
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
        )
        self.raw = ""  # everything that was written

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    @property
    def modes(self) -> list[object]:
        """The terminal's present modes."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str, timeout_s: float = 20.0) -> str:
        """What is written from now on, without control sequences, up to one that has `text`."""
        start, deadline = len(self.raw), time.monotonic() + timeout_s
        while text not in (seen := _CONTROL.sub("", self.raw[start:])):
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} did not come: {seen[-3000:]!r}"
            self._read(left)
        return seen

    def wait(self, timeout_s: float = 20.0) -> int:
        """The exit code; reads on meanwhile, as a terminal does."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "still running"
            self._read(0.05)
        self._read(0)
        return self.process.returncode

    def _read(self, timeout_s: float) -> None:
        while select.select([self._master], [], [], timeout_s)[0]:
            self.raw += os.read(self._master, 65536).decode(errors="replace")
            timeout_s = 0
