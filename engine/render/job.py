"""What every scheduler is told of a launch: nodes, devices of each, and the command."""

import re
from collections import Counter

import msgspec

from engine.echo import plain
from engine.errors import UsageError
from engine.launch.command import LaunchCommand
from engine.topology.load import load_topology
from engine.topology.nodes import place
from engine.topology.schema import Kind, Topology

# What both Slurm's file names and the names of Kubernetes' services (RFC 1035) can hold.
_NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,50}[a-z0-9])?")


class Job(msgspec.Struct, frozen=True):
    """devices: most of each kind that a node of it needs, "cpu" for ranks without one; empty where
    their number is found on the node.
    """

    launch: LaunchCommand
    topology: Topology
    nnodes: int
    devices: dict[Kind, int]


def make_job(launch: LaunchCommand, nnodes: int | None) -> Job:
    """nnodes: None is as many as the topology's [[nodes]] ask for, or one.

    Raises UsageError: the topology is wrong, or cannot be divided over so many nodes.
    """
    if not _NAME.fullmatch(launch.name):
        raise UsageError(
            f"--name {plain(launch.name)}: take up to 52 letters a to z, digits and hyphens, "
            "a letter first"
        )
    topology = load_topology(launch.topology, launch.overrides)
    count = topology.instances.count
    if nnodes is None:
        nnodes = len(topology.nodes) * count or 1
    groups, ranks = topology.attention.groups, topology.experts.ranks
    devices: Counter[Kind] = Counter()
    if groups != "auto" and ranks != "auto":
        members = topology.attention.tensor_parallel
        try:
            placement = place(groups, members, ranks, count, nnodes, topology.nodes)
        except ValueError as error:
            raise UsageError(
                f"{topology.source}: {error}; change --nnodes or the topology"
            ) from None
        kinds: dict[str, Kind] = {
            "attention": topology.attention.kind,
            "expert": topology.experts.kind,
        }
        for node in range(nnodes):
            devices |= Counter(kinds[rank.role] for _, rank in placement.ranks_on(node))
    elif nnodes > 1:
        for section, key in (("attention", "groups"), ("experts", "ranks")):
            if getattr(getattr(topology, section), key) == "auto":
                raise UsageError(
                    f'{topology.where(section, key)}: "auto" divides what one node has, and this '
                    f"launch has {nnodes}; set a number"
                )
    return Job(
        launch=msgspec.structs.replace(launch, nnodes=nnodes),
        topology=topology,
        nnodes=nnodes,
        devices=dict(devices),
    )
