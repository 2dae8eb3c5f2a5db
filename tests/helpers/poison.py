"""Ranks that die of a prompt of POISON_TOKENS tokens, for tests of recovery."""

import os
import signal
from collections.abc import Sequence

from engine.comm.expert_side import ExpertSide
from engine.comm.primitives import Work, WorkItem
from engine.control.messages import PrefillRequest
from engine.schedule.types import Batch, Step
from engine.worker import attention as attention_rank
from engine.worker import expert as expert_rank
from engine.worker.lane import Lane

POISON_TOKENS = 173


def attention(payload: bytes, fds: list[int]) -> None:
    """Dies when a batch with the prompt is started."""
    start = Lane.start

    def deadly(
        self: Lane, batch: Batch, requests: Sequence[PrefillRequest], step: Step | None = None
    ) -> None:
        if any(len(request.token_ids) == POISON_TOKENS for request in requests):
            os.kill(os.getpid(), signal.SIGKILL)
        start(self, batch, requests, step)

    Lane.start = deadly  # type: ignore[method-assign]
    attention_rank.main(payload, fds)


def marking_attention(payload: bytes, fds: list[int]) -> None:
    """Lives, and makes the prompt's rows zero, by which `expert` knows them."""
    attend = Lane._attend

    def mark(self: Lane, tokens: int) -> None:
        attend(self, tokens)
        row = 0
        for span in self._spans:
            if span.length == POISON_TOKENS:
                self._hidden[row : row + span.length] = 0
            row += span.length

    Lane._attend = mark  # type: ignore[method-assign]
    attention_rank.main(payload, fds)


def expert(payload: bytes, fds: list[int]) -> None:
    """Dies when it is about to serve rows of the prompt."""
    open_ = ExpertSide.open

    def deadly(self: ExpertSide, item: WorkItem) -> Work:
        work = open_(self, item)
        if bool((work.hidden.abs().sum(-1) == 0).any()):
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    ExpertSide.open = deadly  # type: ignore[method-assign]
    expert_rank.main(payload, fds)
