"""One composition of batches gives one set of bits, whichever expert rank answers first."""

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
    folder: Path, stall: random.Random | None
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
    with instance(checkpoint("deepseek_v3"), OVERRIDES) as client:
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


def test_stalling_expert_ranks_changes_no_bit(tmp_path: Path) -> None:
    results, caches = run(tmp_path / "steady", None)
    for seed in range(2):
        again, caches_again = run(tmp_path / f"stalled-{seed}", random.Random(seed))
        assert again == results
        assert caches_again == caches
