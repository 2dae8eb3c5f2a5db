import os
import socket
from collections.abc import Callable

import pytest

from engine.errors import UsageError
from engine.launch.listen import api_key, host_problem, open_listener, url_of
from engine.topology.load import load_topology
from engine.topology.schema import Topology


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASAPCTL_API_KEY", raising=False)


def serve(*overrides: str) -> Topology:
    return load_topology("cpu", ["serve.port=0", *(f"serve.{o}" for o in overrides)])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "[127.0.0.1]"])
def test_loopback_needs_no_key(host: str) -> None:
    with open_listener(serve(f"host={host}")) as listener:
        url = url_of(listener)
        address = listener.getsockname()
        assert url == f"http://{address[0]}:{address[1]}"
        with socket.create_connection(address):
            pass


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host: str) -> None:
    topology = serve(f"host={host}")
    assert host_problem(topology) is None
    try:
        listener = open_listener(topology)
    except UsageError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_loopback_a_key_is_needed(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as error:
        open_listener(serve(f"host={host}"))
    assert str(error.value) == (
        f"--set serve.host: others can reach {host}, so an API key is needed; set ASAPCTL_API_KEY "
        "or [serve] api_key, or serve on 127.0.0.1"
    )
    assert host_problem(serve(f"host={host}", "api_key=abc")) is None
    monkeypatch.setenv("ASAPCTL_API_KEY", "")
    assert host_problem(serve(f"host={host}")) is not None
    monkeypatch.setenv("ASAPCTL_API_KEY", "from the environment")
    assert host_problem(serve(f"host={host}")) is None
    assert api_key(serve("api_key=abc")) == "from the environment"


def test_every_address_is_reached_by_loopback() -> None:
    with open_listener(serve("host=0.0.0.0", "api_key=k")) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_refused_with_the_remedy() -> None:
    with open_listener(serve()) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError) as error:
            open_listener(serve(f"port={port}"))
        assert str(error.value) == (
            f"--set serve.port: cannot serve on 127.0.0.1 port {port}: {os.strerror(98)}; "
            "choose another with --port (0: any that is free)"
        )


def test_a_port_is_free_again_at_once() -> None:
    with open_listener(serve()) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.close()  # the server closes first, so its side of the connection lingers
        client.close()
    open_listener(serve(f"port={port}")).close()


def test_a_name_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> Callable[..., object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    problem = host_problem(serve("host=nowhere.invalid"))
    assert problem is not None
    assert "cannot resolve nowhere.invalid" in problem
