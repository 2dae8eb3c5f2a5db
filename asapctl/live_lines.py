"""Notes on standard error, and below them, on a terminal, lines that change in place."""

import time
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from asapctl.interrupts import uninterrupted

Self = TypeVar("Self", bound="LiveLines")


class LiveLines:
    """A context manager, in which lines are drawn at most every `redraw_s` seconds.

    live: whether any may be drawn at all; they never are without a terminal.
    """

    def __init__(self, redraw_s: float, live: bool = True) -> None:
        self._redraw_s = redraw_s
        self._begin(live)

    def _begin(self, live: bool = True) -> None:
        """Looks at standard error anew."""
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        if live and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._next_draw = 0.0

    def __enter__(self: Self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        with uninterrupted():
            self._console.print(Text(text))

    def draw(self, text: str) -> None:
        """What is shown from now on, unless there was something a moment ago."""
        now = time.monotonic()
        if self._live is None or now < self._next_draw:
            return
        self._next_draw = now + self._redraw_s
        with uninterrupted():
            self._live.update(cropped(text, self._console.width), refresh=True)

    def _start(self) -> None:
        if self._live is not None:
            with uninterrupted():
                self._live.start()

    def _stop(self) -> None:
        if self._live is not None:
            with uninterrupted():
                self._live.stop()
            self._live = None


def cropped(text: str, width: int) -> Text:
    """Every line of `text` within `width`, with room for the ^C that a terminal may add. A line
    that the terminal wraps could not be taken away again.
    """
    lines = [Text(line) for line in text.split("\n")]
    for line in lines:
        line.truncate(max(1, width - 4), overflow="ellipsis")
    joined = Text("\n", no_wrap=True).join(lines)
    joined.no_wrap = True
    return joined
