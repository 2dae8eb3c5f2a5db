"""One `asapctl launch` put together: checks, the port, the plan, the instance, and its life."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from engine.control.messages import Snapshot
from engine.control.summary import together
from engine.echo import encodable
from engine.errors import RunError
from engine.launch.checks import Problems, plan_of
from engine.launch.endpoint import endpoint
from engine.launch.listen import api_key, open_listener, url_of
from engine.launch.nodes import NodeOptions, own_address
from engine.launch.registry import DEFAULT_NAME, InstanceRecord, check_free, write_record
from engine.launch.runtime_folder import base_folder
from engine.topology.load import DEFAULT_TOPOLOGY
from engine.topology.schema import Topology

if TYPE_CHECKING:
    from engine.launch.plan import Plan
    from engine.launch.running import Launch

_LOOK_S = 0.5
_POLL_S = 0.05
_HTTP_START_S = 60.0


class Options(msgspec.Struct, frozen=True):
    """What the user asked for."""

    topology: str = DEFAULT_TOPOLOGY
    model: str | None = None
    overrides: tuple[str, ...] = ()
    name: str = DEFAULT_NAME
    nodes: NodeOptions = NodeOptions()


class Watcher(Protocol):
    """Whoever shows the instance to the user."""

    def note(self, text: str) -> None: ...

    def loading(self, snapshots: Sequence[Snapshot]) -> None: ...

    def ready(self, name: str, url: str, logs: Path) -> None:
        """It serves at `url`."""

    def joined(self, name: str, where: str, logs: Path) -> None:
        """This node is a part of the launch of node 0, which is at `where`."""

    def alive(self, snapshot: Snapshot) -> None:
        """How it stands, about twice a second."""

    def failed(self, error: Exception) -> None:
        """A process of it failed; called before its logs are put away."""


def run_launch(options: Options, watcher: Watcher) -> None:
    """Runs a launch until it is told to quit, or on another node than node 0 its part of it. Raises
    UsageError before anything is started, RunError when a process of it failed.
    """
    if options.nodes.node_rank > 0:
        _run_agent(options, watcher)
        return
    with ExitStack() as stack:
        plan, listener = _prepare(options, watcher, stack)

        from engine.launch.running import start_launch
        from engine.serve.spec import http_spec

        for note in plan.notes:
            watcher.note(note)
        host, port = listener.getsockname()[:2]
        spec = http_spec(plan, host=host, port=port, api_key=api_key(plan.topology))
        launch = stack.enter_context(
            start_launch(
                plan,
                watcher.loading,
                name=options.name,
                command="launch",
                http=spec,
                listener=listener,
                nodes=options.nodes,
                on_note=watcher.note,
            )
        )
        try:
            url = url_of(listener)
            _await_http(launch, url)
            watcher.ready(options.name, url, base_folder() / options.name / "logs")
            _live(launch, watcher)
        except RunError as error:
            watcher.failed(error)
            raise


def _run_agent(options: Options, watcher: Watcher) -> None:
    nodes = options.nodes
    name = f"{options.name}-node{nodes.node_rank}"
    problems = Problems()
    plan = None
    with problems.gathered():
        check_free(name)
    with problems.gathered():
        plan = _plan(options, watcher)
    problems.raise_all()
    assert plan is not None
    for note in plan.notes:
        watcher.note(note)

    from engine.curve import Keys
    from engine.launch.agent import joined
    from engine.launch.supervisor import Supervisor

    where = f"node 0 ({endpoint(nodes.host, nodes.port)})"
    with Supervisor(name) as supervisor:
        record = InstanceRecord(
            name=name,
            pid=os.getpid(),
            command="node",
            model=str(plan.model_dir),
            topology=encodable(plan.topology.source),
            started=time.time(),
            controller="",
            launch=where,
            paced=plan.paced,
        )
        write_record(supervisor.folder, record)
        watcher.note(f"node {nodes.node_rank}: looking for {where}")
        with joined(plan, nodes, Keys.of(nodes.secret), supervisor) as agent:
            write_record(supervisor.folder, msgspec.structs.replace(record, state="ready"))
            watcher.joined(name, where, base_folder() / name / "logs")
            try:
                agent.serve()
            except RunError as error:
                supervisor.fail(error)  # the logs of its ranks will be kept
    watcher.note(f"node {nodes.node_rank}: {where} ended the launch")


def _plan(
    options: Options,
    watcher: Watcher,
    on_topology: Callable[[Topology], None] = lambda topology: None,
) -> "Plan":
    from engine.launch.resources import NodeView

    nodes = options.nodes
    view = NodeView()
    if nodes.nnodes > 1:
        address = own_address(nodes.host, nodes.port)
        view = NodeView(nodes.nnodes, nodes.node_rank, address)
    return plan_of(
        options.topology,
        options.overrides,
        options.model,
        keep_kv=lambda topology: topology.serve.kv_dir is not None,
        on_topology=on_topology,
        on_note=watcher.note,
        node=view,
    )


def _prepare(options: Options, watcher: Watcher, stack: ExitStack) -> tuple["Plan", socket.socket]:
    """The plan, and the socket to serve on, bound before anything is started.

    Raises UsageError with every problem at once.
    """
    problems = Problems()
    listeners = []

    def listen(topology: Topology) -> None:
        listeners.append(stack.enter_context(open_listener(topology)))

    plan = None
    with problems.gathered():
        check_free(options.name)
    with problems.gathered():
        plan = _plan(options, watcher, listen)
    problems.raise_all()
    assert plan is not None
    return plan, listeners[0]


def _await_http(launch: "Launch", url: str) -> None:
    """Returns when the HTTP process says that the instance is ready."""
    deadline = time.monotonic() + _HTTP_START_S
    while not _says_ready(url):
        launch.clients[0].receive(_POLL_S)  # raises when a process failed meanwhile
        if time.monotonic() > deadline:
            raise RunError(f"{url}/ready has not answered within {_HTTP_START_S:g} s")


def _says_ready(url: str) -> bool:
    address = urlsplit(url)
    assert address.hostname is not None
    with (
        closing(HTTPConnection(address.hostname, address.port, timeout=1.0)) as connection,
        suppress(OSError, HTTPException),
    ):
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    return False


def _live(launch: "Launch", watcher: Watcher) -> None:
    """Until the controllers say that all is done."""
    while not launch.ended:
        clients = launch.clients
        for client in clients:
            client.request_snapshot()
        for client in clients:
            client.receive(_LOOK_S / len(clients))
        snapshots = [client.snapshot() for client in launch.clients]
        known = [snapshot for snapshot in snapshots if snapshot is not None]
        if known:
            watcher.alive(together(known))
