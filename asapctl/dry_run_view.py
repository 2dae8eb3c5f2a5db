"""What `asapctl launch --dry-run` prints."""

import shlex
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from engine.launch.dry_run import DryRun


def print_dry_run(run: "DryRun") -> None:
    """Node by node its command, and under it what it starts. What all ranks of a node have set is
    said once.
    """
    for node in run.nodes:
        typer.echo(f"node {node.node_rank}: {shlex.join(node.command)}")
        shared = _shared([rank.environment for rank in node.ranks])
        if node.controllers:
            many = len(node.controllers) > 1
            which = f"0 to {node.controllers[-1]}" if many else "0"
            typer.echo(f"  controller{'s' * many} of instance{'s' * many} {which}, and HTTP")
        for rank in node.ranks:
            own = {name: rank.environment[name] for name in rank.environment.keys() - shared}
            words = [f"instance {rank.instance}", rank.rank, rank.device, *_assignments(own)]
            typer.echo(f"  {'  '.join(words)}")
        for assignment in _assignments(shared):
            typer.echo(f"  all ranks  {assignment}")
    for note in run.notes:
        typer.echo(f"note: {note}")


def print_json(run: "DryRun") -> None:
    import msgspec

    typer.echo(msgspec.json.encode(run).decode())


def _shared(environments: list[dict[str, str]]) -> dict[str, str]:
    """What is the same in all of them, where there are several."""
    if len(environments) < 2:
        return {}
    first, *others = environments
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _assignments(environment: dict[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
