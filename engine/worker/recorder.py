"""What a rank does and when, for a trace: spans, kept only while somebody wants them."""

import time
from contextlib import AbstractContextManager, nullcontext

from engine.control.messages import Span

MAX_SPANS = 100_000  # some 10 MB; what is more is counted


_NOTHING = nullcontext()


class Recorder:
    """Off, it costs one look at `on` for each span."""

    def __init__(self) -> None:
        self.on = False
        self.ends = 0.0  # monotonic seconds
        self._spans: list[Span] = []
        self._dropped = 0

    def start(self, seconds: float) -> None:
        """Records for `seconds` from now, or for longer where that was asked for before."""
        self.ends = max(self.ends, time.monotonic() + seconds)
        self.on = True

    @property
    def over(self) -> bool:
        """It was started, and its time is up: `take` is due."""
        return self.on and time.monotonic() >= self.ends

    def take(self) -> tuple[list[Span], int]:
        """Stops; returns what was recorded, and how many spans there was no room for."""
        spans, dropped = self._spans, self._dropped
        self._spans, self._dropped, self.on = [], 0, False
        return spans, dropped

    def span(
        self,
        what: str,
        batch: int = -1,
        lane: int = -1,
        layer: int = -1,
        tile: int = -1,
        peer: int = -1,
        tokens: int = 0,
    ) -> AbstractContextManager[None]:
        """For a `with` statement around what is to be recorded; see `Span` for the meanings."""
        if not self.on:
            return _NOTHING
        return _Open(self, what, (batch, lane, layer, tile, peer, tokens))

    def add(self, span: Span) -> None:
        """Keeps a span, unless there are too many."""
        if len(self._spans) < MAX_SPANS:
            self._spans.append(span)
        else:
            self._dropped += 1


class _Open(AbstractContextManager[None]):
    __slots__ = ("_of_what", "_recorder", "_start", "_what")

    def __init__(self, recorder: Recorder, what: str, of_what: tuple[int, ...]) -> None:
        self._recorder = recorder
        self._what = what
        self._of_what = of_what

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        span = Span(self._what, self._start, time.monotonic(), *self._of_what)
        self._recorder.add(span)
