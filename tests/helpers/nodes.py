"""Launches of several nodes, each on a host of its own."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.instances import wait_for
from helpers.launched import left_behind
from helpers.netns import Host
from helpers.program import ASAPCTL, alive, environment

PORT = 29400
NODE_TIMEOUT_S = 3.0
SECRET = "the secret of a launch, of some length"

# Attention on one node, experts on the others.
TOPOLOGY = f"""
[attention]
groups = 1
[experts]
ranks = {{experts}}
[comm]
window_tokens = 64
node_timeout_s = {NODE_TIMEOUT_S:g}
connect_timeout_s = 60
[[nodes]]
attention = [0]
"""


class Node:
    """`asapctl launch` on one host, with folders of its own. What it says goes to files."""

    def __init__(self, host: Host, folder: Path, rank: int, arguments: Sequence[str]) -> None:
        self.host = host
        self.home = folder / str(rank)
        self.env = environment(self.home)
        self._out, self._err = self.home / "stdout", self.home / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = host.popen(
                [ASAPCTL, "launch", *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    @property
    def error(self) -> str:
        """What it ended with, which for a failure names the cause."""
        start = self.stderr.find("error: ")
        return self.stderr[start:] if start >= 0 else ""

    def url(self) -> str:
        """Where it serves HTTP, to those on its host; waits until it does."""
        wait_for(lambda: bool(self._out.read_text()) or self.ended, "it serves", deadline_s=60)
        words = self._out.read_text().split()
        assert words, self.stderr
        return words[1]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ends(self, within_s: float) -> int:
        """Its exit code; fails when it takes longer."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s:g} s: {self.stderr}") from None

    def listening(self) -> list[tuple[str, int]]:
        """Where anybody listens on its host: addresses and ports."""
        found: list[tuple[str, int]] = []
        with self.host.entered():  # psutil reads of the main thread's network
            for process in self.host.processes():
                with _gone_is_fine():
                    found += [
                        each.laddr
                        for each in process.net_connections("tcp")
                        if each.status == psutil.CONN_LISTEN
                    ]
        return found

    def listens(self, port: int) -> bool:
        return any(port == listening for _, listening in self.listening())

    def titled(self, title: str) -> psutil.Process:
        """One process of its host."""
        for process in self.host.processes():
            with _gone_is_fine():
                if title in process.cmdline()[0]:
                    return process
        raise AssertionError(f"nothing is titled {title} on {self.host.name}")


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except (psutil.NoSuchProcess, IndexError):
        pass


class Cluster:
    """Hosts, and what starts nodes on them. folder: short, since sockets are in it."""

    def __init__(self, hosts: Sequence[Host], folder: Path, model: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.model = model
        self.nodes: list[Node] = []
        self.secret = self.secret_file("secret", SECRET)

    def secret_file(self, name: str, secret: str) -> Path:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(secret + "\n")
        return path

    def topology(self, nnodes: int) -> Path:
        path = self.folder / f"of-{nnodes}.toml"
        text = TOPOLOGY.format(experts=nnodes - 1)
        path.write_text(text + "".join(f"[[nodes]]\nexperts = [{n}]\n" for n in range(nnodes - 1)))
        return path

    def start(
        self,
        rank: int,
        nnodes: int,
        *more: str,
        secret: Path | None = None,
        model: Path | None = None,
        address: str | None = None,
        folder: str = "",
    ) -> Node:
        """Starts node `rank` of `nnodes`. address: node 0's; IPv4 by default."""
        (self.folder / folder).mkdir(exist_ok=True)
        arguments = [
            *(str(self.topology(nnodes)), "--model", str(model or self.model), "--port", "0"),
            *("--nnodes", str(nnodes), "--node-rank", str(rank)),
            *("--rdzv-endpoint", f"{address or self.hosts[0].address}:{PORT}"),
            *("--secret-file", str(secret or self.secret), *more),
        ]
        node = Node(self.hosts[rank], self.folder / folder, rank, arguments)
        self.nodes.append(node)
        return node

    def start_all(self, nnodes: int, *more: str, address: str | None = None) -> list[Node]:
        """All nodes, node 0 last; returned in order of their ranks."""
        ranks = [*range(1, nnodes), 0]
        started = {rank: self.start(rank, nnodes, *more, address=address) for rank in ranks}
        return [started[rank] for rank in range(nnodes)]

    def assert_nothing_left(self, within_s: float = 10.0) -> None:
        """No process on any host, and no socket."""
        wait_for(lambda: not self._running(), "every process of every node ended", within_s)
        for node in self.nodes:
            assert left_behind(node.home) == []

    def _running(self) -> list[psutil.Process]:
        return [process for host in self.hosts for process in host.processes() if alive(process)]

    def close(self) -> None:
        """Ends what still runs, without a word."""
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        for host in self.hosts:
            host.heal()
            for process in host.processes():
                with _gone_is_fine():
                    process.send_signal(signal.SIGKILL)


def ask(url: str, ids: Sequence[int], timeout_s: float = 30.0, **parameters: Any) -> dict[str, Any]:
    """A completion of one token, from a thread that is on the server's host. What differs from
    one answer to the same prompt to another is left out. Raises OSError.
    """
    body = {"prompt": list(ids), "max_tokens": 1, **parameters}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
    return {"choices": answer["choices"], "usage": answer["usage"]}


def assert_same(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """The same JSON, numbers with a fraction within `tolerance`."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right, tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=tolerance)
    else:
        assert one == other
