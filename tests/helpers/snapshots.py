"""A snapshot with something in every field."""

from typing import Any

from engine.control.messages import (
    HistoryPoint,
    HotExpert,
    LaneStatus,
    Latency,
    RankState,
    RankStatus,
    Snapshot,
)
from engine.topology.ranks import RankId

_STATES: tuple[RankState, ...] = ("computing", "waiting", "idle")


def snapshot(attention: int = 2, experts: int = 2, **changes: Any) -> Snapshot:
    ranks = [attention_rank(rank) for rank in range(attention)]
    ranks += [expert_rank(rank) for rank in range(experts)]
    fields: dict[str, Any] = {
        "ready": True,
        "waiting": 12,
        "running": 3,
        "finished": 1204,
        "failed": 1,
        "ranks": ranks,
        "uptime_s": 3725.0,
        "prompt_tokens": 987_654,
        "tokens_per_s": 12_345.0,
        "ttft": Latency(300, 0.9, 0.82, 1.3, 2.01),
        "goodput": 3.2,
        "ttft_slo_s": 2.0,
        "history": [HistoryPoint(float(n), n / 60, 1 - n / 60) for n in range(60)],
    }
    return Snapshot(**{**fields, **changes})


def attention_rank(rank: int, **changes: Any) -> RankStatus:
    fields: dict[str, Any] = {
        "state": _STATES[rank % 3],
        "recent_busy": 0.5,
        "recent_waits": 0.25,
        "tokens_per_s": 100.0 * rank,
        "lanes": [LaneStatus(0, 17, 4096, 12), LaneStatus(1, 18, 2048, 3)],
        "memory_bytes": (rank + 1) * 2**28,
    }
    return RankStatus(RankId("attention", rank), 100 + rank, True, **{**fields, **changes})


def expert_rank(rank: int, **changes: Any) -> RankStatus:
    fields: dict[str, Any] = {
        "state": _STATES[rank % 3],
        "recent_busy": 0.75,
        "tokens_per_s": 1000.0 * rank,
        "queue": 3,
        "serving": [5, 3, 5],
        "hottest": HotExpert(7, 900, 1.84),
        "memory_bytes": 2**30,
        "deaths": rank % 2,
    }
    return RankStatus(RankId("expert", rank), 200 + rank, True, **{**fields, **changes})
