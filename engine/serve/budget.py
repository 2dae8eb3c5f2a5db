"""Limits on what may be here at a time: prompts, and bytes of bodies."""

from types import TracebackType

from engine.api.types import RequestError


class Budget:
    """So many of something, of which every request takes its share and gives it back."""

    def __init__(self, limit: int, what: str) -> None:
        """what: names the things in the refusal."""
        self.limit = limit
        self.taken = 0
        self._what = what

    def share(self) -> "Share":
        return Share(self)

    def take(self, count: int) -> None:
        """Raises RequestError (429) when there is no room for `count` more."""
        if self.taken + count > self.limit:
            raise RequestError(
                f"too many {self._what} at a time ({self.taken} of {self.limit}, and {count} "
                "more); try again later",
                code="queue_full",
                status=429,
            )
        self.taken += count


class Share:
    """What one request holds of a budget. Leaving the context gives it back."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held = 0

    def grow(self, count: int) -> None:
        """Raises RequestError (429) when there is no room."""
        self._budget.take(count)
        self.held += count

    def __enter__(self) -> "Share":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._budget.taken -= self.held
