"""One `asapctl launch` put together: checks, the port, the plan, the instance, and its life."""

import socket
import time
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from engine.control.client import Client
from engine.control.messages import Snapshot
from engine.errors import RunError
from engine.launch.checks import Problems, plan_of
from engine.launch.listen import api_key, open_listener, url_of
from engine.launch.registry import DEFAULT_NAME, check_free
from engine.launch.runtime_folder import base_folder
from engine.topology.load import DEFAULT_TOPOLOGY
from engine.topology.schema import Topology

if TYPE_CHECKING:
    from engine.launch.plan import Plan

_LOOK_S = 0.5
_POLL_S = 0.05
_HTTP_START_S = 60.0


class Options(msgspec.Struct, frozen=True):
    """What the user asked for."""

    topology: str = DEFAULT_TOPOLOGY
    model: str | None = None
    overrides: tuple[str, ...] = ()
    name: str = DEFAULT_NAME


class Watcher(Protocol):
    """Whoever shows the instance to the user."""

    def note(self, text: str) -> None: ...

    def loading(self, snapshot: Snapshot) -> None: ...

    def ready(self, name: str, url: str, logs: Path) -> None:
        """It serves at `url`."""

    def alive(self, snapshot: Snapshot) -> None:
        """How it stands, about twice a second."""

    def failed(self, error: Exception) -> None:
        """A process of it failed; called before its logs are put away."""


def run_launch(options: Options, watcher: Watcher) -> None:
    """Runs an instance until it is told to quit. Raises UsageError before anything is started,
    RunError when a process of it failed.
    """
    with ExitStack() as stack:
        plan, listener = _prepare(options, watcher, stack)

        from engine.launch.instance import start_instance
        from engine.serve.spec import http_spec

        for note in plan.notes:
            watcher.note(note)
        host, port = listener.getsockname()[:2]
        spec = http_spec(plan, host=host, port=port, api_key=api_key(plan.topology))
        client = stack.enter_context(
            start_instance(
                plan,
                watcher.loading,
                name=options.name,
                command="launch",
                http=spec,
                listener=listener,
            )
        )
        try:
            url = url_of(listener)
            _await_http(client, url)
            watcher.ready(options.name, url, base_folder() / options.name / "logs")
            _live(client, watcher)
        except RunError as error:
            watcher.failed(error)
            raise


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
        plan = plan_of(
            options.topology,
            options.overrides,
            options.model,
            keep_kv=lambda topology: topology.serve.kv_dir is not None,
            on_topology=listen,
            on_note=watcher.note,
        )
    problems.raise_all()
    assert plan is not None
    return plan, listeners[0]


def _await_http(client: Client, url: str) -> None:
    """Returns when the HTTP process says that the instance is ready."""
    deadline = time.monotonic() + _HTTP_START_S
    while not _says_ready(url):
        client.receive(_POLL_S)  # raises when a process failed meanwhile
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


def _live(client: Client, watcher: Watcher) -> None:
    """Until the controller says that all is done."""
    while not client.ended:
        client.request_snapshot()
        client.receive(_LOOK_S)
        snapshot = client.snapshot()
        if snapshot is not None:
            watcher.alive(snapshot)
