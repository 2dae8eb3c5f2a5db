"""Which rank is on which node, and who this node is."""

from itertools import combinations, pairwise
from pathlib import Path

import pytest

from engine.topology.load import load_topology
from engine.topology.nodes import Placement, place
from engine.topology.ranks import RankId
from engine.topology.schema import Node


def shown(placement: Placement) -> list[str]:
    """For each node its ranks, as "0:a0 1:e1": attention rank 0 of instance 0, and so on."""
    return [
        " ".join(f"{i}:{rank.role[0]}{rank.rank}" for i, rank in placement.ranks_on(node))
        for node in range(placement.nnodes)
    ]


@pytest.mark.parametrize(
    ("groups", "members", "ranks", "nodes", "loads"),
    [
        (4, 4, 16, 2, [16, 16]),  # the paper's: attention and experts apart
        (2, 2, 12, 2, [8, 8]),
        (1, 1, 2, 3, [1, 1, 1]),
        (3, 4, 4, 2, [8, 8]),
        (1, 64, 4, 3, [64, 2, 2]),
        (2, 16, 16, 4, [16, 16, 8, 8]),
        (3, 1, 2, 1, [5]),
    ],
)
def test_groups_stay_whole_and_nodes_are_even(
    groups: int, members: int, ranks: int, nodes: int, loads: list[int]
) -> None:
    placement = place(groups, members, ranks, 1, nodes)
    assert [len(there) for there in placement.layout] == loads
    everyone = [rank for node in range(nodes) for _, rank in placement.ranks_on(node)]
    assert everyone == [
        *(RankId("attention", rank) for rank in range(groups * members)),
        *(RankId("expert", rank) for rank in range(ranks)),
    ]
    for group in range(groups):
        homes = {
            placement.node_of(0, RankId("attention", group * members + member, incarnation=7))
            for member in range(members)
        }
        assert len(homes) == 1


def test_no_division_in_order_has_a_smaller_largest_node() -> None:
    for groups, members, ranks, nodes in (
        (g, m, e, n)
        for g in (1, 2, 3, 5) for m in (1, 3, 4) for e in (1, 2, 7) for n in (1, 2, 3, 4)
        if n <= g + e
    ):  # fmt: skip
        sizes = [members] * groups + [1] * ranks
        best = min(
            max(sum(sizes[begin:end]) for begin, end in pairwise((0, *cuts, len(sizes))))
            for cuts in combinations(range(1, len(sizes)), nodes - 1)
        )
        loads = [len(there) for there in place(groups, members, ranks, 1, nodes).layout]
        assert max(loads) == best
        assert min(loads) > 0


def test_explicit_nodes_are_followed() -> None:
    nodes = [Node(experts=(2, 0)), Node(attention=(1, 0), experts=(1,))]
    placement = place(2, 2, 3, 1, 2, nodes)
    assert shown(placement) == ["0:e0 0:e2", "0:a0 0:a1 0:a2 0:a3 0:e1"]
    assert placement.node_of(0, RankId("expert", 2)) == 0


def test_instances_span_nodes_of_their_own() -> None:
    placement = place(1, 1, 2, 2, 6)
    assert shown(placement) == ["0:a0", "0:e0", "0:e1", "1:a0", "1:e0", "1:e1"]
    assert placement.node_of(1, RankId("expert", 0)) == 4
    assert placement.nodes_of(1) == range(3, 6)
    assert placement.instances_of(3) == [1]


def test_nodes_have_whole_instances() -> None:
    placement = place(1, 1, 1, 4, 2)
    assert shown(placement) == ["0:a0 0:e0 1:a0 1:e0", "2:a0 2:e0 3:a0 3:e0"]
    assert placement.node_of(2, RankId("attention", 0)) == 1
    assert [placement.instances_of(node) for node in (0, 1)] == [[0, 1], [2, 3]]
    assert [list(placement.nodes_of(each)) for each in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(
    ("instances", "nnodes", "nodes", "problem"),
    [
        (2, 3, (), "2 instances cannot be divided over 3 nodes; the number of nodes has to be"),
        (3, 2, (), "3 instances cannot be divided over 2 nodes"),
        (1, 4, (), "1 attention group and 2 expert ranks are too few for the 4 nodes of an inst"),
        (2, 4, (Node(attention=(0,), experts=(0, 1)),), r"1 section \[\[nodes\]\], and an instance "
         r"spans 2 nodes \(2 instances on 4 nodes\)"),
        (1, 2, (Node(attention=(0,)), Node(experts=(0,))), "no node has expert rank 1"),
        (1, 2, (Node(attention=(0,), experts=(0, 1)), Node()), "node 1: has no ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_explained(
    instances: int, nnodes: int, nodes: tuple[Node, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        place(1, 1, 2, instances, nnodes, nodes)


def test_who_is_not_there_is_not_found() -> None:
    placement = place(1, 1, 1, 2, 2)
    for question in (
        lambda: placement.node_of(0, RankId("expert", 1)),
        lambda: placement.node_of(2, RankId("expert", 0)),
        lambda: placement.ranks_on(2),
        lambda: placement.instances_of(-1),
    ):
        with pytest.raises(ValueError, match="no "):
            question()


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "multi-node.md").read_text()
    example = page.split("To say it yourself, one section a node:\n\n")[1].split("\n\n`")[0]
    path = tmp_path / "my.toml"
    path.write_text("\n".join(line.removeprefix("    ") for line in example.splitlines()))
    topology = load_topology(path)
    assert shown(place(2, 1, 3, 1, 3, topology.nodes)) == ["0:a0 0:a1", "0:e0 0:e1", "0:e2"]
