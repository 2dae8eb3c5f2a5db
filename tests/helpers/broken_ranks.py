"""Entries for the ranks of a self-test that do something wrong."""

import torch

from engine.comm.expert_side import ExpertSide
from engine.comm.primitives import Work, WorkItem
from engine.device.cpu import Cpu
from engine.device.fused import FusedOperators, register
from engine.selftest import attention, expert

CORRUPTED, LOST = 7, 5  # which message of each pair
_send = ExpertSide.combine_send


def wrong_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * weight


def attention_with_a_wrong_operator(payload: bytes, fds: list[int]) -> None:
    Cpu.use = lambda _: register(  # type: ignore[method-assign]
        "cpu", FusedOperators(rms_norm=wrong_norm)
    )
    attention.main(payload, fds)


def expert_that_corrupts_a_value(payload: bytes, fds: list[int]) -> None:
    def combine_send(self: ExpertSide, item: WorkItem, work: Work) -> None:
        if item.batch == CORRUPTED:
            work.out.view(-1)[-1:] += 1
        _send(self, item, work)

    ExpertSide.combine_send = combine_send  # type: ignore[method-assign]
    expert.main(payload, fds)


def expert_that_loses_an_answer(payload: bytes, fds: list[int]) -> None:
    def combine_send(self: ExpertSide, item: WorkItem, work: Work) -> None:
        if item.batch != LOST:
            _send(self, item, work)

    ExpertSide.combine_send = combine_send  # type: ignore[method-assign]
    expert.main(payload, fds)
