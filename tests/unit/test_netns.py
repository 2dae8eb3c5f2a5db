"""The hosts that tests of several nodes run on."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.instances import wait_for
from helpers.netns import Host, hosts, remove_leftovers
from helpers.program import alive

_LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], 4000), family=family)
print("listening", flush=True)
while True:
    server.accept()[0].sendall(b"hello")
"""
_CONNECT = """
import socket, sys
print(socket.create_connection((sys.argv[1], 4000), timeout=0.5).recv(9).decode())
"""


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def listen(host: Host, address: str) -> "subprocess.Popen[str]":
    server = host.popen([sys.executable, "-c", _LISTEN, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    return server


def heard(host: Host, address: str) -> str:
    asked = host.popen(
        [sys.executable, "-c", _CONNECT, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return str(asked.communicate(timeout=20)[0]).strip()


def test_hosts_reach_each_other_and_nobody_elses_loopback(pair: list[Host]) -> None:
    near, far = pair
    servers = [listen(far, "127.0.0.1")]
    assert heard(far, "127.0.0.1") == "hello"
    assert heard(near, "127.0.0.1") == ""
    servers += [listen(far, address) for address in (far.address, far.address6) if address]
    assert heard(near, far.address) == "hello"
    if far.address6 is not None:
        assert heard(near, far.address6) == "hello"

    here = Path(f"/proc/{os.getppid()}/ns/net")
    with near.entered(), socket.create_connection((far.address, 4000), 5) as connection:
        assert connection.recv(9) == b"hello"
        assert not here.samefile("/proc/thread-self/ns/net")
    assert here.samefile("/proc/thread-self/ns/net")

    far.cut()
    assert heard(near, far.address) == ""
    far.heal()
    wait_for(lambda: heard(near, far.address) == "hello", "they are connected again")
    assert {process.pid for process in far.processes()} == {server.pid for server in servers}
    for server in servers:
        server.kill()
        server.communicate()


def test_what_a_killed_test_leaves_goes_at_the_next_start(pair: list[Host]) -> None:
    near, _ = pair
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    left = f"asapctl-{child}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    sleeper = subprocess.Popen(["nsenter", f"--net=/run/netns/{left}", "sleep", "600"])
    wait_for(lambda: Path(f"/proc/{sleeper.pid}/exe").resolve().name != "nsenter", "it runs")
    own = near.popen(["sleep", "600"])
    remove_leftovers()
    assert sleeper.wait(10) == -9
    assert not Path(f"/run/netns/{left}").exists()
    assert own.poll() is None
    own.kill()
    own.wait()


def test_nothing_runs_or_remains_afterwards() -> None:
    with hosts(1) as (host,):
        sleeper = host.popen(["sleep", "600"])
        wait_for(lambda: len(host.processes()) == 1, "it runs there")
        (process,) = host.processes()
    assert sleeper.wait(10) == -9
    assert not alive(process)
    assert not list(Path("/run/netns").glob(f"asapctl-{os.getpid()}-*"))
