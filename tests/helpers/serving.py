"""The HTTP server in this process, in front of a controller that tests play."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from engine.api.tokenizer import Tokenizer
from engine.comm.packets import packet_pair, send_packet
from engine.control.messages import (
    Cancel,
    Message,
    PrefillRequest,
    PrefillResult,
    RankStatus,
    Results,
    Snapshot,
    Submit,
    Watch,
    decode,
    encode,
)
from engine.serve.front import Front
from engine.serve.http import make_server
from engine.serve.notices import Notice
from engine.serve.notices import encode as encode_notice
from engine.serve.spec import HttpSpec
from engine.topology.ranks import RankId
from helpers.offline import EOS, FINGERPRINT, VOCABULARY, FakeEngine, byte_tokenizer

Answer = Callable[[PrefillRequest], PrefillResult]

HEALTHY = Snapshot(
    ready=True,
    waiting=0,
    running=0,
    finished=0,
    failed=0,
    ranks=[RankStatus(RankId("expert", 0), pid=1, ready=True, state="idle")],
)


class FakeController:
    """A ROUTER in a thread. Answers each prompt with 'x', or with `answer`, unless it `holds`.

    What is cancelled it answers with a refusal, or when it is released if all `runs` already.
    """

    def __init__(self, address: str) -> None:
        self.answer: Answer = FakeEngine.default
        self.holds = False
        self.runs = False
        self.silent = False  # answers no Watch
        self.snapshot = HEALTHY
        self.requests: list[PrefillRequest] = []
        self.cancelled: list[int] = []
        self.clients: set[bytes] = set()
        self._held: list[tuple[bytes, PrefillRequest]] = []
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(address)
        self.asleep = False  # takes and says nothing, as a process that is stopped
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def release(self) -> None:
        """Answers what is held, and holds no more."""
        self._orders.put(self._release)

    def say(self, message: Message) -> None:
        """Sends `message` to everybody whose prompts are held."""

        def send() -> None:
            for peer in {peer for peer, _ in self._held}:
                self._send(peer, message)

        self._orders.put(send)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._ended.wait(0.01 if self.asleep else 0):
            while not self._orders.empty():
                self._orders.get()()
            if not self.asleep and self._socket.poll(5):
                peer, data = self._socket.recv_multipart()
                self._take(peer, decode(data))

    def _take(self, peer: bytes, message: Message) -> None:
        self.clients.add(peer)
        match message:
            case Submit(requests):
                self.requests += requests
                if self.holds:
                    self._held += [(peer, request) for request in requests]
                else:
                    self._send(peer, Results([self.answer(request) for request in requests]))
            case Cancel(keys):
                self.cancelled += keys
                if not self.runs:
                    self._refuse(peer, keys)
            case Watch() if not self.silent:
                self._send(peer, self.snapshot)

    def _refuse(self, peer: bytes, keys: Sequence[int]) -> None:
        refused = [held for held in self._held if held[0] == peer and held[1].key in keys]
        self._held = [held for held in self._held if held not in refused]
        for _, request in refused:
            result = PrefillResult(request.key, error="cancelled", refused=True)
            self._send(peer, Results([result]))

    def _release(self) -> None:
        self.holds = False
        for peer, request in self._held:
            self._send(peer, Results([self.answer(request)]))
        self._held.clear()

    def _send(self, peer: bytes, message: Message) -> None:
        self._socket.send_multipart([peer, encode(message)])


class Server:
    """url: where it listens; port. client: without a key, for one test."""

    def __init__(
        self,
        url: str,
        controllers: Sequence[FakeController],
        front: Front,
        supervisor: socket.socket,
    ) -> None:
        self.port = int(url.rpartition(":")[2])
        self.url = url
        self.controllers = controllers
        self.controller = controllers[0]
        self.front = front
        self._supervisor = supervisor
        self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def notify(self, notice: Notice) -> None:
        """What the supervisor would say."""
        send_packet(self._supervisor, encode_notice(notice))

    def raw(self, data: bytes) -> socket.socket:
        """A connection that has sent `data`."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(data)
        return connection


def spec(**changes: Any) -> HttpSpec:
    given = {
        "model": "tiny", "model_dir": "", "vocab_size": VOCABULARY, "max_model_len": 200_000,
        "eos_token_ids": [EOS], "fingerprint": FINGERPRINT, "instance": "test",
    }  # fmt: skip
    return HttpSpec(**(given | changes))


@contextmanager
def served(
    folder: Path, tokenizer: Tokenizer | None = None, instances: int = 1, **changes: Any
) -> Iterator[Server]:
    """A server whose controllers' sockets lie in `folder`; `changes` to the HttpSpec."""
    addresses = [f"ipc://{folder}/control-{index}" for index in range(instances)]
    controllers = [FakeController(address) for address in addresses]
    link, supervisor = packet_pair()
    listener = socket.create_server(("127.0.0.1", 0))
    changes["port"] = listener.getsockname()[1]
    front = Front(spec(controllers=addresses, **changes), tokenizer or byte_tokenizer(), link)
    try:
        with running(front, listener) as url:
            test = Server(url, controllers, front, supervisor)
            with test.client:
                yield test
    finally:
        for end in (link, supervisor, listener):
            end.close()
        for controller in controllers:
            controller.close()


@contextmanager
def running(front: Front, listener: socket.socket) -> Iterator[str]:
    """Serves in a thread; the URL."""
    server = make_server(front)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started, "the server starts")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"after {deadline_s:g} s: not so: {what}"
        time.sleep(0.002)


def chunks(response: httpx.Response) -> Sequence[Any]:
    """The events of a streamed answer; fails unless [DONE] ends it."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in events]
