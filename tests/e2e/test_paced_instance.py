"""A whole paced instance: real processes that take the time of a table."""

import os
import signal
import time
from itertools import groupby

import pytest

from engine.control.client import Client
from engine.control.messages import PrefillRequest, Snapshot
from engine.hardware.load import load_hardware
from engine.launch.checks import plan_of
from engine.launch.pacing import LABEL
from engine.launch.registry import list_instances
from engine.launch.running import start_instance
from engine.model.spans import Span
from helpers.instances import collect, wait_for

LAYERS = 6
SCALE = 20.0
SET = [f"paced.scale={SCALE:g}", "comm.window_tokens=8192", "schedule.max_wait_ms=0"]


def requests(*lengths: int) -> list[PrefillRequest]:
    return [PrefillRequest(key=key, token_ids=[1] * n) for key, n in enumerate(lengths)]


def snapshot(client: Client) -> Snapshot:
    found = client.fresh_snapshot(10.0)
    assert found is not None
    return found


def test_a_prompt_takes_what_its_layers_take() -> None:
    """One prompt alone: attention, dispatch, experts, combine, layer after layer, no less; and not
    so much more that a wait was missed.
    """
    table = load_hardware("cloudmatrix384").scaled(SCALE)
    n = 4000
    layer = (
        table.attention_s([Span(0, n)])
        + table.links.dispatch.seconds(n)
        + table.experts_s(n)
        + table.links.combine.seconds(n)
    )
    with start_instance(plan_of("paced-d4e4", SET, None)) as client:
        start = time.monotonic()
        client.submit(requests(n))
        results = collect(client, 1)
        took = time.monotonic() - start
        client.submit(requests(*[n] * 16))
        collect(client, 16)
        wait_for(lambda: sum(r.paced_seconds for r in snapshot(client).ranks) > 0, "no report")
        now = snapshot(client)
        record = next(each for each in list_instances() if each.pid == os.getpid())
    assert results[0].token_id == 0
    assert LAYERS * layer <= took < 2 * LAYERS * layer + 0.5
    assert now.paced is not None
    assert now.paced.startswith(LABEL)
    assert record.paced == now.paced
    assert all(0 <= rank.paced_seconds <= rank.busy_seconds for rank in now.ranks)
    for _, ranks in groupby(now.ranks, key=lambda rank: rank.id.role):
        assert sum(rank.paced_seconds for rank in ranks) > 0


@pytest.mark.parametrize("role", ["attention", "expert"])
def test_a_paced_rank_that_dies_is_started_again(role: str) -> None:
    with start_instance(plan_of("paced-d4e4", SET, None)) as client:
        client.submit(requests(*[3000] * 24))
        wait_for(lambda: snapshot(client).running > 0, "nothing ran")
        victim = next(rank for rank in snapshot(client).ranks if rank.id.role == role)
        os.kill(victim.pid, signal.SIGKILL)
        results = collect(client, 24)
        assert {result.token_id for result in results.values()} == {0}
        assert sum(rank.deaths for rank in snapshot(client).ranks) == 1
