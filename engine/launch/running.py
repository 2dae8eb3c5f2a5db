"""A running launch: from a Plan to the processes of its instances, and clients of their
controllers.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import msgspec
import zmq

from engine.comm.packets import packet_pair, send_packet
from engine.control.client import Client
from engine.control.messages import ClientGone, Snapshot
from engine.curve import Keys
from engine.echo import encodable
from engine.errors import RunError
from engine.launch.cluster import Cluster
from engine.launch.host import Host, LocalHost
from engine.launch.instance import Instance
from engine.launch.listen import url_of
from engine.launch.nodes import NodeOptions
from engine.launch.orders import Death
from engine.launch.plan import Plan
from engine.launch.registry import InstanceRecord, write_record
from engine.launch.supervisor import Exit, Supervisor
from engine.serve import notices
from engine.serve.spec import HttpSpec
from engine.topology.ranks import RankId

log = logging.getLogger(__name__)

OnProgress = Callable[[Sequence[Snapshot]], None]

_POLL_S = 0.1
# An HTTP process that dies more often than this within a minute will not serve.
_MOST_HTTP_DEATHS = 5
_MINUTE_S = 60.0
_HTTP_END_S = 10.0

_names = itertools.count()


class Launch:
    """The instances, and the HTTP process in front of them; decides what happens when one of the
    processes ends.

    The HTTP process is always started again. An instance that is lost leaves its work to the
    others; without others, it is the end. on_loss is told of it.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        keys: Keys | None = None,
        http: HttpSpec | None = None,
        listener: socket.socket | None = None,
        on_loss: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.supervisor = supervisor
        self.here = LocalHost(plan, supervisor)
        self.cluster: Cluster | None = None
        self._plan = plan
        self._http = http
        self._listener = listener
        self._on_loss = on_loss
        self._http_deaths: list[float] = []
        self._http_link: socket.socket | None = None
        self._sources = select.epoll()
        self._sources.register(supervisor.fileno(), select.EPOLLIN)
        self.instances = [
            Instance(index, plan, supervisor, self, keys) for index in range(plan.instances)
        ]
        supervisor.on_exit = self._on_exit

    @property
    def living(self) -> list[Instance]:
        return [instance for instance in self.instances if not instance.lost]

    @property
    def clients(self) -> list[Client]:
        """Of the instances that are not lost."""
        return [each.client for each in self.living if each.client is not None]

    @property
    def ended(self) -> bool:
        """All instances have done what they were asked to before they were told to quit."""
        return all(client.ended for client in self.clients)

    def join(self, cluster: Cluster) -> None:
        """From now on ranks may be on other nodes."""
        self.cluster = cluster
        cluster.on_death = self._died
        self._sources.register(cluster.fileno(), select.EPOLLIN)

    def host_of(self, instance: int, id_: RankId) -> Host:
        return self.here if self.cluster is None else self.cluster.host_of(instance, id_)

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        for instance in self.instances:
            instance.start(Client(context, instance.address, instance))
        self._start_http()

    def fileno(self) -> int:
        """Readable when `check` has something to do."""
        return self._sources.fileno()

    def check(self) -> None:
        """Looks after all processes. Raises RunError once the launch has failed."""
        self.supervisor.check()
        if self.cluster is not None:
            try:
                self.cluster.check()
            except RunError as error:
                self.supervisor.fail(error)

    def lose(self, instance: Instance, reason: str) -> None:
        """An instance cannot go on. Raises RunError when there is no other."""
        others = [other for other in self.living if other is not instance]
        if not others or not all(other.ready for other in others):
            self.supervisor.fail(RunError(reason))
        if instance.lost:
            return
        instance.lost = True
        self._on_loss(f"instance {instance.index} is lost, and its work goes to others: {reason}")
        instance.end_processes()
        self._tell_http(notices.InstanceLost(instance.index))

    def finish_http(self) -> None:
        """Lets the HTTP process send the answers that it has, and end."""
        self._http = None  # it is not started again
        self.supervisor.kill("http", signal.SIGTERM)
        deadline = time.monotonic() + _HTTP_END_S
        while self.supervisor.runs("http") and (left := deadline - time.monotonic()) > 0:
            select.select([self.supervisor], [], [], left)
            self.supervisor.check()

    def disconnect(self) -> None:
        """Closes all clients; to be called before their context ends."""
        for instance in self.instances:
            if instance.client is not None:
                instance.client.close()

    def close(self) -> None:
        for instance in self.instances:
            instance.close()
        self.here.close()
        self._sources.close()
        if self._http_link is not None:
            self._http_link.close()

    def _on_exit(self, exit_: Exit) -> None:
        if exit_.title == "http":
            self._http_died(exit_)
            return
        death = self.here.death(exit_)
        if death is not None:
            self._died(death)
            return
        for instance in self.instances:
            if instance.controller == exit_.title and not instance.lost:
                self.lose(instance, exit_.reason)

    def _died(self, death: Death) -> None:
        instance = self.instances[death.instance]
        if instance.lost:
            return
        try:
            instance.died(death)
        except RunError as error:
            self.lose(instance, str(error))

    def _http_died(self, exit_: Exit) -> None:
        now = time.monotonic()
        self._http_deaths = [t for t in self._http_deaths if t > now - _MINUTE_S] + [now]
        ready = all(instance.ready for instance in self.living)
        if len(self._http_deaths) > _MOST_HTTP_DEATHS or not ready:
            raise RunError(exit_.reason)
        for client in self.clients:
            client.send(ClientGone(f"http-{exit_.pid}".encode()))
        self._start_http()

    def _start_http(self) -> None:
        if self._http is None or self._listener is None:
            return
        spec = msgspec.structs.replace(
            self._http,
            controllers=[instance.address for instance in self.instances],
            instance=self.supervisor.name,
        )
        if self._http_link is not None:
            self._http_link.close()
        self._http_link, theirs = packet_pair()
        self._http_link.setblocking(False)
        with theirs:
            fds = [self._listener.fileno(), theirs.fileno()]
            payload = msgspec.msgpack.encode(spec)
            self.supervisor.spawn("engine.serve.http:main", "http", payload, fds)
        for instance in self.instances:
            if instance.lost:
                self._tell_http(notices.InstanceLost(instance.index))

    def _tell_http(self, notice: notices.Notice) -> None:
        if self._http_link is not None:
            try:
                send_packet(self._http_link, notices.encode(notice))
            except OSError as error:  # it is dead, and its next life will be told
                log.info("the HTTP process was not told: %s", error)


@contextmanager
def start_launch(
    plan: Plan,
    on_progress: OnProgress | None = None,
    *,
    name: str | None = None,
    command: Literal["launch", "prefill"] = "prefill",
    http: HttpSpec | None = None,
    listener: socket.socket | None = None,
    nodes: NodeOptions | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Iterator[Launch]:
    """Starts every process of `plan`, waits until all are ready, and yields the launch.

    on_progress is called several times a second while ranks load, with how each instance stands.
    http, listener: what to serve,
    and the socket to serve it on. nodes: where the others are to come, with several. Leaving the
    context ends every process. RunError, in here or from a client: the launch failed, and why.
    """
    with ExitStack() as stack:
        keys = Keys.of(nodes.secret) if nodes is not None and nodes.nnodes > 1 else None
        supervisor = stack.enter_context(Supervisor(name or own_name()))
        launch = Launch(plan, supervisor, keys, http, listener, on_note)
        stack.callback(launch.close)
        record = InstanceRecord(
            name=supervisor.name,
            pid=os.getpid(),
            command=command,
            model=str(plan.model_dir),
            topology=encodable(plan.topology.source),
            started=time.time(),
            controller=launch.instances[0].address,
            controllers=[instance.address for instance in launch.instances],
            url=None if listener is None else url_of(listener),
            paced=plan.paced,
        )
        write_record(supervisor.folder, record)
        if nodes is not None and keys is not None:
            cluster = stack.enter_context(Cluster(plan, nodes, keys, launch.here, on_note))
            launch.join(cluster)
            _gather(cluster, supervisor, on_note)
        context = stack.enter_context(zmq.Context())
        stack.callback(launch.disconnect)
        launch.start(context)
        _await_ready(launch, on_progress)
        write_record(supervisor.folder, msgspec.structs.replace(record, state="ready"))
        yield launch
        if launch.ended:
            launch.finish_http()


@contextmanager
def start_instance(
    plan: Plan,
    on_progress: Callable[[Snapshot], None] | None = None,
    *,
    name: str | None = None,
    http: HttpSpec | None = None,
    listener: socket.socket | None = None,
) -> Iterator[Client]:
    """As start_launch, for the client of the only instance."""

    def progress(snapshots: Sequence[Snapshot]) -> None:
        if on_progress is not None:
            on_progress(snapshots[0])

    with start_launch(plan, progress, name=name, http=http, listener=listener) as launch:
        (client,) = launch.clients
        yield client


def _gather(cluster: Cluster, supervisor: Supervisor, on_note: Callable[[str], None]) -> None:
    said: list[int] = []

    def say(missing: list[int]) -> None:
        nonlocal said
        if missing != said:
            said = missing
            noun = "node" if len(missing) == 1 else "nodes"
            on_note(f"waiting for {noun} {', '.join(map(str, missing))}")

    try:
        cluster.gather(say, supervisor.check)
    except RunError as error:
        supervisor.fail(error)


def _await_ready(launch: Launch, on_progress: OnProgress | None) -> None:
    while not all(instance.ready for instance in launch.instances):
        snapshots = []
        for instance in launch.instances:
            assert instance.client is not None
            snapshot = instance.client.fresh_snapshot(timeout_s=5.0)
            if snapshot is not None:
                snapshots.append(snapshot)
                instance.ready = snapshot.ready
        if on_progress is not None and len(snapshots) == len(launch.instances):
            on_progress(snapshots)
        if all(snapshot.ready for snapshot in snapshots):
            continue
        launch.clients[0].receive(_POLL_S)


def own_name() -> str:
    """A name for an instance that nobody named: one a process may have several."""
    number = next(_names)
    return f"prefill-{os.getpid()}" + (f"-{number}" if number else "")
