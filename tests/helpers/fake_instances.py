"""An instance that is not one: a runtime folder, and a thread that answers as its controller."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from engine.control.messages import Message, decode, encode
from engine.launch.registry import InstanceRecord, write_record

Answer = Callable[[Message], Message | None]


class FakeController:
    """`answer` is called with each message, in a thread; heard: what came, and when.

    address: of its socket; the record's by default.
    """

    def __init__(self, record: InstanceRecord, answer: Answer, address: str | None = None) -> None:
        self.record = record
        self._address = address or record.controller
        self.heard: list[tuple[float, Message]] = []
        self.answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "FakeController":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self._address)
            while not self._stop.is_set():
                if socket.poll(20):
                    peer, data = socket.recv_multipart()
                    message = decode(data)
                    self.heard.append((time.monotonic(), message))
                    answer = self.answer(message)
                    if answer is not None:
                        socket.send_multipart([peer, encode(answer)])


@contextlib.contextmanager
def fake_instance(
    home: Path, answer: Answer, name: str = "demo", more: Sequence[Answer] = ()
) -> Iterator[FakeController]:
    """An instance called `name`, for programs whose XDG_RUNTIME_DIR is `home`.

    more: answers of further controllers, when it is several instances.
    """
    base = home / "asapctl"
    base.mkdir(mode=0o700, exist_ok=True)
    folder = base / name
    folder.mkdir(mode=0o700)
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    addresses = [f"ipc://{folder}/control"]
    addresses += [f"ipc://{folder}/control-{index}" for index in range(1, len(more) + 1)]
    record = InstanceRecord(
        name=name,
        pid=os.getpid(),
        command="launch",
        model="/models/demo",
        topology="cpu",
        started=time.time(),
        controller=addresses[0],
        controllers=addresses,
        state="ready",
    )
    write_record(folder, record)
    try:
        with contextlib.ExitStack() as others:
            for other, address in zip(more, addresses[1:], strict=True):
                others.enter_context(FakeController(record, other, address))
            with FakeController(record, answer) as controller:
                yield controller
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        os.close(held)
