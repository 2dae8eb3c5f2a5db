"""The policy that a topology names."""

from collections.abc import Sequence
from typing import Protocol

from engine.schedule.policy import AsapPolicy
from engine.schedule.sync import LockstepPolicy
from engine.schedule.types import Assignment, Batch, Request


class Policy(Protocol):
    """What the controller, or a simulator, asks of one: see `AsapPolicy`, which says more."""

    @property
    def waiting(self) -> int:
        """Prompts that no group has yet."""

    @property
    def running(self) -> int:
        """Prompts that a group works on."""

    def add(self, request: Request) -> None: ...
    def aggregate(self, min_batch_tokens: int) -> None: ...
    def drain(self) -> None: ...
    def next(self, now: float) -> list[Assignment]: ...
    def finished(self, group: int, batch_id: int) -> None: ...
    def cancel(self, key: int) -> bool: ...
    def lost(self, group: int) -> list[Batch]: ...
    def recovered(self, group: int) -> None: ...
    def retry(self, batches: Sequence[Batch]) -> None: ...
    def alone(self, batch: Batch) -> list[Batch]: ...
    def next_deadline(self, now: float) -> float | None: ...


def make_policy(
    name: str,
    groups: int,
    lanes: int,
    min_batch_tokens: int | None,
    max_batch_tokens: int,
    exclusive_tokens: int,
    chunk_tokens: int,
    max_wait_s: float,
) -> Policy:
    """name: as `[schedule] policy` has it. What a policy has no use for is passed over.
    min_batch_tokens: None where that is measured first, see `Policy.aggregate`.
    """
    match name:
        case "asap":
            return AsapPolicy(
                groups,
                lanes,
                min_batch_tokens or max_batch_tokens,
                max_batch_tokens,
                exclusive_tokens,
                max_wait_s,
            )
        case "sync" | "sync-afd":
            return LockstepPolicy(groups, max_batch_tokens)
        case "sync-chunked":
            return LockstepPolicy(groups, max_batch_tokens, chunk_tokens)
    raise ValueError(f"no policy is called {name!r}")
