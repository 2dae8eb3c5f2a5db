"""One composition of batches gives one set of bits, whichever expert rank answers first and
whatever carries the answer.
"""

import random
from pathlib import Path

import psutil
from safetensors.torch import load_file

from engine.control.messages import PrefillRequest, PrefillResult
from engine.topology.ranks import RankId
from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import instance, layout

OVERRIDES = layout(
    2,
    3,
    "comm.window_tokens=32",
    "schedule.min_batch_tokens=128",
    "schedule.max_batch_tokens=256",
)
LENGTHS = (5, 130, 64, 200, 31, 90, 250, 12, 700)


def run(
    folder: Path, stall: random.Random | None, transport: str = "shm"
) -> tuple[dict[int, PrefillResult], list[dict[str, bytes]]]:
    """Results without their times, and the keys and values of each prompt.

    stall: stops one expert rank after another for a moment, so that others answer before it.
    """
    folder.mkdir()
    requests = [
        PrefillRequest(
            key,
            token_ids(length),
            logprobs=5,
            prompt_logprobs=2,
            kv_path=str(folder / f"{key}.safetensors"),
        )
        for key, length in enumerate(LENGTHS)
    ]
    results: dict[int, PrefillResult] = {}
    overrides = [*OVERRIDES, f"comm.transport={transport}"]
    with instance(checkpoint("deepseek_v3"), overrides) as client:
        snapshot = client.fresh_snapshot(10.0)
        assert snapshot is not None
        pids = {status.id: status.pid for status in snapshot.ranks}
        experts = [psutil.Process(pids[RankId("expert", rank)]) for rank in range(3)]
        client.submit(requests)
        client.drain()
        while len(results) < len(requests):
            stalled = stall.choice(experts) if stall else None
            if stalled:
                stalled.suspend()
            for result in client.receive(0.01):
                results[result.key] = PrefillResult(
                    key=result.key,
                    token_id=result.token_id,
                    top=result.top,
                    prompt_logprobs=result.prompt_logprobs,
                )
            if stalled:
                stalled.resume()
    caches = [
        {
            name: tensor.numpy().tobytes()
            for name, tensor in load_file(folder / f"{key}.safetensors").items()
        }
        for key in range(len(LENGTHS))
    ]
    return results, caches


def test_neither_stalling_expert_ranks_nor_the_transport_changes_a_bit(tmp_path: Path) -> None:
    results, caches = run(tmp_path / "steady", None)
    for number, transport in enumerate(("shm", "gloo")):
        again, caches_again = run(tmp_path / f"stalled-{number}", random.Random(number), transport)
        assert again == results
        assert caches_again == caches
