"""Load for an instance by way of its controller, without HTTP."""

import asyncio
import itertools
from collections.abc import Callable

from engine.control.client import Client
from engine.control.messages import PrefillRequest, PrefillResult
from engine.errors import RunError


class ControlTarget:
    """A load's target, as an async context manager. The client is its own until it is left.

    prompt: the token ids of prompt no. `key`, of so many tokens.
    """

    def __init__(self, client: Client, prompt: Callable[[int, int], list[int]]) -> None:
        self._client = client
        self._prompt = prompt
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[PrefillResult]] = {}
        self._failure: RunError | None = None

    async def __aenter__(self) -> "ControlTarget":
        self._loop = asyncio.get_running_loop()
        for fd in self._client.filenos():
            self._loop.add_reader(fd, self._receive)
        self._receive()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for fd in self._client.filenos():
            self._loop.remove_reader(fd)

    async def first_token(self, key: int, tokens: int) -> None:
        """Raises RunError when the prompt fails, or the instance."""
        if self._failure is not None:
            raise self._failure
        number = next(self._numbers)
        done = self._loop.create_future()
        self._waiting[number] = done
        try:
            self._tell(
                lambda: self._client.submit([PrefillRequest(number, self._prompt(key, tokens))])
            )
            result = await done
        except asyncio.CancelledError:
            self._tell(lambda: self._client.cancel([number]))
            raise
        finally:
            del self._waiting[number]
        if result.error is not None:
            raise RunError(f"a prompt of {tokens:,} tokens: {result.error}")

    def start_trace(self, seconds: float) -> None:
        """See Client; its `await_trace` returns it once the target is left."""
        self._tell(lambda: self._client.start_trace(seconds))

    def _tell(self, say: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            say()
        except RunError as error:
            self._fail(error)
            return
        # Sending may take the notice of what came, so that the loop would not be woken for it.
        self._receive()

    def _receive(self) -> None:
        try:
            results = self._client.receive(0)
        except RunError as error:
            self._fail(error)
            return
        for result in results:
            done = self._waiting.get(result.key)
            if done is not None and not done.done():
                done.set_result(result)

    def _fail(self, error: RunError) -> None:
        """The instance is lost, and every prompt that waits for it."""
        self._failure = error
        for fd in self._client.filenos():
            self._loop.remove_reader(fd)
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(error)
