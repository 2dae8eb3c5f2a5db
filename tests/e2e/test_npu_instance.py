"""An instance whose devices are NPUs and whose payload goes by HCCL, as far as a CPU can tell.

Planning, masks, environment, processes, protocol and scheduling are those of a real one; the
device, its operators and HCCL are stand-ins that keep the documented rules (`helpers.hccl_double`,
`helpers.torch_npu_double`).
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.control.client import Client
from engine.control.messages import PrefillRequest
from engine.errors import RunError
from engine.launch import host
from engine.launch.plan import make_plan
from engine.launch.running import start_instance
from engine.launch.runtime_folder import base_folder
from engine.topology.load import load_topology
from helpers.checkpoints import checkpoint, reference_logits, token_ids
from helpers.instances import collect, layout
from helpers.npu_ranks import ENTRIES

NPUS = (
    "attention.device=npu",
    "attention.device_memory_gb=64",
    "experts.device=npu",
    "experts.device_memory_gb=64",
    "model.dtype=float32",
)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", f"{folder}/state")
        yield Path(folder)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for role, entry in ENTRIES.items():
        monkeypatch.setitem(host.ENTRIES, role, entry)


@contextmanager
def instance(*overrides: str) -> Iterator[Client]:
    topology = load_topology("cpu", [*overrides, *NPUS])
    plan = make_plan(topology, checkpoint("deepseek_v3"), assume="devices")
    assert plan.transport == "hccl"
    with start_instance(plan, name="npus") as client:
        yield client


def test_numbers_with_uneven_groups_of_two_ranks() -> None:
    asked = [
        PrefillRequest(key, token_ids(length, key), logprobs=5)
        for key, length in enumerate((1, 70, 300))
    ]
    with instance(*layout(2, 3, "attention.tensor_parallel=2", "comm.window_tokens=49")) as client:
        client.submit(asked)
        client.drain()
        results = collect(client, len(asked))
        logs = [path.read_text() for path in (base_folder() / "npus" / "logs").iterdir()]
    for request in asked:
        logits = reference_logits(checkpoint("deepseek_v3"), request.token_ids)[-1]
        assert results[request.key].error is None
        assert results[request.key].token_id == int(logits.argmax())
        expected = logits.log_softmax(-1)
        for entry in results[request.key].top or []:
            assert abs(entry.logprob - float(expected[entry.token_id])) <= 1e-5
    seen = sorted(line for log in logs for line in log.splitlines() if line.startswith("sees"))
    assert seen == [f"sees {device}, waits 300 s" for device in range(7)]  # each its own


def test_a_dead_rank_is_named_and_ends_the_instance() -> None:
    with (
        pytest.raises(RunError, match=r"expert 1 \(pid \d+\) .*\n(?s:.*)over hccl") as failure,
        instance(*layout(1, 2)) as client,
    ):
        snapshot = client.fresh_snapshot(10.0)
        assert snapshot is not None
        (pid,) = [s.pid for s in snapshot.ranks if str(s.id) == "expert 1"]
        os.kill(pid, signal.SIGKILL)
        client.submit([PrefillRequest(0, token_ids(50))])
        collect(client, 1)
    assert "start the instance again" in str(failure.value)
