"""A fixed set of prompts through a running instance, once and again."""

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.control.client import Client
from engine.control.messages import PrefillRequest
from engine.errors import RunError
from engine.offline.runner import Window

_WAIT_S = 1.0


class Round(msgspec.Struct, frozen=True):
    """One pass over the prompts. start, end, first: of the first submission, the last result and
    the first one, in monotonic seconds. token_ids: the first token of each prompt.
    """

    start: float
    end: float
    first: float
    token_ids: list[int]

    @property
    def seconds(self) -> float:
        return self.end - self.start


def run_round(client: Client, prompts: Sequence[Sequence[int]], window: Window) -> Round:
    """Submits the prompts in order, as many at a time as `window` admits, and waits for all.

    Raises RunError when the instance fails, or a prompt.
    """
    requests = deque(PrefillRequest(key, list(prompt)) for key, prompt in enumerate(prompts))
    tokens: dict[int, int] = {}
    running = running_tokens = 0
    first = None
    start = time.monotonic()
    while requests or running:
        ready = []
        while requests and window.admits(running, running_tokens, len(requests[0].token_ids)):
            ready.append(requests.popleft())
            running += 1
            running_tokens += len(ready[-1].token_ids)
        if ready:
            client.submit(ready)
            if not requests:
                client.drain()
        for result in client.receive(_WAIT_S):
            if result.error is not None:
                raise RunError(f"prompt {result.key} failed: {result.error}")
            first = first or time.monotonic()
            tokens[result.key] = result.token_id
            running -= 1
            running_tokens -= len(prompts[result.key])
    end = time.monotonic()
    return Round(start, end, first or end, [tokens[key] for key in range(len(prompts))])
