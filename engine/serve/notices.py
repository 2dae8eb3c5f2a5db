"""What the supervisor tells the HTTP process of instances, over a socket that both inherited."""

import logging
import socket
from asyncio import get_running_loop
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import msgspec

from engine.comm.packets import receive_packet

log = logging.getLogger(__name__)


class InstanceLost(msgspec.Struct, frozen=True, tag=True):
    """All processes of this instance are gone or about to go. It may come back."""

    index: int


class InstanceBack(msgspec.Struct, frozen=True, tag=True):
    """The instance has been started again, from nothing, at the address that it had."""

    index: int


Notice: TypeAlias = InstanceLost | InstanceBack

encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Notice)


@contextmanager
def listening(link: socket.socket | None, on_notice: Callable[[Notice], None]) -> Iterator[None]:
    """Has the running event loop call `on_notice` with each packet (SOCK_SEQPACKET) of `link`."""
    if link is None:
        yield
        return
    loop = get_running_loop()
    link.setblocking(False)

    def read() -> None:
        try:
            packet = receive_packet(link)
        except BlockingIOError:
            return
        except OSError:
            packet = None
        if packet is None:  # the supervisor is gone, and this process is about to follow
            loop.remove_reader(link)
            return
        try:
            notice = _decoder.decode(packet[0])
        except msgspec.DecodeError as error:
            log.warning("the supervisor sent what is not a notice: %s", error)
            return
        on_notice(notice)

    loop.add_reader(link, read)
    try:
        yield
    finally:
        loop.remove_reader(link)
