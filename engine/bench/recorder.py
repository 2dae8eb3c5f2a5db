"""What a load has measured so far, while it goes on."""

import asyncio
from collections.abc import Sequence

from engine.bench.load import GIVEN_UP, Outcome, Target
from engine.errors import RunError
from engine.traffic.arrivals import Arrival


class Recorder:
    """A target in front of another one. Made when the load begins, in its event loop."""

    def __init__(self, target: Target, arrivals: Sequence[Arrival]) -> None:
        self._target = target
        self._arrivals = arrivals
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self.sent = 0
        self.outcomes: list[Outcome] = []  # as they come

    @property
    def elapsed_s(self) -> float:
        return self._loop.time() - self._start

    async def first_token(self, key: int, tokens: int) -> None:
        due = self._start + self._arrivals[key].at_s
        late = self._loop.time() - due
        self.sent += 1
        error = None
        try:
            await self._target.first_token(key, tokens)
        except RunError as failure:
            error = str(failure)
            raise
        except asyncio.CancelledError:
            error = GIVEN_UP
            raise
        finally:
            ttft = self._loop.time() - due
            self.outcomes.append(Outcome(self._arrivals[key].at_s, tokens, late, ttft, error))
