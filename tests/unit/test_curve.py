"""Who gets in to a secured socket, and what is said about who does not."""

import contextlib
import logging
import socket as sockets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from rich.pretty import pretty_repr

from engine.curve import (
    Gatekeeper,
    Handshakes,
    Keys,
    Refusals,
    secure_client,
    secure_server,
)
from helpers.instances import wait_for

SECRET = b"a secret of one launch"
KEYS = Keys.of(SECRET)
OTHER = Keys.of(b"a secret of another launch")
LOG = logging.getLogger("gate")

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@pytest.fixture
def far() -> Iterator[Context]:
    """The context of those who connect: as in another process, nobody asks its gatekeeper."""
    with zmq.Context() as context:
        yield context


class Server:
    def __init__(self, context: Context, gate: Gatekeeper, port: int, host: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        secure_server(self.socket, KEYS)
        gate.watch(self.socket)
        self.socket.bind(f"tcp://{host}:{port or '*'}")
        self.address = self.socket.last_endpoint.decode()
        self.port = int(self.address.rpartition(":")[2])


@contextlib.contextmanager
def serving(port: int = 0, host: str = "127.0.0.1", gated: bool = True) -> Iterator[Server]:
    with (
        zmq.Context() as context,
        Gatekeeper(context, KEYS if gated else None, LOG) as gate,
    ):
        server = Server(context, gate, port, host)
        with server.socket:
            yield server


@contextlib.contextmanager
def client(context: Context, address: str, keys: Keys | None) -> Iterator[Socket]:
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        secure_client(socket, keys)
        socket.connect(address)
        yield socket


def answered(server: Socket, sender: Socket, text: bytes = b"hello") -> bool:
    """What `sender` says arrives, and the answer goes back."""
    sender.send(text)
    if not server.poll(5000):
        return False
    peer, said = server.recv_multipart()
    server.send_multipart([peer, said + b" yourself"])
    return bool(sender.poll(5000)) and sender.recv() == said + b" yourself"


def test_who_has_the_secret_gets_in(far: Context, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, client(far, server.address, Keys.of(SECRET + b"\n")) as one:
        assert answered(server.socket, one)
    assert caplog.text == ""


@pytest.mark.parametrize("who", ["wrong", "mixed"])
def test_who_lacks_it_gets_nothing_and_is_logged(
    who: str, far: Context, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server, far.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        secure_client(stranger, OTHER)
        if who == "mixed":  # knows the launch's public key, which is never sent, from elsewhere
            stranger.curve_serverkey = KEYS.public
        stranger.connect(server.address)
        stranger.send(b"let me in")
        wait_for(lambda: "refused a connection from 127.0.0.1" in caplog.text, "it is logged")
        with client(far, server.address, KEYS) as friend:
            assert answered(server.socket, friend)
        assert not server.socket.poll(0)
        assert not stranger.poll(0)
    for secret in (SECRET.decode(), KEYS.private.decode(), OTHER.private.decode()):
        assert secret not in caplog.text


def test_a_plain_client_gets_nothing_either(far: Context, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, client(far, server.address, None) as stranger:
        stranger.send(b"let me in")
        wait_for(lambda: "refused a connection from" in caplog.text, "it is logged")
        with client(far, server.address, KEYS) as friend:
            assert answered(server.socket, friend)
        assert not server.socket.poll(50)
        assert not stranger.poll(0)


def test_what_is_no_zeromq_is_hung_up_on(far: Context) -> None:
    with serving() as server, sockets.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
        with client(far, server.address, KEYS) as friend:
            assert answered(server.socket, friend)


def test_a_client_talks_to_no_server_without_the_secret(far: Context) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        impostor.curve_server = True
        impostor.curve_secretkey = OTHER.private
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with client(far, f"tcp://127.0.0.1:{port}", KEYS) as one:
            one.send(b"a prompt")
            assert not impostor.poll(300)


def test_nobody_gets_in_where_no_gatekeeper_is(far: Context) -> None:
    with serving(gated=False) as server, client(far, server.address, KEYS) as one:
        one.send(b"hello")
        assert not server.socket.poll(300)


def test_a_server_that_comes_back_is_found_again(far: Context) -> None:
    with serving() as server:
        port = server.port
        with client(far, server.address, KEYS) as one:
            assert answered(server.socket, one)
            server.socket.close()
            with serving(port) as again:
                one.send(b"still there")
                assert again.socket.poll(5000)
                assert answered(again.socket, one, again.socket.recv_multipart()[1])


def test_many_clients_at_once(far: Context) -> None:
    with serving() as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(far, server.address, KEYS)) for _ in range(100)]
        for number, one in enumerate(clients):
            one.send(b"%d" % number)
        said = set()
        while len(said) < len(clients) and server.socket.poll(5000):
            said.add(server.socket.recv_multipart()[1])
        assert said == {b"%d" % number for number in range(100)}


def test_other_sockets_of_the_context_are_left_alone(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    with (
        zmq.Context() as context,
        Gatekeeper(context, KEYS, LOG),
        context.socket(zmq.ROUTER) as local,
    ):
        local.bind(address)
        with client(context, address, None) as one:
            assert answered(local, one)


def test_without_keys_sockets_are_plain(far: Context) -> None:
    with (
        zmq.Context() as context,
        Gatekeeper(context, None, LOG) as gate,
        context.socket(zmq.ROUTER) as plain,
    ):
        secure_server(plain, None)
        gate.watch(plain)
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        with client(far, f"tcp://127.0.0.1:{port}", None) as one:
            assert answered(plain, one)


def test_ipv6(far: Context, caplog: pytest.LogCaptureFixture) -> None:
    try:
        sockets.create_server(("::1", 0), family=sockets.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with serving(host="[::1]") as server:
        with client(far, server.address, KEYS) as one:
            assert answered(server.socket, one)
        with client(far, server.address, OTHER) as stranger:
            stranger.send(b"let me in")
            wait_for(lambda: "from ::1:" in caplog.text, "it is logged")


@pytest.mark.parametrize(("keys", "refused"), [(KEYS, False), (OTHER, True), (None, True)])
def test_a_client_knows_that_it_is_refused(keys: Keys | None, refused: bool, far: Context) -> None:
    with serving() as server, far.socket(zmq.DEALER) as one:
        one.linger = 0
        secure_client(one, keys)
        handshakes = Handshakes(far, one)
        one.connect(server.address)
        if refused:
            wait_for(lambda: handshakes.refused, "it knows")
        else:
            assert answered(server.socket, one)
            assert not handshakes.refused
        one.close()
        handshakes.close()


def test_a_server_that_is_not_there_yet_refuses_nobody(far: Context) -> None:
    with sockets.socket() as held, far.socket(zmq.DEALER) as one:
        held.bind(("127.0.0.1", 0))  # and does not listen
        port = held.getsockname()[1]
        one.linger = 0
        secure_client(one, KEYS)
        handshakes = Handshakes(far, one)
        one.connect(f"tcp://127.0.0.1:{port}")
        one.send(b"hello")
        assert not one.poll(300)
        assert not handshakes.refused
        held.close()
        with serving(port) as server:
            assert server.socket.poll(5000)
            assert not handshakes.refused
        one.close()
        handshakes.close()


def hang_up(port: int, times: int) -> None:
    """Takes that many connections, one after another, and ends each at once."""
    with sockets.create_server(("127.0.0.1", port)) as listener:
        for _ in range(times):
            listener.accept()[0].close()


def test_a_server_that_goes_down_now_and_then_refuses_nobody(far: Context) -> None:
    with sockets.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with far.socket(zmq.DEALER) as one:
        one.linger = 0
        secure_client(one, KEYS)
        handshakes = Handshakes(far, one)
        one.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(3):
            hang_up(port, 2)
            one.send(b"hello")
            with serving(port) as server:
                assert server.socket.poll(5000)
        assert not handshakes.refused
        hang_up(port, 3)
        wait_for(lambda: handshakes.refused, "that is often enough")
        one.close()
        handshakes.close()


def test_a_gatekeeper_closes_before_the_sockets_that_it_watches(far: Context) -> None:
    with zmq.Context() as context:
        gate = Gatekeeper(context, KEYS, LOG)
        with Server(context, gate, 0, "127.0.0.1").socket as socket:
            gate.close()
            gate.close()
            with client(far, socket.last_endpoint.decode(), KEYS) as one:
                one.send(b"hello")
                assert not socket.poll(300)


def test_keys_follow_from_the_secret_and_show_nothing() -> None:
    assert Keys.of(SECRET) == Keys.of(SECRET + b"\r\n") == KEYS
    assert KEYS != OTHER
    assert zmq.curve_public(KEYS.private) == KEYS.public
    assert SECRET not in KEYS.public + KEYS.private
    for text in (repr(KEYS), str(KEYS), f"{[KEYS]}", pretty_repr(KEYS)):
        assert KEYS.private.decode() not in text
        assert KEYS.public.decode() not in text
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(KEYS), type=Keys) == KEYS


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes..", b"fifteen bytes..\n"])
def test_a_short_secret_is_refused_and_not_repeated(secret: bytes) -> None:
    with pytest.raises(ValueError, match="shorter than 16 bytes") as error:
        Keys.of(secret)
    assert "fifteen" not in str(error.value)


def test_refusals_are_counted_rather_than_repeated(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(LOG, lambda: now)
    for _ in range(500):
        refusals.add("10.0.0.1")
    refusals.add("10.0.0.2")
    now = 61.0
    refusals.add("10.0.0.1")
    said = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert said == [
        "refused a connection from 10.0.0.1",
        "refused a connection from 10.0.0.2",
        "refused a connection from 10.0.0.1, 500 times",
    ]


def test_no_number_of_addresses_floods_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = Refusals(LOG, lambda: now)
    for number in range(5000):
        refusals.add(f"fd00::{number:x}")
    assert len(caplog.records) == 257
    assert "from many addresses" in caplog.text
    now = 61.0
    refusals.add("fd01::")
    assert "from fd01::" in caplog.text
