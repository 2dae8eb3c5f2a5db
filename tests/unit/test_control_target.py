"""A load that goes to a controller directly: what is sent, what comes back, and what is lost."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeAlias

import pytest
import zmq

from engine.bench.control_target import ControlTarget
from engine.control.client import Client
from engine.control.messages import (
    Cancel,
    Message,
    PrefillRequest,
    PrefillResult,
    Results,
    StartTrace,
    Submit,
    TraceReport,
    decode,
    encode,
)
from engine.errors import RunError
from engine.topology.ranks import RankId


class Controller:
    """The other end of a client, in the same thread."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    async def hear(self) -> Message:
        while not self._socket.poll(0):
            await asyncio.sleep(0)
        self._client, data = self._socket.recv_multipart()
        return decode(data)

    def say(self, message: Message) -> None:
        self._socket.send_multipart((self._client, encode(message)))


class Guard:
    """An instance that has failed once `fail` was called."""

    def __init__(self) -> None:
        self._out, self._into = os.pipe()
        self._failed = False

    def fail(self) -> None:
        self._failed = True
        os.write(self._into, b".")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._into)

    def fileno(self) -> int:
        return self._out

    def check(self) -> None:
        if self._failed:
            raise RunError("rank attention-0 died")

    def kill(self, id_: RankId) -> None: ...

    def end(self, reason: str | None) -> None: ...


Scene: TypeAlias = Callable[[ControlTarget, Controller], Awaitable[None]]
Play: TypeAlias = Callable[[Scene], Client]


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()


@pytest.fixture
def play(guard: Guard) -> Iterator[Play]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind("inproc://controller")
    client = Client(context, "inproc://controller", guard)

    def run(scene: Scene) -> Client:
        async def main() -> None:
            async with ControlTarget(client, lambda key, tokens: [key] * tokens) as target:
                await asyncio.wait_for(scene(target, Controller(socket)), 10)

        asyncio.run(main())
        return client

    yield run
    client.close()
    socket.close()
    context.term()


def test_prompts_are_answered_in_any_order_and_one_may_fail(play: Play) -> None:
    async def scene(target: ControlTarget, controller: Controller) -> None:
        tasks = [asyncio.create_task(target.first_token(key, 2)) for key in (7, 8, 9)]
        heard = [await controller.hear() for _ in tasks]
        requests = [request for each in heard for request in _requests(each)]
        assert [request.token_ids for request in requests] == [[7, 7], [8, 8], [9, 9]]
        numbers = [request.key for request in requests]
        failed = PrefillResult(numbers[1], error="it is too long")
        controller.say(Results([PrefillResult(numbers[2], 1), failed]))
        await tasks[2]
        with pytest.raises(RunError, match="a prompt of 2 tokens: it is too long"):
            await tasks[1]
        assert not tasks[0].done()
        controller.say(Results([PrefillResult(numbers[0], 1)]))
        await tasks[0]

    play(scene)


def test_what_is_given_up_is_cancelled_and_its_number_never_used_again(play: Play) -> None:
    async def scene(target: ControlTarget, controller: Controller) -> None:
        first = asyncio.create_task(target.first_token(0, 1))
        (given_up,) = _requests(await controller.hear())
        first.cancel()
        assert await controller.hear() == Cancel([given_up.key])
        second = asyncio.create_task(target.first_token(0, 1))
        (request,) = _requests(await controller.hear())
        assert request.key != given_up.key
        controller.say(Results([PrefillResult(given_up.key, 1), PrefillResult(request.key, 1)]))
        await second

    play(scene)


def test_all_that_waits_fails_when_the_instance_does(play: Play, guard: Guard) -> None:
    async def scene(target: ControlTarget, controller: Controller) -> None:
        tasks = [asyncio.create_task(target.first_token(key, 1)) for key in range(2)]
        for _ in tasks:
            await controller.hear()
        guard.fail()
        found = await asyncio.gather(*tasks, target.first_token(2, 1), return_exceptions=True)
        assert [str(each) for each in found] == ["rank attention-0 died"] * 3

    play(scene)


def test_a_trace_can_be_recorded_meanwhile(play: Play) -> None:
    report = TraceReport(1.0, 2.0, [])

    async def scene(target: ControlTarget, controller: Controller) -> None:
        target.start_trace(3.0)
        assert await controller.hear() == StartTrace(3.0)
        controller.say(report)

    assert play(scene).await_trace(10) == report


def _requests(message: Message) -> list[PrefillRequest]:
    assert isinstance(message, Submit)
    return message.requests
