"""Compares what an instance gives with what transformers gives.

Tolerance 1e-5 in float32. Positions whose choice of experts or token is tied in the reference are
exempt and counted.
"""

from pathlib import Path

import torch

from engine.control.messages import PrefillRequest, PrefillResult
from engine.kv import load_dynamic_cache
from helpers.checkpoints import (
    VOCABULARY,
    checkpoint,
    reference_cache,
    reference_logits,
    tied_positions,
    token_ids,
)
from helpers.instances import prefill

TOLERANCE = 1e-5
LENGTHS = (1, 2, 3, 31, 64, 65, 129, 300, 511, 700)
# Small, so that a few prompts make several batches, and a long prompt several tiles.
BATCHING = ("schedule.min_batch_tokens=128", "schedule.max_batch_tokens=256")
ONE_OF_EACH = ("qwen3_moe", "mixtral", "deepseek_v3")


def check_logprobs(result: PrefillResult, model_dir: Path, ids: list[int]) -> None:
    expected = reference_logits(model_dir, ids).log_softmax(-1)
    tied = tied_positions(model_dir, ids)
    assert len(tied) <= 1
    if len(ids) - 1 not in tied:
        assert result.token_id == int(expected[-1].argmax())
        assert result.top is not None
        for token, logprob, _ in ((e.token_id, e.logprob, e.rank) for e in result.top):
            assert abs(logprob - float(expected[-1, token])) <= TOLERANCE
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(ids)
    assert result.prompt_logprobs[0] is None
    for position, entries in enumerate(result.prompt_logprobs[1:]):
        if position in tied:
            continue
        assert entries is not None
        assert entries[0].token_id == ids[position + 1]
        tokens = torch.tensor([entry.token_id for entry in entries])
        values = torch.tensor([entry.logprob for entry in entries])
        torch.testing.assert_close(values, expected[position, tokens], atol=TOLERANCE, rtol=0)


def check_cache(result: PrefillResult, model_dir: Path, ids: list[int]) -> None:
    assert result.kv is not None
    assert result.kv.tokens == len(ids)
    ours = load_dynamic_cache(Path(result.kv.path), model_dir)
    theirs = reference_cache(model_dir, ids)
    exempt = tied_positions(model_dir, ids)
    for mine, reference in zip(ours.layers, theirs.layers, strict=True):
        for name in ("keys", "values"):
            got, want = getattr(mine, name), getattr(reference, name)
            assert got.shape == want.shape
            first = len(ids) - got.shape[2]  # sliding windows hold the last positions only
            keep = [i for i in range(got.shape[2]) if first + i not in exempt]
            torch.testing.assert_close(
                got[:, :, keep], want[:, :, keep], atol=TOLERANCE, rtol=TOLERANCE
            )


def check_parity(name: str, tmp_path: Path, overrides: list[str]) -> None:
    model_dir = checkpoint(name)
    prompts = [token_ids(length) for length in LENGTHS]
    requests = [
        PrefillRequest(
            key,
            ids,
            logprobs=5,
            prompt_logprobs=VOCABULARY if len(ids) <= 65 else 2,
            kv_path=str(tmp_path / f"{key}.safetensors"),
        )
        for key, ids in enumerate(prompts)
    ]
    results = prefill(model_dir, overrides, requests)
    for key, ids in enumerate(prompts):
        assert results[key].error is None
        check_logprobs(results[key], model_dir, ids)
        check_cache(results[key], model_dir, ids)
