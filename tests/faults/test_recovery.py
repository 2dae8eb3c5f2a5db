"""Ranks that die under load: nobody's answer is lost, and none is different."""

import contextlib
import functools
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.control.client import Client
from engine.control.messages import PrefillRequest, PrefillResult, RankStatus
from engine.errors import RunError
from engine.launch import host
from engine.topology.ranks import RankId, Role
from helpers.checkpoints import checkpoint, reference_logits, token_ids
from helpers.instances import DEADLINE_S, collect, instance, layout, wait_for
from helpers.poison import POISON_TOKENS

FAMILY = "qwen3_moe"
# Small windows take many round trips, so that there is time to kill somebody.
SMALL = (
    "schedule.min_batch_tokens=600",
    "schedule.max_batch_tokens=1200",
    "comm.window_tokens=16",
)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/state")
        yield Path(folder)


def status_of(client: Client, rank: RankId) -> RankStatus:
    snapshot = client.fresh_snapshot(10.0)
    assert snapshot is not None
    return next(s for s in snapshot.ranks if (s.id.role, s.id.rank) == (rank.role, rank.rank))


def requests(count: int, length: int = 300) -> list[PrefillRequest]:
    return [
        PrefillRequest(key, token_ids(length, key), logprobs=3, prompt_logprobs=0)
        for key in range(count)
    ]


def values(results: dict[int, PrefillResult]) -> dict[int, object]:
    return {key: (r.error, r.token_id, r.top, r.prompt_logprobs) for key, r in results.items()}


SHM = layout(2, 2, *SMALL)
GLOO = [*SHM, "comm.transport=gloo"]
TEAMS = [*layout(2, 1, *SMALL), "attention.tensor_parallel=2"]
TEAMS_GLOO = [*TEAMS, "comm.transport=gloo"]
SYNC = [*SHM, "schedule.policy=sync"]
CHUNKED = [*SHM, "schedule.policy=sync-chunked", "schedule.chunk_tokens=700"]
SYNC_AFD = [*layout(2, 1, *SMALL), "schedule.policy=sync-afd", "comm.transport=gloo"]
LOCKSTEP = (SYNC, CHUNKED, SYNC_AFD)


@functools.cache
def undisturbed(*overrides: str) -> dict[int, object]:
    """Of the same prompts, submitted alike, so in the same batches."""
    with instance(checkpoint(FAMILY), overrides) as client:
        client.submit(requests(60))
        client.drain()
        return values(collect(client, 60))


@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        (SHM, RankId("attention", 1)),
        (SHM, RankId("expert", 0)),
        (GLOO, RankId("attention", 1)),
        (GLOO, RankId("expert", 0)),
        (TEAMS, RankId("attention", 3)),
        (TEAMS_GLOO, RankId("attention", 0)),
        (TEAMS_GLOO, RankId("expert", 0)),
        (SYNC, RankId("attention", 1)),
        (SYNC, RankId("expert", 0)),
        (CHUNKED, RankId("attention", 0)),
        (CHUNKED, RankId("expert", 1)),
        (SYNC_AFD, RankId("attention", 1)),
        (SYNC_AFD, RankId("expert", 0)),
    ],
    ids=[
        "shm-attention",
        "shm-expert",
        "gloo-attention",
        "gloo-expert",
        "teams-attention",
        "teams-gloo-attention",
        "teams-gloo-expert",
        "sync-attention",
        "sync-expert",
        "chunked-attention",
        "chunked-expert",
        "sync-afd-attention",
        "sync-afd-expert",
    ],
)
def test_a_killed_rank_comes_back_and_no_bit_differs(overrides: list[str], rank: RankId) -> None:
    expected = undisturbed(*overrides)
    with instance(checkpoint(FAMILY), overrides) as client:
        client.submit(requests(60))
        client.drain()
        wait_for(lambda: status_of(client, rank).work_items > 2, f"{rank} is at work")
        os.kill(status_of(client, rank).pid, signal.SIGKILL)
        results = collect(client, 60)
        # Members of a group live and die together, and so do all groups in lockstep.
        together = overrides in (TEAMS, TEAMS_GLOO, *LOCKSTEP) and rank.role == "attention"
        size = 2 if together else 1
        first = rank.rank // size * size
        for member in (RankId(rank.role, first + place) for place in range(size)):
            wait_for(lambda m=member: status_of(client, m).ready, f"{member} is ready again")
            assert status_of(client, member).id.incarnation == 1
            assert status_of(client, member).deaths == 1
        snapshot = client.fresh_snapshot(10.0)
        assert snapshot is not None
        assert sum(status.deaths for status in snapshot.ranks) == size
    if overrides in LOCKSTEP or (overrides == TEAMS_GLOO and rank.role == "expert"):
        check_close(values(results), expected)
    else:
        assert values(results) == expected


def check_close(found: dict[int, Any], expected: dict[int, Any]) -> None:
    """What several ranks have sent again is computed for each by itself, and batches in lockstep
    run again in other company: the same numbers, in products of other sizes.
    """
    assert found.keys() == expected.keys()
    for key, (error, token, top, scores) in found.items():
        assert (error, token) == expected[key][:2]
        ours = [*top, *(row[0] for row in scores[1:])]
        theirs = [*expected[key][2], *(row[0] for row in expected[key][3][1:])]
        assert [o.token_id for o in ours] == [t.token_id for t in theirs]
        assert all(abs(o.logprob - t.logprob) < 1e-5 for o, t in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "overrides", [SHM, GLOO, TEAMS_GLOO, CHUNKED], ids=["shm", "gloo", "teams", "chunked"]
)
def test_random_kills_cost_no_answer(overrides: list[str]) -> None:
    model_dir = checkpoint(FAMILY)
    chaos = random.Random(7)
    with instance(model_dir, overrides) as client:
        asked = requests(300 if overrides == SHM else 150, length=200)
        for request in asked:
            client.submit([request])
        client.drain()
        results: dict[int, PrefillResult] = {}
        deaths, most = 0, 6 if overrides == SHM else 4
        next_kill = time.monotonic() + 0.3
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(asked):
            assert time.monotonic() < deadline
            results |= {result.key: result for result in client.receive(0.05)}
            if deaths < most and time.monotonic() > next_kill:
                snapshot = client.fresh_snapshot(10.0)
                assert snapshot is not None
                there = [status.pid for status in snapshot.ranks if status.ready]
                if there:
                    with contextlib.suppress(ProcessLookupError):  # its group has just died
                        os.kill(chaos.choice(there), signal.SIGKILL)
                        deaths += 1
                next_kill = time.monotonic() + 0.3
        assert deaths == most
    for request in asked:
        assert results[request.key].error is None
        logits = reference_logits(model_dir, request.token_ids)[-1]
        assert results[request.key].token_id == int(logits.argmax())


@pytest.mark.parametrize("policy", ["asap", "sync-afd"])
@pytest.mark.parametrize(
    "entries",
    [
        {"attention": "helpers.poison:attention"},
        {"attention": "helpers.poison:marking_attention", "expert": "helpers.poison:expert"},
    ],
    ids=["attention", "expert"],
)
def test_a_prompt_that_kills_its_rank_fails_alone(
    entries: dict[Role, str], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for role, entry in entries.items():
        monkeypatch.setitem(host.ENTRIES, role, entry)
    model_dir = checkpoint(FAMILY)
    poison = 5
    asked = [PrefillRequest(key, token_ids(100 + key, key)) for key in range(12)]
    asked[poison] = PrefillRequest(poison, token_ids(POISON_TOKENS, poison))
    overrides = layout(2, 1, "schedule.min_batch_tokens=500", f"schedule.policy={policy}")
    with instance(model_dir, overrides) as client:
        client.submit(asked)
        client.drain()
        results = collect(client, len(asked))
        client.submit([PrefillRequest(99, token_ids(9))])
        client.drain()
        assert collect(client, 1)[99].error is None  # and the instance serves on
    assert "given up after 3 deaths" in (results.pop(poison).error or "")
    for key, result in results.items():
        assert result.error is None
        logits = reference_logits(model_dir, asked[key].token_ids)[-1]
        assert result.token_id == int(logits.argmax())


def test_a_rank_that_always_dies_ends_the_instance(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in checkpoint(FAMILY).iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    with (
        pytest.raises(RunError, match=r"expert 0 died too often.*holds no weights"),
        instance(model_dir, layout(1, 1)) as client,
    ):
        (model_dir / "model.safetensors").unlink()
        os.kill(status_of(client, RankId("expert", 0)).pid, signal.SIGKILL)
        client.submit(requests(1))
        client.drain()
        collect(client, 1)


def test_a_stopped_expert_stalls_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the quiet time as it is: stalls are noticed after ten seconds."""
    with instance(checkpoint(FAMILY), layout(1, 1)) as client:
        expert = RankId("expert", 0)
        process = psutil.Process(status_of(client, expert).pid)
        process.suspend()
        client.submit(requests(3))
        client.drain()
        wait_for(lambda: status_of(client, expert).state == "stalled", "the stall is seen", 30)
        snapshot = client.fresh_snapshot(10.0)
        assert snapshot is not None
        assert any(problem.startswith("expert 0 has work") for problem in snapshot.problems)
        assert not any("attention" in problem for problem in snapshot.problems)
        process.resume()
        assert all(result.error is None for result in collect(client, 3).values())
        assert status_of(client, expert).state != "stalled"
        assert status_of(client, expert).deaths == 0


def test_a_rank_that_stays_stalled_is_started_again() -> None:
    overrides = layout(1, 1, "schedule.stall_timeout_s=11")
    with instance(checkpoint(FAMILY), overrides) as client:
        expert = RankId("expert", 0)
        psutil.Process(status_of(client, expert).pid).suspend()
        client.submit(requests(3))
        client.drain()
        assert all(result.error is None for result in collect(client, 3).values())
        assert status_of(client, expert).deaths == 1
