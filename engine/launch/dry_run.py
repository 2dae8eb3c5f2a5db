"""What a launch would start, and where: the command of every node, and every rank's environment.

Memory and devices are taken to be there, so that a laptop can look at a supernode.
"""

from collections.abc import Callable

import msgspec

from engine.launch.checks import plan_of
from engine.launch.command import LaunchCommand
from engine.launch.resources import NodeView


class RankRun(msgspec.Struct, frozen=True):
    """One rank. device: RankPlan's place. environment: what is set for it, its mask included."""

    instance: int
    rank: str
    device: str
    environment: dict[str, str]


class NodeRun(msgspec.Struct, frozen=True):
    """One node: its command, its ranks, and on node 0 the instances whose controllers it has."""

    node_rank: int
    command: list[str]
    controllers: list[int]
    ranks: list[RankRun]


class DryRun(msgspec.Struct, frozen=True):
    topology: str
    model: str
    transport: str
    instances: int
    nodes: list[NodeRun]
    notes: list[str]


def dry_run(launch: LaunchCommand, on_note: Callable[[str], None] = lambda note: None) -> DryRun:
    """Plans every node, and starts nothing. Raises UsageError with every problem, one a line."""
    nodes: list[NodeRun] = []
    notes: list[str] = []
    for node_rank in range(launch.nnodes):
        plan = plan_of(
            launch.topology,
            launch.overrides,
            launch.model,
            keep_kv=lambda topology: topology.serve.kv_dir is not None,
            on_note=on_note,
            only_to_look=True,
            assume_devices=True,
            node=NodeView(launch.nnodes, node_rank),
        )
        notes = notes or list(plan.notes)  # node 0's
        nodes.append(
            NodeRun(
                node_rank=node_rank,
                command=launch.words(node_rank),
                controllers=list(range(plan.instances)) if node_rank == 0 else [],
                ranks=[
                    RankRun(
                        instance=instance,
                        rank=str(rank.id),
                        device=rank.place,
                        environment=plan.environment_of(rank.device),
                    )
                    for instance, rank in plan.here
                ],
            )
        )
    notes.append("masks are as on nodes whose devices are all visible; ports are as free here")
    if launch.nnodes > 1:
        notes.append("each node also sets the interface that holds its own address")
    return DryRun(
        topology=plan.topology.source,
        model=str(plan.model_dir),
        transport=plan.transport,
        instances=plan.instances,
        nodes=nodes,
        notes=notes,
    )
