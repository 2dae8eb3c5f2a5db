"""Real instances for tests: processes, windows, sockets and all."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.control.client import Client
from engine.control.messages import PrefillRequest, PrefillResult
from engine.launch.plan import Plan, make_plan
from engine.launch.running import start_instance
from engine.topology.load import load_topology

DEADLINE_S = 120.0


def layout(groups: int, ranks: int, *more: str) -> list[str]:
    """Overrides for D = groups and E = ranks, and whatever else."""
    return [f"attention.groups={groups}", f"experts.ranks={ranks}", *more]


def plan(model_dir: Path, overrides: Sequence[str], keep_kv: bool = False) -> Plan:
    return make_plan(load_topology("cpu", overrides), model_dir, keep_kv=keep_kv)


@contextmanager
def instance(model_dir: Path, overrides: Sequence[str]) -> Iterator[Client]:
    with start_instance(plan(model_dir, overrides, keep_kv=True)) as client:
        yield client


def collect(client: Client, count: int) -> dict[int, PrefillResult]:
    """`count` results by key; fails when they do not come in time."""
    results: dict[int, PrefillResult] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(results) < count:
        assert time.monotonic() < deadline, f"{len(results)} of {count} results came"
        for result in client.receive(1.0):
            assert result.key not in results, f"two results for {result.key}"
            results[result.key] = result
    return results


def prefill(
    model_dir: Path, overrides: Sequence[str], requests: list[PrefillRequest]
) -> dict[int, PrefillResult]:
    """Starts an instance, runs `requests`, ends it."""
    with instance(model_dir, overrides) as client:
        client.submit(requests)
        client.drain()
        return collect(client, len(requests))


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    """Polls until `condition` holds; fails with `what` after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"after {deadline_s:g} s: {what}"
        time.sleep(0.01)
