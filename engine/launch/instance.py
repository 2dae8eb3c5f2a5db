"""A running instance: from a Plan to processes and a client of their controller."""

import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import msgspec
import zmq

from engine.control.client import Client
from engine.control.controller import ControllerSpec
from engine.control.messages import ClientGone, Snapshot, Supervise
from engine.echo import encodable
from engine.errors import RunError
from engine.launch.listen import url_of
from engine.launch.plan import Plan
from engine.launch.ranks import Ranks
from engine.launch.registry import InstanceRecord, write_record
from engine.launch.supervisor import Exit, Supervisor
from engine.serve.spec import HttpSpec

OnProgress = Callable[[Snapshot], None]

_POLL_S = 0.1
# Over the others a communicator whose other end died cannot be relied on to let go.
RECOVERING = ("shm", "gloo")
# An HTTP process that dies more often than this within a minute will not serve.
_MOST_HTTP_DEATHS = 5
_MINUTE_S = 60.0
_HTTP_END_S = 10.0

_names = itertools.count()


class Instance:
    """Decides what happens when one of the processes ends; the guard of the supervisor's client.

    A rank is started again once the instance has been ready; the HTTP process always is. The end
    of any other process is the end of the instance.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        http: HttpSpec | None,
        listener: socket.socket | None,
    ) -> None:
        self.address = f"ipc://{supervisor.folder}/control"
        self.ranks = Ranks(plan, supervisor, self.address)
        self.ready = False
        self._plan = plan
        self._supervisor = supervisor
        self._http = http
        self._listener = listener
        self._http_deaths: list[float] = []
        self._client: Client | None = None
        supervisor.on_exit = self._on_exit

    def start(self, client: Client) -> None:
        """Starts every process. `client` is told of deaths from now on."""
        self._client = client
        schedule = self._plan.topology.schedule
        controller = ControllerSpec(
            address=self.address,
            agreement=self.ranks.agreement,
            ranks=self.ranks.ids,
            groups=self._plan.groups,
            min_batch_tokens=schedule.min_batch_tokens,
            max_batch_tokens=schedule.max_batch_tokens,
            exclusive_tokens=schedule.exclusive_tokens,
            max_wait_s=schedule.max_wait_ms / 1000,
            stall_timeout_s=schedule.stall_timeout_s,
            ttft_slo_s=schedule.ttft_slo_s,
            tensor_parallel=self._plan.tensor_parallel,
        )
        self._supervisor.spawn(
            "engine.control.service:main", "controller", msgspec.msgpack.encode(controller)
        )
        client.send(Supervise())
        self.ranks.start()
        self._start_http()

    def fileno(self) -> int:
        return self._supervisor.fileno()

    def check(self) -> None:
        self._supervisor.check()

    def kill(self, title: str) -> None:
        self._supervisor.kill(title)

    def end(self, reason: str | None) -> None:
        """The controller says that the instance is over. Raises RunError if it failed."""
        if reason is not None:
            self._supervisor.fail(RunError(reason))

    def finish_http(self) -> None:
        """Lets the HTTP process send the answers that it has, and end."""
        self._http = None  # it is not started again
        self._supervisor.kill("http", signal.SIGTERM)
        deadline = time.monotonic() + _HTTP_END_S
        while self._supervisor.runs("http") and (left := deadline - time.monotonic()) > 0:
            select.select([self._supervisor], [], [], left)
            self._supervisor.check()

    def _on_exit(self, exit_: Exit) -> None:
        if exit_.title == "http":
            now = time.monotonic()
            self._http_deaths = [t for t in self._http_deaths if t > now - _MINUTE_S] + [now]
            if len(self._http_deaths) > _MOST_HTTP_DEATHS or not self.ready:
                raise RunError(exit_.reason)
            if self._client is not None:
                self._client.send(ClientGone(f"http-{exit_.pid}".encode()))
            self._start_http()
        elif exit_.title == "controller" or not self.ready or self._client is None:
            raise RunError(exit_.reason)
        elif self._plan.transport not in RECOVERING:
            raise RunError(
                f"{exit_.reason}\nover {self._plan.transport} a rank cannot be started again by "
                "itself: start the instance again"
            )
        else:
            self._client.send(self.ranks.restart(exit_))

    def _start_http(self) -> None:
        if self._http is not None and self._listener is not None:
            spec = msgspec.structs.replace(
                self._http, controller=self.address, instance=self._supervisor.name
            )
            fds = [self._listener.fileno()]
            self._supervisor.spawn(
                "engine.serve.http:main", "http", msgspec.msgpack.encode(spec), fds
            )


@contextmanager
def start_instance(
    plan: Plan,
    on_progress: OnProgress | None = None,
    *,
    name: str | None = None,
    command: Literal["launch", "prefill"] = "prefill",
    http: HttpSpec | None = None,
    listener: socket.socket | None = None,
) -> Iterator[Client]:
    """Starts every process of `plan`, waits until all are ready, and yields a client.

    on_progress is called several times a second while ranks load. http, listener: what to serve,
    and the socket to serve it on. Leaving the context ends every process. RunError, in here or from
    the client: the instance failed, and why.
    """
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor(name or _own_name()))
        instance = Instance(plan, supervisor, http, listener)
        stack.callback(instance.ranks.close)
        record = InstanceRecord(
            name=supervisor.name,
            pid=os.getpid(),
            command=command,
            model=str(plan.model_dir),
            topology=encodable(plan.topology.source),
            started=time.time(),
            controller=instance.address,
            url=None if listener is None else url_of(listener),
        )
        write_record(supervisor.folder, record)
        context = stack.enter_context(zmq.Context())
        client = Client(context, instance.address, instance)
        stack.callback(client.close)
        instance.start(client)
        while True:
            snapshot = client.fresh_snapshot(timeout_s=5.0)
            if snapshot is not None and on_progress is not None:
                on_progress(snapshot)
            if snapshot is not None and snapshot.ready:
                break
            client.receive(_POLL_S)
        instance.ready = True
        write_record(supervisor.folder, msgspec.structs.replace(record, state="ready"))
        yield client
        if client.ended:
            instance.finish_http()


def _own_name() -> str:
    """A name for an instance that nobody named: one a process may have several."""
    number = next(_names)
    return f"prefill-{os.getpid()}" + (f"-{number}" if number else "")
