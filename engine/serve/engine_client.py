"""A connection to one controller, for an event loop."""

import asyncio
import logging
import os
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from engine.control.messages import Message, Snapshot, Watch, decode, encode

log = logging.getLogger(__name__)


class EngineClient:
    """Used from one event loop. May be opened again after it was closed."""

    def __init__(self, address: str, on_message: Callable[[Message], None]) -> None:
        """on_message: gets all that the controller says."""
        self._address = address
        self._on_message = on_message
        self._snapshot: asyncio.Future[Snapshot] | None = None
        self._socket: zmq.asyncio.Socket | None = None

    def open(self, context: zmq.asyncio.Context) -> None:
        """Connects, now or once there is a controller."""
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.linger = 0
        # The supervisor names it so to the controller when this process has died.
        socket.identity = f"http-{os.getpid()}".encode()
        socket.connect(self._address)
        self._socket = socket
        self._receiver = asyncio.create_task(self._receive(socket))

    def close(self) -> None:
        """What was sent and has not left is dropped."""
        if self._socket is not None:
            self._receiver.cancel()
            self._socket.close()
            self._socket = None
            self._snapshot = None

    def send(self, message: Message) -> None:
        """Never blocks."""
        assert self._socket is not None
        # Without a high-water mark there is always room, so that this is done when it returns.
        sent = self._socket.send(encode(message), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)
        sent.result()

    async def snapshot(self, timeout_s: float) -> Snapshot | None:
        """How the instance stands; None when the controller does not say so in time."""
        if self._socket is None:
            return None
        if self._snapshot is None or self._snapshot.done():
            self._snapshot = asyncio.get_running_loop().create_future()
            self.send(Watch())
        # One answer serves all who ask meanwhile; none of them may cancel it for the others.
        asked = self._snapshot
        done, _ = await asyncio.wait([asked], timeout=timeout_s)
        if done:
            return done.pop().result()
        if self._snapshot is asked:
            self._snapshot = None
        return None

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                log.warning("the controller sent what is not a message: %s", error)
                continue
            asked = self._snapshot
            if isinstance(message, Snapshot) and asked is not None and not asked.done():
                asked.set_result(message)
            self._on_message(message)
