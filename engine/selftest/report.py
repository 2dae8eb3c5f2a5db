"""What a self-test found, and how far results may be from the reference. No process, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.selftest.messages import OperatorResult

if TYPE_CHECKING:
    import torch


class Tolerance(NamedTuple):
    """Of log-probabilities against float32 on the CPU, absolute below 1 and relative above.

    most: at any position. median: of the positions' largest differences. A position counts if the
    reference's choice of experts, in router logits, is clear by `gap`; below that a rounding may
    rightly make another choice.
    """

    most: float
    median: float
    gap: float


_EXACT, _EXACT_ON_DEVICES = 1e-5, 1e-4
# About ten times the rounding of one value.
_OPERATORS = {"float16": 5e-3, "bfloat16": 4e-2}
# Twice what the CPU gives with checkpoints of several sizes. A position may see another one, whose
# experts are others, through attention: hence so much at any one, and little at most of them.
_MODEL = {"float16": Tolerance(0.6, 0.008, 0.03), "bfloat16": Tolerance(0.6, 0.06, 0.1)}


def operator_tolerance(dtype: torch.dtype, device_type: str) -> float:
    return _OPERATORS.get(str(dtype).removeprefix("torch."), _exact(device_type == "cpu"))


def model_tolerance(dtype: str, on_cpu: bool) -> Tolerance:
    exact = Tolerance(_exact(on_cpu), _exact(on_cpu), 1e-5)
    return _MODEL.get(dtype, exact)


def _exact(on_cpu: bool) -> float:
    return _EXACT if on_cpu else _EXACT_ON_DEVICES


class Pair(msgspec.Struct, frozen=True):
    """Dispatch and combine between an attention rank and an expert rank.

    latency_us: median time of a round trip of one row. bandwidth_gb_s: bytes of a full window both
    ways, in 10^9, over the median time of its round trip.
    """

    attention: int
    expert: int
    latency_us: float
    bandwidth_gb_s: float


class RankOperators(msgspec.Struct, frozen=True):
    rank: str
    device: str
    results: list[OperatorResult]


class Exchange(msgspec.Struct, frozen=True):
    """sent: dispatches of all pairs. good: those whose answer was right in every value."""

    sent: int
    good: int


class ModelResult(msgspec.Struct, frozen=True):
    """prompts: how many of which lengths. positions: compared; left_out: not, as their experts hang
    on less than the tolerance's gap. error, median: largest and median difference.
    """

    lengths: list[int]
    prompts: int
    positions: int
    left_out: int
    error: float
    median: float
    tolerance: Tolerance


class Report(msgspec.Struct):
    """failures: in sentences; empty is good. What was not reached is None or empty. window_bytes:
    of the rows that one attention rank sends in a full dispatch. seconds: of all of it.
    """

    topology: str
    model: str
    dtype: str
    transport: str
    groups: int
    tensor_parallel: int
    expert_ranks: int
    window_tokens: int
    window_bytes: int
    exchange: Exchange | None = None
    pairs: list[Pair] = []
    operators: list[RankOperators] = []
    logprobs: ModelResult | None = None
    notes: list[str] = []
    failures: list[str] = []
    seconds: float = 0.0
