"""How several instances stand together, in the form of one. Pure."""

from collections.abc import Sequence

import msgspec

from engine.control.messages import Latency, Snapshot


def together(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Sums, for one line that stands for all. A latency is that of the slowest instance, since
    percentiles do not add up.
    """
    first = snapshots[0]
    if len(snapshots) == 1:
        return first
    slowest = max((s.ttft for s in snapshots), key=lambda ttft: ttft.p99)
    count = sum(s.ttft.count for s in snapshots)
    return msgspec.structs.replace(
        first,
        ready=all(s.ready for s in snapshots),
        waiting=sum(s.waiting for s in snapshots),
        running=sum(s.running for s in snapshots),
        finished=sum(s.finished for s in snapshots),
        failed=sum(s.failed for s in snapshots),
        ranks=[rank for s in snapshots for rank in s.ranks],
        prompt_tokens=sum(s.prompt_tokens for s in snapshots),
        tokens_per_s=sum(s.tokens_per_s for s in snapshots),
        goodput=sum(s.goodput for s in snapshots),
        work=sum(s.work for s in snapshots),
        ttft=msgspec.structs.replace(slowest, count=count) if count else Latency(),
        quitting=all(s.quitting for s in snapshots),
        problems=[
            f"instance {index}: {problem}"
            for index, s in enumerate(snapshots)
            for problem in s.problems
        ],
        history=[],
    )
