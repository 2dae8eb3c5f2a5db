"""A client of the controller for an event loop: many prompts at a time, each awaited by itself."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

import msgspec
import zmq
import zmq.asyncio

from engine.api.types import RequestError
from engine.control.messages import (
    Cancel,
    Message,
    PrefillRequest,
    PrefillResult,
    Refused,
    Results,
    Snapshot,
    Submit,
    Watch,
    decode,
    encode,
)

log = logging.getLogger(__name__)


class EngineClient:
    """One connection to the controller, used from one event loop. An async context manager."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._results: dict[int, asyncio.Future[PrefillResult]] = {}
        self._snapshot: asyncio.Future[Snapshot] | None = None
        self._next_key = 0

    async def __aenter__(self) -> "EngineClient":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        # The supervisor names it so to the controller when this process has died.
        self._socket.identity = f"http-{os.getpid()}".encode()
        self._socket.connect(self._address)
        self._receiver = asyncio.create_task(self._receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def prefill(
        self, requests: Sequence[PrefillRequest], abandoned: Callable[[], object] | None = None
    ) -> list[PrefillResult]:
        """The results of `requests`, in their order; the keys that they come with do not matter.

        When the caller is cancelled, what has not started is withdrawn, and `abandoned` is called
        once nobody works on any of them any more. Raises RequestError (503) when the controller
        refuses them.
        """
        loop = asyncio.get_running_loop()
        keyed = []
        for request in requests:
            keyed.append(msgspec.structs.replace(request, key=self._next_key))
            self._results[self._next_key] = loop.create_future()
            self._next_key += 1
        futures = {request.key: self._results[request.key] for request in keyed}
        everything = asyncio.gather(*futures.values(), return_exceptions=True)
        try:
            await self._send(Submit(keyed))
            await asyncio.shield(everything)
        except asyncio.CancelledError:
            if abandoned is not None:
                everything.add_done_callback(lambda _: abandoned())
            if left := [key for key, future in futures.items() if not future.done()]:
                await self._send(Cancel(left))
            raise
        return [future.result() for future in futures.values()]

    async def snapshot(self, timeout_s: float) -> Snapshot | None:
        """How the instance stands; None when the controller does not say so in time."""
        if self._snapshot is None or self._snapshot.done():
            self._snapshot = asyncio.get_running_loop().create_future()
            await self._send(Watch())
        # One answer serves all who ask meanwhile; none of them may cancel it for the others.
        done, _ = await asyncio.wait([self._snapshot], timeout=timeout_s)
        if done:
            return done.pop().result()
        self._snapshot = None
        return None

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))

    async def _receive(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                self._take(decode(data))
            except msgspec.DecodeError as error:
                log.warning("the controller sent what is not a message: %s", error)

    def _take(self, message: Message) -> None:
        match message:
            case Results(results):
                for result in results:
                    future = self._results.pop(result.key, None)
                    if future is not None:
                        future.set_result(result)
            case Snapshot():
                if self._snapshot is not None and not self._snapshot.done():
                    self._snapshot.set_result(message)
            case Refused(reason):
                for future in self._results.values():
                    future.set_exception(RequestError(reason, code="refused", status=503))
                self._results.clear()
            case _:
                log.warning("the controller sent an unexpected %s", type(message).__name__)
