"""A small model through a real instance, beside the same model in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.control.client import Client
from engine.control.messages import PrefillRequest, PrefillResult, Snapshot
from engine.errors import RunError
from engine.launch.plan import Plan
from engine.launch.running import start_instance
from engine.selftest.checkpoint import VOCABULARY
from engine.selftest.pairs import OnStep
from engine.selftest.reference import Reference
from engine.selftest.report import ModelResult, Report, model_tolerance

# Of one token, around the size of a tile and of a batch (see job), and beyond.
LENGTHS = (1, 2, 31, 64, 65, 200, 300)
_ALTERNATIVES = 4
_SEED = 20260302
_POLL_S = 0.2
_REPORTS_S = 0.5  # ranks tell of their work five times a second


def try_model(plan: Plan, report: Report, patience_s: float, on_step: OnStep) -> None:
    """Log-probabilities of all of a prompt's positions, into `report`. RunError: a rank failed, or
    nothing has come for `patience_s` seconds.
    """
    prompts = [_tokens(length) for length in LENGTHS]
    # As many of each as there are lanes: every group is to have some of them.
    copies = plan.groups * plan.lanes
    requests = [
        PrefillRequest(
            key, prompts[key % len(prompts)], logprobs=VOCABULARY, prompt_logprobs=_ALTERNATIVES
        )
        for key in range(copies * len(prompts))
    ]

    def loading(snapshot: Snapshot) -> None:
        ready = sum(rank.ready for rank in snapshot.ranks)
        on_step(f"small model: {ready} of {len(snapshot.ranks)} ranks ready")

    with start_instance(plan, loading, name=f"selftest-{os.getpid()}") as client:
        client.submit(requests)
        client.drain()
        results = _collect(client, len(requests), patience_s, on_step)
        client.receive(_REPORTS_S)
        snapshot = client.fresh_snapshot(patience_s)
    report.failures += _idle(snapshot)
    _compare(plan, report, prompts, results)


def _tokens(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(_SEED + length)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


def _collect(
    client: Client, count: int, patience_s: float, on_step: OnStep
) -> dict[int, PrefillResult]:
    results: dict[int, PrefillResult] = {}
    deadline = time.monotonic() + patience_s
    while len(results) < count:
        on_step(f"small model: {len(results)} of {count} prompts")
        new = client.receive(_POLL_S)
        if new:
            deadline = time.monotonic() + patience_s
        elif time.monotonic() > deadline:
            raise RunError(f"{len(results)} of {count} prompts came back, and then none")
        results |= {result.key: result for result in new}
    return results


def _idle(snapshot: Snapshot | None) -> list[str]:
    ranks = [] if snapshot is None else snapshot.ranks
    return [f"{rank.id}: computed nothing of the small model" for rank in ranks if not rank.tokens]


def _compare(
    plan: Plan, report: Report, prompts: Sequence[list[int]], results: dict[int, PrefillResult]
) -> None:
    on_cpu = all(rank.device is None for rank in plan.ranks)
    tolerance = model_tolerance(plan.dtype, on_cpu)
    reference = Reference(plan.model_dir)
    wanted = [reference.run(prompt) for prompt in prompts]
    differences: list[float] = []
    left_out = 0
    for key, result in sorted(results.items()):
        if result.error is not None:
            report.failures.append(
                f"a prompt of {len(prompts[key % len(prompts)])} tokens failed: {result.error}"
            )
            continue
        logprobs, gaps = wanted[key % len(prompts)]
        unclear = gaps < tolerance.gap
        if plan.dtype == "float32":  # what follows has seen the other choice, if only a little
            unclear = unclear.cumsum(0) > 0
        found = _differences(result, logprobs)
        differences += found[~unclear].tolist()
        left_out += int(unclear.sum())
    if not differences:
        report.failures.append("no position of the small model could be compared")
        return
    error, median = max(differences), float(torch.tensor(differences).median())
    report.logprobs = ModelResult(
        list(LENGTHS), len(results), len(differences), left_out, error, median, tolerance
    )
    for what, value, most in (
        ("largest", error, tolerance.most),
        ("median", median, tolerance.median),
    ):
        if not value <= most:
            report.failures.append(
                f"small model: the {what} difference of log-probabilities is {value:.1e}, "
                f"more than {most:g}"
            )


def _differences(result: PrefillResult, logprobs: Tensor) -> Tensor:
    """The largest one at each position [tokens], of the tokens that the result tells of: absolute
    below 1, relative above.
    """
    assert result.prompt_logprobs is not None
    rows = [*result.prompt_logprobs[1:], result.top]
    found = []
    for wanted, row in zip(logprobs, rows, strict=True):
        assert row is not None
        ids = torch.tensor([entry.token_id for entry in row])
        values = torch.tensor([entry.logprob for entry in row])
        there = wanted[ids]
        found.append(float(((values - there).abs() / there.abs().clamp(min=1)).max()))
    return torch.tensor(found)
