"""Open-loop load: each prompt is sent at its time, whatever became of those before it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import RunError
from engine.traffic.arrivals import Arrival

GIVEN_UP = "given up"
_EARLY_S = 1e-3  # an event loop sleeps whole milliseconds, rounded up


class Target(Protocol):
    """What answers prompts."""

    async def first_token(self, key: int, tokens: int) -> None:
        """Sends prompt no. `key`, of `tokens` tokens; returns when its first token is there. When
        cancelled, it stops waiting and frees what the prompt holds. Raises RunError.
        """


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt of `tokens` tokens.

    at_s: when it was to be sent, in seconds after the beginning. late_s: how much later it was.
    ttft_s: from at_s to the first token; to the failure, or to when it was given up, where there
    was none. error: why there was none.
    """

    at_s: float
    tokens: int
    late_s: float
    ttft_s: float
    error: str | None = None

    @property
    def answered(self) -> bool:
        return self.error is None

    @property
    def given_up(self) -> bool:
        """It was not answered while it was waited for, and might have been."""
        return self.error == GIVEN_UP


async def offer(arrivals: Sequence[Arrival], target: Target, *, patience_s: float) -> list[Outcome]:
    """One outcome for each of `arrivals`, which are in order of time.

    What is missing patience_s seconds after the last of them is cancelled, and given up.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for key, arrival in enumerate(arrivals):
            await _sleep_until(loop, start + arrival.at_s)
            tasks.append(loop.create_task(_send(loop, start, key, arrival, target)))
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)
    finally:
        for task in tasks:
            task.cancel()
    return await asyncio.gather(*tasks)


async def _send(
    loop: asyncio.AbstractEventLoop, start: float, key: int, arrival: Arrival, target: Target
) -> Outcome:
    due = start + arrival.at_s
    late = loop.time() - due
    error = None
    try:
        await target.first_token(key, arrival.tokens)
    except RunError as failure:
        error = str(failure)
    except asyncio.CancelledError:
        error = GIVEN_UP
    return Outcome(arrival.at_s, arrival.tokens, late, loop.time() - due, error)


async def _sleep_until(loop: asyncio.AbstractEventLoop, when: float) -> None:
    if (left := when - loop.time() - _EARLY_S) > 0:
        await asyncio.sleep(left)
    while loop.time() < when:
        await asyncio.sleep(0)
