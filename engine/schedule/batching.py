"""How waiting prompts become batches: length-aware aggregation up to the inflection point."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.schedule.types import Request, Segment


@dataclass
class Draft:
    """A batch before it has a number and a group.

    turn: the place of its first request in the order in which all requests came.
    oldest: the earliest arrival of its requests, in seconds.
    """

    turn: int
    oldest: float
    requests: list[Request] = field(default_factory=list)
    tokens: int = 0

    def append(self, request: Request) -> None:
        self.requests.append(request)
        self.tokens += request.tokens
        self.oldest = min(self.oldest, request.arrival)

    def remove(self, key: int) -> bool:
        for request in self.requests:
            if request.key == key:
                self.requests.remove(request)
                self.tokens -= request.tokens
                self.oldest = min((r.arrival for r in self.requests), default=self.oldest)
                return True
        return False

    def segments(self) -> tuple[Segment, ...]:
        return tuple(Segment(request.key, 0, request.tokens) for request in self.requests)


class Aggregator:
    """Fills one draft at a time, first come first served.

    A draft is full once it holds `min_tokens` (the experts' inflection point: below it an expert
    stage costs the same however few tokens it gets), or when the next prompt would take it over
    `max_tokens`. Only a prompt that is longer by itself exceeds `max_tokens`, and has no company.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        if not 1 <= min_tokens <= max_tokens:
            raise ValueError(f"1 <= {min_tokens=} <= {max_tokens=} does not hold")
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._full: deque[Draft] = deque()
        self._open: Draft | None = None

    def aggregate(self, min_tokens: int) -> None:
        """From now on a draft is full once it holds `min_tokens`, or what max_tokens allows."""
        self._min_tokens = min(min_tokens, self._max_tokens)
        if self._open and self._open.tokens >= self._min_tokens:
            self._close()

    def add(self, turn: int, request: Request) -> None:
        if self._open and self._open.tokens + request.tokens > self._max_tokens:
            self._close()
        if self._open is None:
            self._open = Draft(turn, request.arrival)
        self._open.append(request)
        if self._open.tokens >= self._min_tokens:
            self._close()

    def remove(self, key: int) -> bool:
        """Takes a prompt out again; False when it is not here. A full draft stays closed."""
        drafts = [*self._full, *([self._open] if self._open else [])]
        for draft in drafts:
            if not draft.remove(key):
                continue
            if not draft.requests:
                if draft is self._open:
                    self._open = None
                else:
                    self._full.remove(draft)
            return True
        return False

    def _close(self) -> None:
        assert self._open is not None
        self._full.append(self._open)
        self._open = None

    @property
    def full(self) -> int:
        """How many drafts are full."""
        return len(self._full)

    @property
    def first(self) -> Draft | None:
        """The draft whose first request came first, full or not."""
        return self._full[0] if self._full else self._open

    def oldest(self, count: int) -> float | None:
        """The earliest arrival among the first `count` drafts, the open one included."""
        arrivals = [draft.oldest for draft in list(self._full)[:count]]
        if self._open and len(arrivals) < count:
            arrivals.append(self._open.oldest)
        return min(arrivals, default=None)

    def take(self, count: int) -> Sequence[Draft]:
        """Removes the first `count` drafts. The open one goes along where full ones are too few."""
        taken = [self._full.popleft() for _ in range(min(count, len(self._full)))]
        if self._open and len(taken) < count:
            taken.append(self._open)
            self._open = None
        return taken
