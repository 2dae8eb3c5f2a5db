"""The controller: admits prompts, has the policy form batches, hands them to attention groups.

One process, one thread, one ROUTER socket for clients and ranks alike. It touches no tensor. All
decisions about what runs where and when are the policy's (engine/schedule); this module keeps the
accounts and the connections.
"""

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from engine.control.messages import (
    Agreement,
    BatchDone,
    Drain,
    Hello,
    Message,
    PrefillRequest,
    PrefillResult,
    Progress,
    RankStatus,
    Ready,
    Refused,
    Results,
    Run,
    Snapshot,
    Submit,
    Watch,
    Welcome,
    decode,
    encode,
)
from engine.schedule.policy import AsapPolicy
from engine.schedule.types import Assignment, Batch, Request
from engine.topology.ranks import RankId

log = logging.getLogger(__name__)


class ControllerSpec(msgspec.Struct, frozen=True):
    """What the controller needs to know of its instance."""

    address: str
    agreement: Agreement
    ranks: list[RankId]
    groups: int
    min_batch_tokens: int
    max_batch_tokens: int
    exclusive_tokens: int
    max_wait_s: float


_NO_PROGRESS = Progress(busy_seconds=0.0, tokens=0, work_items=0)


@dataclass(slots=True)
class _Rank:
    id: RankId
    peer: bytes = b""
    pid: int = 0
    ready: bool = False
    load_seconds: float = 0.0
    progress: Progress = _NO_PROGRESS


@dataclass(slots=True)
class _Pending:
    client: bytes
    request: PrefillRequest  # under the client's own key
    submitted: float
    started: float = 0.0


@dataclass(slots=True)
class _Counters:
    finished: int = 0
    failed: int = 0
    first_run: float | None = None
    last_done: float = 0.0


@dataclass(slots=True)
class Controller:
    """State and transitions, without the socket: messages in, (peer, message) pairs out.

    Time is an argument throughout (seconds on any monotonic clock).
    """

    spec: ControllerSpec
    policy: AsapPolicy
    outbox: deque[tuple[bytes, Message]] = field(default_factory=deque)
    _ranks: dict[RankId, _Rank] = field(default_factory=dict)
    _by_peer: dict[bytes, RankId] = field(default_factory=dict)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _batches: dict[int, tuple[int, Batch]] = field(default_factory=dict)
    _counters: _Counters = field(default_factory=_Counters)
    _next_key: int = 0

    def __post_init__(self) -> None:
        self._ranks = {id_: _Rank(id_) for id_ in self.spec.ranks}

    @property
    def ready(self) -> bool:
        return all(rank.ready for rank in self._ranks.values())

    @property
    def running(self) -> int:
        """Prompts that a group has been given and has not answered."""
        return len(self._pending) - self.policy.waiting

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Takes one message from `peer`; answers, if any, are in `outbox` afterwards."""
        match message:
            case Submit(requests):
                for request in requests:
                    self._admit(peer, request, now)
            case Drain():
                self.policy.drain()
            case Watch():
                self.outbox.append((peer, self.snapshot(now)))
            case Hello():
                self._greet(peer, message)
            case Ready(load_seconds):
                rank = self._ranks[self._by_peer[peer]]
                rank.ready, rank.load_seconds = True, load_seconds
            case Progress():
                self._ranks[self._by_peer[peer]].progress = message
            case BatchDone(batch, results):
                self._finish(batch, results, now)
            case _:
                log.warning("%s sent an unexpected %s", peer, type(message).__name__)

    def schedule(self, now: float) -> float | None:
        """Starts what the policy says; returns when to call again at the latest, None for never."""
        if not self.ready:
            return None
        for assignment in self.policy.next(now):
            self._start(assignment, now)
        return self.policy.next_deadline(now)

    def snapshot(self, now: float) -> Snapshot:
        counters = self._counters
        elapsed = 0.0
        if counters.first_run is not None:
            elapsed = (now if self.running else counters.last_done) - counters.first_run
        return Snapshot(
            ready=self.ready,
            waiting=self.policy.waiting,
            running=self.running,
            finished=counters.finished,
            failed=counters.failed,
            ranks=[_status(rank, elapsed) for rank in self._ranks.values()],
        )

    def _admit(self, peer: bytes, request: PrefillRequest, now: float) -> None:
        key, self._next_key = self._next_key, self._next_key + 1
        self._pending[key] = _Pending(peer, request, now)
        self.policy.add(Request(key, len(request.token_ids), now))

    def _greet(self, peer: bytes, hello: Hello) -> None:
        rank = self._ranks.get(hello.id)
        if rank is None:
            self.outbox.append((peer, Refused(f"{hello.id} is not part of this instance")))
            return
        difference = _difference(self.spec.agreement, hello.agreement)
        if difference:
            self.outbox.append((peer, Refused(difference)))
            return
        rank.peer, rank.pid = peer, hello.pid
        self._by_peer[peer] = hello.id
        self.outbox.append((peer, Welcome()))

    def _start(self, assignment: Assignment, now: float) -> None:
        counters = self._counters
        if counters.first_run is None:
            counters.first_run = now
        rank = self._ranks[RankId("attention", assignment.group)]
        for lane, batch in enumerate(assignment.batches):
            requests = []
            for segment in batch.segments:
                pending = self._pending[segment.key]
                pending.started = now
                requests.append(msgspec.structs.replace(pending.request, key=segment.key))
            self._batches[batch.id] = (assignment.group, batch)
            self.outbox.append((rank.peer, Run(batch, lane, requests)))

    def _finish(self, batch_id: int, results: list[PrefillResult], now: float) -> None:
        group, _ = self._batches.pop(batch_id)
        self.policy.finished(group, batch_id)
        counters = self._counters
        counters.last_done = now
        by_client: dict[bytes, list[PrefillResult]] = {}
        for result in results:
            pending = self._pending.pop(result.key)
            counters.finished += result.error is None
            counters.failed += result.error is not None
            by_client.setdefault(pending.client, []).append(
                msgspec.structs.replace(
                    result,
                    key=pending.request.key,
                    queue_s=pending.started - pending.submitted,
                    compute_s=now - pending.started,
                )
            )
        for client, mine in by_client.items():
            self.outbox.append((client, Results(mine)))


def _status(rank: _Rank, elapsed: float) -> RankStatus:
    busy = rank.progress.busy_seconds
    return RankStatus(
        id=rank.id,
        pid=rank.pid,
        ready=rank.ready,
        load_seconds=rank.load_seconds,
        busy_seconds=busy,
        busy=min(1.0, busy / elapsed) if elapsed > 0 else 0.0,
        tokens=rank.progress.tokens,
        work_items=rank.progress.work_items,
    )


def _difference(ours: Agreement, theirs: Agreement) -> str:
    """What two sides do not agree on, as one sentence; empty when they agree."""
    return "; ".join(
        f"{name} is {getattr(theirs, name)!r} here and {getattr(ours, name)!r} at the controller"
        for name in Agreement.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )


def main(payload: bytes, _fds: list[int]) -> None:
    """Runs a controller until it is killed. `payload` is a ControllerSpec in msgpack."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s controller %(message)s")
    spec = msgspec.msgpack.decode(payload, type=ControllerSpec)
    policy = AsapPolicy(
        groups=spec.groups,
        lanes=spec.agreement.lanes,
        min_batch_tokens=spec.min_batch_tokens,
        max_batch_tokens=spec.max_batch_tokens,
        exclusive_tokens=spec.exclusive_tokens,
        max_wait_s=spec.max_wait_s,
    )
    controller = Controller(spec, policy)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(spec.address)
        _serve(controller, socket)


def _milliseconds_until(deadline: float) -> int:
    """Rounded up: waking before the deadline would mean asking in vain."""
    return math.ceil(max(0.0, deadline - time.monotonic()) * 1000)


def _serve(controller: Controller, socket: zmq.Socket[bytes]) -> None:
    wake_at: float | None = None
    while True:
        socket.poll(None if wake_at is None else _milliseconds_until(wake_at))
        while socket.poll(0):
            peer, data = socket.recv_multipart()
            try:
                message = decode(data)
            except msgspec.DecodeError as error:
                log.warning("refused a message from %s: %s", peer, error)
                controller.outbox.append((peer, Refused(f"not a message: {error}")))
                continue
            controller.handle(peer, message, time.monotonic())
        wake_at = controller.schedule(time.monotonic())
        while controller.outbox:
            peer, message = controller.outbox.popleft()
            socket.send_multipart([peer, encode(message)])
