"""Plans of the synchronous policies: one batch a group, and where ranks stand for one device."""

import os
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.launch.cores import core_of
from engine.launch.machine import Machine
from engine.launch.plan import Plan, make_plan
from engine.launch.resources import NodeView
from engine.model.demo import make_demo_checkpoint
from engine.topology.load import load_topology
from engine.topology.ranks import RankId

GIB = 2**30


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, top 2; prompts of up to 32768 tokens."""
    path = tmp_path_factory.mktemp("plan") / "demo"
    make_demo_checkpoint(path)
    return path


def plan(
    model: Path, policy: str, *overrides: str, cores: int = 4, gib: float = 64, nodes: int = 1
) -> Plan:
    topology = load_topology("cpu", [f"schedule.policy={policy}", *overrides])
    machine = Machine(cores=cores, memory_bytes=int(gib * GIB))
    return make_plan(topology, model, machine=machine, node=NodeView(nodes, 0, "127.0.0.1"))


@pytest.mark.parametrize(
    ("cores", "overrides", "groups", "ranks"),
    [
        (1, [], 1, 1),
        (3, [], 3, 3),
        (64, [], 8, 8),
        (4, ["attention.groups=2"], 2, 2),
        (4, ["experts.ranks=3"], 3, 3),
        (4, ["attention.tensor_parallel=2"], 2, 4),
        (2, ["attention.groups=5", "experts.ranks=5"], 5, 5),
    ],
)
def test_every_attention_rank_has_an_expert_rank_on_its_device(
    demo: Path, cores: int, overrides: list[str], groups: int, ranks: int
) -> None:
    made = plan(demo, "sync", *overrides, cores=cores)
    assert (made.groups, len(made.experts)) == (groups, ranks)
    assert made.senders == ranks


def test_numbers_that_cannot_share_devices_are_refused(demo: Path) -> None:
    with pytest.raises(UsageError, match=r'sync has one expert rank .* set 3 or "auto", not 2'):
        plan(demo, "sync", "attention.groups=3", "experts.ranks=2")
    assert plan(demo, "sync-afd", "attention.groups=3", "experts.ranks=2").senders == 3


def test_where_devices_are_shared_all_ranks_are_on_one_node(demo: Path) -> None:
    ranks = ("attention.groups=2", "experts.ranks=2")
    with pytest.raises(UsageError, match="sync-chunked runs on one node only; take sync-afd"):
        plan(demo, "sync-chunked", *ranks, nodes=2)
    assert plan(demo, "sync-afd", *ranks, nodes=2).nnodes == 2


def test_memory_takes_groups_and_ranks_together(demo: Path) -> None:
    made = plan(demo, "sync", cores=8, gib=2)
    assert made.groups == len(made.experts) < 8
    assert any("memory has no room for more" in note for note in made.notes)


@pytest.mark.parametrize("policy", ["sync", "sync-chunked", "sync-afd"])
def test_a_group_has_one_batch_at_a_time(demo: Path, policy: str) -> None:
    assert plan(demo, policy, "schedule.lanes=3").lanes == 1


def test_a_work_item_holds_the_rows_of_all_groups(demo: Path) -> None:
    asynchronous = plan(demo, "asap", "attention.groups=4", "experts.ranks=4")
    together = plan(demo, "sync-afd", "attention.groups=4", "experts.ranks=4")
    ones, all_ = (
        next(rank.working_set_bytes for rank in made.ranks if rank.id.role == "expert")
        for made in (asynchronous, together)
    )
    assert all_ > 3 * ones


def test_cut_prompts_are_kept_and_windows_hold_a_chunk(demo: Path) -> None:
    whole, cut = plan(demo, "sync"), plan(demo, "sync-chunked", "schedule.chunk_tokens=512")
    assert whole.ranks[0].kv_bytes == 0
    assert cut.ranks[0].kv_bytes > 0
    assert cut.window_tokens == 512


@pytest.mark.parametrize("policy", ["sync", "sync-chunked", "sync-afd"])
def test_accelerators_are_refused_by_name(policy: str) -> None:
    with pytest.raises(UsageError, match=rf'device: "{policy}" is built for "cpu" and "paced"'):
        load_topology("cpu", [f"schedule.policy={policy}", "experts.device=cuda"])


def test_ranks_of_one_device_share_a_core(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 9})
    made = plan(demo, "sync", "attention.groups=2")
    attention, experts = (
        [core_of(made, 0, RankId(role, rank)) for rank in range(2)]
        for role in ("attention", "expert")
    )
    assert attention == experts == [3, 5]
    crowded = plan(demo, "sync", "attention.groups=4")
    apart = plan(demo, "sync-afd", "attention.groups=2")
    assert (
        core_of(crowded, 0, RankId("expert", 0)) is core_of(apart, 0, RankId("expert", 0)) is None
    )
