"""Control between nodes: encrypted, and only for who has the launch's secret (CurveZMQ).

All parties of a launch have one key pair, which follows from the secret, and each lets in that
key alone. So whoever lacks the secret can neither connect nor pose as a node. With keys None,
which is for the sockets of one machine, nothing here does anything.

Who is refused never gets as far as a message, so only the sockets themselves know: `Gatekeeper`
says so on the side that listens, `Handshakes` on the side that connects.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import math
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

SHORTEST_SECRET = 16  # bytes

_SALT = b"asapctl control keys 1"
_DOMAIN = b"asapctl"  # that of the sockets of which the gatekeeper is asked
_HANDLER = "inproc://zeromq.zap.01"  # where libzmq looks for who decides (ZeroMQ RFC 27)
_LARGEST_MESSAGE = 2**30  # what a stranger may announce before it is known to be one
_QUIET_S = 60.0  # between two lines about one address
_MOST_ADDRESSES = 256
_UNKNOWN = "an address that was gone at once"
_ENDS_THAT_REFUSE = 3

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_numbers = itertools.count()


class Keys(msgspec.Struct, frozen=True):
    """The key pair of a launch, each 40 characters of Z85. Shows neither when printed."""

    public: bytes
    private: bytes

    @classmethod
    def of(cls, secret: bytes) -> Keys:
        """The pair that follows from `secret`, the same everywhere; takes some 50 ms.

        A line's end after the secret, as in a file, does not count. scrypt, because who listens
        on the network can try secrets against what it hears. Raises ValueError: it is too short.
        """
        secret = secret.rstrip(b"\r\n")
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(f"the secret is shorter than {SHORTEST_SECRET} bytes")
        private = z85.encode(hashlib.scrypt(secret, salt=_SALT, n=2**14, r=8, p=1, dklen=32))
        return cls(zmq.curve_public(private), private)

    def __repr__(self) -> str:
        return "Keys(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


def secure_server(socket: Socket, keys: Keys | None) -> None:
    """Before `socket` binds: it will talk to nobody but who has `keys`.

    Nobody at all gets in while its context has no Gatekeeper.
    """
    if keys is None:
        return
    socket.ipv6 = True
    socket.maxmsgsize = _LARGEST_MESSAGE
    socket.curve_server = True
    socket.curve_secretkey = keys.private
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: Socket, keys: Keys | None) -> None:
    """Before `socket` connects: it will talk to nobody but who has `keys`."""
    if keys is None:
        return
    socket.ipv6 = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.private
    socket.curve_serverkey = keys.public


class Gatekeeper:
    """Lets those who have `keys` in to the secured sockets of `context`, in a thread of its own.

    One to a context, made before its sockets bind and closed before the context ends; fork before,
    not after. log: gets a line about an address that is refused, at most once a minute each, at
    sockets that it `watch`es. What does not speak ZeroMQ is hung up on without a word. Sockets of
    the context that are not secured are none of its business.
    """

    def __init__(self, context: Context, keys: Keys | None, log: logging.Logger) -> None:
        self._context = context
        self._watched: list[Socket] = []
        self._monitors: queue.SimpleQueue[Socket] = queue.SimpleQueue()
        self._refusals = Refusals(log)
        self._ended = False
        self._thread: threading.Thread | None = None
        if keys is None:
            return
        self._key = z85.decode(keys.public)
        handler = context.socket(zmq.REP)
        handler.linger = 0
        handler.bind(_HANDLER)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(
            target=self._run, args=(handler,), name="gatekeeper", daemon=True
        )
        self._thread.start()

    def watch(self, socket: Socket) -> None:
        """Before `socket` binds: whom it turns away is logged."""
        if self._thread is None:
            return
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED
        self._monitors.put(_monitor(self._context, socket, events))
        self._watched.append(socket)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Lets nobody in any more. May be called twice."""
        if self._thread is None:
            return
        for socket in self._watched:
            if not socket.closed:
                socket.disable_monitor()  # or it would wait for somebody to read its events
        self._ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._thread = None
        os.close(self._wake)

    def __enter__(self) -> Gatekeeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, handler: Socket) -> None:
        monitors: dict[Socket, _Doorway] = {}
        poller = zmq.Poller()
        poller.register(handler, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._ended:
            ready = {source for source, _ in poller.poll()}
            if self._wake in ready:
                os.eventfd_read(self._wake)
                while not self._monitors.empty():
                    monitor = self._monitors.get()
                    monitors[monitor] = _Doorway(self._refusals)
                    poller.register(monitor, zmq.POLLIN)
            for monitor in [monitor for monitor in monitors if monitor in ready]:
                if not monitors[monitor].take(monitor):
                    del monitors[monitor]
                    poller.unregister(monitor)
                    monitor.close()
            if handler in ready:  # last, so that its address is known if it is refused
                self._decide(handler)
        while not self._monitors.empty():
            self._monitors.get().close()
        for socket in (handler, *monitors):
            socket.close()

    def _decide(self, handler: Socket) -> None:
        """Answers one request of RFC 27: version, id, domain, address, identity, mechanism, key."""
        version, number, *_, mechanism, key = [*handler.recv_multipart(), b"", b"", b""][:7]
        let_in = mechanism == b"CURVE" and hmac.compare_digest(key, self._key)
        verdict = (b"200", b"OK") if let_in else (b"400", b"not the key of this launch")
        handler.send_multipart([version, number, *verdict, b"", b""])


class Handshakes:
    """Whether the other side lets `socket`, which is about to connect to it, in.

    Only the end of the connection shows that it does not, so one end alone says nothing: it may
    have gone down at that moment. `socket` is closed first.
    """

    def __init__(self, context: Context, socket: Socket) -> None:
        self._failures = 0
        self._monitor = _monitor(context, socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED)

    @property
    def refused(self) -> bool:
        """It turned the socket away again and again, or said so, and has not let it in since."""
        while self._monitor.poll(0):
            match recv_monitor_message(self._monitor)["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._failures = 0
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._failures += 1
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._failures = _ENDS_THAT_REFUSE  # after which libzmq does not try again
        return self._failures >= _ENDS_THAT_REFUSE

    def close(self) -> None:
        self._monitor.close()


class _Doorway:
    """Reads the events of one listening socket for whom it turned away.

    Only an accepted connection has an address, and it is known by its descriptor, which a failed
    handshake does not name. But the end of that connection does, and it follows at once: libzmq
    reports both from its one I/O thread.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._addresses: dict[int, str] = {}  # by descriptor
        self._failed = False

    def take(self, monitor: Socket) -> bool:
        """Reads one event; False when it was the last."""
        message = recv_monitor_message(monitor)
        event, value = message["event"], message["value"]
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        if event == zmq.EVENT_ACCEPTED:
            self._addresses[value] = _address_of(value)
        elif event == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, _UNKNOWN)
            if self._failed:
                self._refusals.add(address)
            self._failed = False
        else:
            self._failed = True
        return True


class Refusals:
    """Logs who was refused: each address at once, and then once in `_QUIET_S` how often.

    clock: seconds, from any start.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # when, and how many since

    def add(self, address: str) -> None:
        now = self._clock()
        if address not in self._said and len(self._said) >= _MOST_ADDRESSES:
            self._said = {a: s for a, s in self._said.items() if now - s[0] < _QUIET_S}
            if len(self._said) >= _MOST_ADDRESSES:
                address = "many addresses"
        said_at, since = self._said.get(address, (-math.inf, 0))
        since += 1
        if now - said_at < _QUIET_S:
            self._said[address] = (said_at, since)
            return
        self._said[address] = (now, 0)
        times = "" if since == 1 else f", {since} times"
        self._log.warning(
            "refused a connection from %s%s: it does not have the secret of this launch",
            address,
            times,
        )


def _monitor(context: Context, socket: Socket, events: int) -> Socket:
    """What reads `events` of `socket`; until it is closed, somebody should."""
    name = f"inproc://curve-monitor-{next(_numbers)}"
    socket.monitor(name, events)
    reader = context.socket(zmq.PAIR)
    reader.linger = 0
    reader.set_hwm(0)  # the I/O thread, which writes, is never kept waiting
    reader.connect(name)
    return reader


def _address_of(descriptor: int) -> str:
    """The far end of a connection of libzmq's, which may have closed it already."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return _UNKNOWN
    try:
        with sockets.fromfd(copy, sockets.AF_INET6, sockets.SOCK_STREAM) as connection:
            host, *_ = connection.getpeername()
    except (OSError, ValueError):
        return _UNKNOWN
    finally:
        os.close(copy)
    return str(host).removeprefix("::ffff:") or _UNKNOWN
