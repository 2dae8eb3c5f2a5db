"""A client of the controller for an event loop: many prompts at a time, each awaited by itself."""

import asyncio
import logging
import os
from collections.abc import Sequence

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

    async def prefill(self, requests: Sequence[PrefillRequest]) -> list[PrefillResult]:
        """The results of `requests`, in their order; the keys that they come with do not matter.

        When the caller is cancelled, what is not done is withdrawn. Raises RequestError (503) when
        the controller refuses them.
        """
        loop = asyncio.get_running_loop()
        keyed = []
        for request in requests:
            keyed.append(msgspec.structs.replace(request, key=self._next_key))
            self._results[self._next_key] = loop.create_future()
            self._next_key += 1
        futures = {request.key: self._results[request.key] for request in keyed}
        try:
            await self._send(Submit(keyed))
            return [await future for future in futures.values()]
        finally:
            left = [key for key, future in futures.items() if not _has_result(future)]
            for key in futures:
                self._results.pop(key, None)
            if left:
                await self._send(Cancel(left))

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
                    future = self._results.pop(result.key, None)  # None: it was withdrawn
                    if future is not None and not future.done():
                        future.set_result(result)
            case Snapshot():
                if self._snapshot is not None and not self._snapshot.done():
                    self._snapshot.set_result(message)
            case Refused(reason):
                for future in self._results.values():
                    if not future.done():
                        future.set_exception(RequestError(reason, code="refused", status=503))
            case _:
                log.warning("the controller sent an unexpected %s", type(message).__name__)


def _has_result(future: "asyncio.Future[PrefillResult]") -> bool:
    """A result or a failure."""
    if not future.done() or future.cancelled():
        return False
    future.exception()  # asyncio would log a failure that nobody looks at
    return True
