"""How long a dispatch takes to reach an idle expert rank of an instance, by the ranks' spans."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks import models
from engine.bench.workload import random_prompts
from engine.control.client import Client
from engine.control.messages import Cancel, PrefillRequest, TraceReport
from engine.errors import RunError
from engine.launch.plan import make_plan
from engine.launch.running import start_instance
from engine.topology.load import load_topology

_TOKENS = 64
# One batch of one prompt at a time: the expert rank is idle whenever a dispatch comes.
_OVERRIDES = (
    "attention.groups=1",
    "experts.ranks=1",
    "schedule.lanes=1",
    f"schedule.min_batch_tokens={_TOKENS}",
    f"schedule.max_batch_tokens={_TOKENS}",
)
_SECONDS, _ANSWER_S = 1.0, 30.0
_PROMPTS = 2000  # more than can be done in _SECONDS


def doorbell_in_instance(cache: Path) -> float:
    """Microseconds, median, from the start of a dispatch to the start of its work item.

    The writing of the payload is a part of it: after the ring the kernel may give the attention
    rank's core to the expert rank, so the end of a dispatch says nothing.
    """
    plan = make_plan(load_topology("cpu", _OVERRIDES), models.build("a", cache))
    prompts = random_prompts([_TOKENS] * _PROMPTS, plan.config.vocab_size)
    with start_instance(plan) as client:
        report = _trace(client, prompts)
    waits = _waits(report)
    if not waits:
        raise RunError("the trace has no dispatch that was served")
    return statistics.median(waits) * 1e6


def _trace(client: Client, prompts: list[list[int]]) -> TraceReport:
    client.submit([PrefillRequest(key, prompt) for key, prompt in enumerate(prompts)])
    report = client.trace(_SECONDS, _ANSWER_S)
    if report is None:
        raise RunError(f"no trace came in {_ANSWER_S:g} s")
    client.send(Cancel(list(range(len(prompts)))))
    return report


def _waits(report: TraceReport) -> list[float]:
    """Seconds, of every dispatch that the trace has both ends of."""
    sent: dict[tuple[int, int, int], float] = {}
    begun: dict[tuple[int, int, int], float] = {}
    for rank in report.ranks:
        for span in rank.spans:
            key = (span.batch, span.layer, span.tile)
            if span.what == "dispatch":
                sent[key] = span.start
            elif span.what == "serve":
                begun[key] = span.start
    return [begun[key] - sent[key] for key in sent.keys() & begun.keys()]
