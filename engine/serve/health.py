"""What /health and /ready say of the instances, from their snapshots (None: it does not answer)."""

from collections.abc import Sequence

from engine.control.messages import Snapshot


def health_of(snapshots: Sequence[Snapshot | None]) -> tuple[str, list[str]]:
    """ok; degraded: not all instances make progress; unhealthy: none. And all that is wrong."""
    problems = [_problems(snapshot) for snapshot in snapshots]
    if not any(problems):
        return "ok", []
    status = "unhealthy" if all(problems) else "degraded"
    if len(problems) == 1:
        return status, problems[0]
    return status, [
        f"instance {index}: {problem}" for index, of in enumerate(problems) for problem in of
    ]


def takes_prompts(snapshot: Snapshot | None) -> bool:
    return snapshot is not None and snapshot.ready and not snapshot.quitting


def _problems(snapshot: Snapshot | None) -> list[str]:
    return ["the controller does not answer"] if snapshot is None else snapshot.problems
