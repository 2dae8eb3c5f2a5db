"""Which rank is on which node. Plain arithmetic: every node computes it for itself, alike.

The nodes of a launch have ranks 0..N-1. Either each instance spans consecutive nodes of its own, or
each node has whole instances. An attention group is always on one node, since its members sum their
parts in every layer.
"""

from collections.abc import Iterator, Sequence

import msgspec

from engine.topology.ranks import RankId
from engine.topology.schema import Node


class Placement(msgspec.Struct, frozen=True):
    """Where all ranks of a launch are.

    layout: for each node that an instance spans, its ranks, attention first; the same for every
    instance. instances, nnodes: of the launch.
    """

    layout: tuple[tuple[RankId, ...], ...]
    instances: int = 1
    nnodes: int = 1

    def node_of(self, instance: int, rank: RankId) -> int:
        """The node of a rank, whichever its incarnation. Raises ValueError: no such rank."""
        first = self.nodes_of(instance).start
        for offset, ranks in enumerate(self.layout):
            if any((here.role, here.rank) == (rank.role, rank.rank) for here in ranks):
                return first + offset
        raise ValueError(f"no node has {rank}")

    def nodes_of(self, instance: int) -> range:
        """The nodes that an instance spans."""
        if not 0 <= instance < self.instances:
            raise ValueError(f"there is no instance {instance}; there are {self.instances}")
        first = instance * self.nnodes // self.instances
        return range(first, first + len(self.layout))

    def instances_of(self, node: int) -> list[int]:
        """The instances that have ranks on a node, in order."""
        if not 0 <= node < self.nnodes:
            raise ValueError(f"there is no node {node}; there are {self.nnodes}")
        return [each for each in range(self.instances) if node in self.nodes_of(each)]

    def ranks_on(self, node: int) -> list[tuple[int, RankId]]:
        """(instance, rank) of every rank on a node: by instance, attention first."""
        return [
            (instance, rank)
            for instance in self.instances_of(node)
            for rank in self.layout[node - self.nodes_of(instance).start]
        ]


def place(
    groups: int,
    tensor_parallel: int,
    ranks: int,
    instances: int = 1,
    nnodes: int = 1,
    nodes: Sequence[Node] = (),
) -> Placement:
    """Places instances of `groups` attention groups of `tensor_parallel` ranks each, and `ranks`
    expert ranks, on `nnodes` nodes.

    nodes: what the topology says of each node of an instance. Without it, groups and then expert
    ranks are dealt out in order, as even in ranks a node as whole groups allow.

    Raises ValueError when that is impossible.
    """
    if nnodes % instances and instances % nnodes:
        raise ValueError(
            f"{instances} instances cannot be divided over {nnodes} nodes; the number of nodes "
            "has to be a multiple of the number of instances, or the other way round"
        )
    spanned = max(1, nnodes // instances)
    if nodes and len(nodes) != spanned:
        raise ValueError(
            f"{_count(len(nodes), 'section')} [[nodes]], and an instance spans "
            f"{_count(spanned, 'node')} ({_count(instances, 'instance')} on "
            f"{_count(nnodes, 'node')})"
        )
    for number, problem in explicit_problems(nodes, groups, ranks) if nodes else ():
        raise ValueError(problem if number is None else f"node {number}: {problem}")
    if spanned > groups + ranks:
        raise ValueError(
            f"{_count(groups, 'attention group')} and {_count(ranks, 'expert rank')} are too few "
            f"for the {spanned} nodes of an instance; use at most {groups + ranks} nodes"
        )
    divided = nodes or _divided(groups, tensor_parallel, ranks, spanned)
    return Placement(
        layout=tuple(
            (
                *(
                    RankId("attention", group * tensor_parallel + member)
                    for group in sorted(node.attention)
                    for member in range(tensor_parallel)
                ),
                *(RankId("expert", rank) for rank in sorted(node.experts)),
            )
            for node in divided
        ),
        instances=instances,
        nnodes=nnodes,
    )


def explicit_problems(
    nodes: Sequence[Node], groups: int, ranks: int
) -> Iterator[tuple[int | None, str]]:
    """What is wrong with the `[[nodes]]` of an instance: each group and each expert rank has to be
    on one node. Yields the node, or None where it is about all of them, and the problem.
    """
    for key, what, count in (
        ("attention", "attention group", groups),
        ("experts", "expert rank", ranks),
    ):
        homes: dict[int, int] = {}
        for number, node in enumerate(nodes):
            there: tuple[int, ...] = getattr(node, key)
            for each in there:
                if each >= count:
                    yield number, f"{key}: there is no {what} {each}; the last one is {count - 1}"
                elif each in homes:
                    twice = "twice" if homes[each] == number else f"on node {homes[each]} too"
                    yield number, f"{key}: {what} {each} is {twice}; give it one place"
                homes.setdefault(each, number)
        missing = [each for each in range(count) if each not in homes]
        if missing:
            named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            some = "s" * (len(missing) > 1)
            yield None, f"no node has {what}{some} {named}; name each in one of [[nodes]]"
    for number, node in enumerate(nodes):
        if not node.attention and not node.experts:
            yield number, "has no ranks; give it some, or remove it"


def _divided(groups: int, tensor_parallel: int, ranks: int, nodes: int) -> list[Node]:
    """Each node takes, in order, what comes closest to an even share of what is left, and leaves at
    least one group or rank to each of the others.
    """
    sizes = [tensor_parallel] * groups + [1] * ranks
    divided = []
    begin, left = 0, sum(sizes)
    for others in range(nodes - 1, -1, -1):
        end, taken = begin + 1, sizes[begin]
        share = left / (others + 1)
        while end < len(sizes) - others and abs(taken + sizes[end] - share) < abs(taken - share):
            taken += sizes[end]
            end += 1
        units = range(begin, end if others else len(sizes))
        divided.append(
            Node(
                attention=tuple(unit for unit in units if unit < groups),
                experts=tuple(unit - groups for unit in units if unit >= groups),
            )
        )
        begin, left = end, left - taken
    return divided


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
