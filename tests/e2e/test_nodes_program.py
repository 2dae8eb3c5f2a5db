"""`asapctl launch` over several nodes and with several instances, on hosts in this machine."""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from engine.control.client import Client
from engine.control.messages import Snapshot
from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import wait_for
from helpers.launched import instances, launched, private_home
from helpers.netns import Host, hosts
from helpers.nodes import PORT, Cluster, Node, ask, assert_same
from helpers.program import run

FAMILY = "qwen3_moe"
NOTICED_S = 25.0  # node_timeout_s, and the end of processes on a busy machine
PROMPTS = [token_ids(length) for length in (1, 3, 70, 200)]
LOGPROBS = {"logprobs": 3, "prompt_logprobs": 2}


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoint(FAMILY)


@contextmanager
def cluster_on(machines: Sequence[Host], model: Path) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        made = Cluster(machines, Path(folder), model)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def cluster(machines: list[Host], model: Path) -> Iterator[Cluster]:
    with cluster_on(machines, model) as made:
        yield made


Running = tuple[Cluster, list[Node], str]


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    """A launch on three nodes that several tests use, none of which ends it. On other hosts than
    theirs, since it outlives them. Node 2 is there before node 0, and node 1 comes after.
    """
    with hosts(3) as machines, cluster_on(machines, model) as made:
        last = made.start(2, 3)
        first = made.start(0, 3)
        wait_for(lambda: first.ended or first.listens(PORT), "node 0 can be found", deadline_s=60)
        nodes = [first, made.start(1, 3), last]
        yield made, nodes, nodes[0].url()


@pytest.fixture(scope="module")
def of_one_host(model: Path) -> list[Any]:
    """What an instance without any network answers to PROMPTS."""
    more = ("--set", "experts.ranks=2", "--set", "comm.window_tokens=64")
    with private_home() as home, launched(home, model, *more) as (_, url):
        return [ask(url, prompt, **LOGPROBS) for prompt in PROMPTS]


def test_three_nodes_answer_as_one_host_does(running: Running, of_one_host: list[Any]) -> None:
    _, nodes, url = running
    with nodes[0].host.entered():
        answers = [ask(url, prompt, **LOGPROBS) for prompt in PROMPTS]
    assert_same(answers, of_one_host)
    for node, titles in zip(nodes, ("attention 0", "expert 0", "expert 1"), strict=True):
        assert node.titled(f"asapctl: {titles}")


def test_nothing_listens_beyond_what_was_said(running: Running) -> None:
    """HTTP is on loopback; all else on the node's address in the network of the nodes."""
    _, nodes, _ = running
    for node in nodes:
        listening = node.listening()
        assert listening
        for address, port in listening:
            allowed = ["127.0.0.1"] if port == int(nodes[0].url().rpartition(":")[2]) else []
            allowed += [node.host.address, f"::ffff:{node.host.address}", node.host.address6]
            assert address in allowed


def test_a_rank_that_is_killed_on_another_node_comes_back_and_no_request_is_lost(
    running: Running, of_one_host: list[Any]
) -> None:
    _, nodes, url = running
    expert = nodes[1].titled("asapctl: expert 0")
    expert.suspend()  # so that requests are under way when it dies
    with nodes[0].host.entered(), asked(lambda n: ask(url, PROMPTS[n % 4], **LOGPROBS)) as answers:
        wait_for(lambda: unfinished(controllers(nodes[0].home)[0]) == len(answers), "all run")
        expert.kill()
        for number, answer in enumerate(answers):
            assert_same(answer.result(60), of_one_host[number % 4])
    assert nodes[1].titled("asapctl: expert 0").pid != expert.pid
    assert not any(node.ended for node in nodes)


def test_a_second_launch_on_the_same_port_is_refused(running: Running) -> None:
    cluster, nodes, _ = running
    second = cluster.start(0, 3, "--name", "second", folder="second")
    assert second.ends(30) != 0
    assert str(PORT) in second.error
    assert "in use" in second.error
    assert not any(node.ended for node in nodes)


def test_a_stranger_is_refused_and_named(running: Running) -> None:
    """It is on a host of the launch, and calls itself a node; the launch goes on."""
    cluster, nodes, url = running
    wrong = cluster.secret_file("wrong", "another secret of the same length!")
    stranger = cluster.start(2, 3, secret=wrong, folder="stranger")
    assert stranger.ends(30) == 1
    assert "secret" in stranger.error
    address = nodes[2].host.address
    wait_for(lambda: f"refused a connection from {address}" in nodes[0].stderr, "it is said")
    with nodes[0].host.entered():
        assert ask(url, PROMPTS[1])
    for node in (*nodes, stranger):
        assert "another secret" not in node.stderr


@pytest.mark.parametrize("nnodes", [2, 3])
def test_who_comes_to_a_running_launch_is_refused_and_it_goes_on(
    nnodes: int, running: Running
) -> None:
    cluster, nodes, url = running
    newcomer = cluster.start(1, nnodes, folder=f"newcomer-{nnodes}")
    assert newcomer.ends(30) == 1
    assert "refuses this node: node 1 is here already" in newcomer.error
    address = newcomer.host.address
    wait_for(lambda: f"{address} came as node 1 and was refused" in nodes[0].stderr, "it is said")
    with nodes[0].host.entered():
        assert ask(url, PROMPTS[0])
    assert not any(node.ended for node in nodes)


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_that_never_comes(late: int, cluster: Cluster) -> None:
    started = time.monotonic()
    node = cluster.start(1 - late, 2, "--set", "comm.connect_timeout_s=2")
    assert node.ends(30) == 1
    assert time.monotonic() - started > 2
    assert f"node {late}" in node.error
    assert "2 s" in node.error
    cluster.assert_nothing_left()


@pytest.mark.parametrize(
    ("differs", "named"),
    [(("--set", "schedule.lanes=1"), "[schedule] lanes"), (("--model",), "hash of the model")],
)
def test_a_node_that_was_started_differently_is_refused_by_name(
    differs: tuple[str, ...], named: str, cluster: Cluster
) -> None:
    timeout = ("--set", "comm.connect_timeout_s=5")
    if differs[0] == "--model":
        other = cluster.start(1, 2, *timeout, model=checkpoint("qwen3_moe_tied"))
    else:
        other = cluster.start(1, 2, *timeout, *differs)
    first = cluster.start(0, 2, *timeout)
    assert other.ends(30) == 1
    assert named in other.error
    assert first.ends(30) == 1
    assert "node 1" in first.error
    cluster.assert_nothing_left()


def test_a_cut_link_is_noticed_and_named(cluster: Cluster) -> None:
    nodes = cluster.start_all(3)
    url = nodes[0].url()
    with nodes[0].host.entered():
        assert ask(url, PROMPTS[2])
    cut_at = time.monotonic()
    nodes[2].host.cut()
    codes = [node.ends(NOTICED_S) for node in nodes]
    assert time.monotonic() - cut_at < NOTICED_S
    assert codes == [1, 1, 1]
    assert "node 2" in nodes[0].error
    assert "node 2" in nodes[1].error  # node 0 has said so
    assert "node 0" in nodes[2].error  # all that it knows is that it hears nothing
    cluster.assert_nothing_left()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_whose_launch_is_killed_takes_all_along(killed: int, cluster: Cluster) -> None:
    nodes = cluster.start_all(2)
    nodes[0].url()
    other = nodes[1 - killed]
    nodes[killed].process.kill()
    assert other.ends(NOTICED_S) == 1
    assert f"node {killed}" in other.error
    cluster.assert_nothing_left()


def test_an_interrupt_at_one_node_ends_all_and_names_it(cluster: Cluster) -> None:
    """And the nodes find each other over IPv6."""
    address = cluster.hosts[0].address6
    nodes = cluster.start_all(3, address=address and f"[{address}]")
    url = nodes[0].url()
    with nodes[0].host.entered():
        assert ask(url, PROMPTS[2])
    nodes[1].process.send_signal(signal.SIGINT)
    assert nodes[1].ends(25) == 130
    for node in (nodes[0], nodes[2]):
        assert node.ends(25) == 1
        assert "node 1" in node.error
        assert "Traceback" not in node.stderr
    cluster.assert_nothing_left()


def test_stop_ends_all_nodes(cluster: Cluster) -> None:
    nodes = cluster.start_all(2)
    nodes[0].url()
    assert run("stop", env=nodes[0].env).returncode == 0
    assert [node.ends(25) for node in nodes] == [0, 0]
    cluster.assert_nothing_left()


def test_two_instances_of_which_one_is_killed_under_load(model: Path) -> None:
    with private_home() as home, launched(home, model, "--set", "instances.count=2") as (_, url):
        answers_of_one = [ask(url, prompt, **LOGPROBS) for prompt in PROMPTS]
        first, second = controllers(home)
        doomed = [psutil.Process(rank.pid) for rank in snapshot(second).ranks]
        for process in doomed:
            process.suspend()  # so that its requests are unfinished when it dies
        with asked(lambda n: ask(url, PROMPTS[n % 4], **LOGPROBS)) as answers:
            wait_for(lambda: unfinished(second) > 0, "some went to the second instance")
            for process in (listener_at(second), *doomed):
                with suppress(psutil.NoSuchProcess):  # it went with the one before
                    process.kill()
            for number, answer in enumerate(answers):
                assert_same(answer.result(60), answers_of_one[number % 4])
        assert unfinished(first) == 0
        assert [found["state"] for found in instances(home)] == ["ready"]


@contextmanager
def asked(ask_for: Callable[[int], Any], count: int = 24) -> Iterator[list["Future[Any]"]]:
    """The answers to `count` requests, which are made at the same time on this thread's host."""
    with ThreadPoolExecutor(count) as pool:
        yield [pool.submit(ask_for, number) for number in range(count)]


def controllers(home: Path) -> list[str]:
    """Addresses of the controllers of the one launch that is run from `home`."""
    (found,) = instances(home)
    addresses: list[str] = found["controllers"]
    return addresses


def snapshot(controller: str) -> Snapshot:
    with zmq.Context() as context:
        client = Client(context, controller)
        try:
            taken = client.fresh_snapshot(10.0)
        finally:
            client.close()
    assert taken is not None
    return taken


def unfinished(controller: str) -> int:
    taken = snapshot(controller)
    return taken.waiting + taken.running


def listener_at(address: str) -> psutil.Process:
    """The process that has bound a socket of `address`."""
    path = address.removeprefix("ipc://")
    for process in psutil.process_iter():
        try:
            if "asapctl: " in "".join(process.cmdline()[:1]) and any(
                each.laddr == path for each in process.net_connections("unix")
            ):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"nobody has {address}")
