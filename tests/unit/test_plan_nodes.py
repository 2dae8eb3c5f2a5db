"""Plans of several nodes and of several instances. The machines are made up."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.launch import fabric
from engine.launch.accelerators import Kind, Slot, assumed
from engine.launch.budget import BASE_BYTES, PROCESS_BYTES
from engine.launch.checks import plan_of
from engine.launch.machine import Machine
from engine.launch.plan import Plan, make_plan
from engine.launch.resources import Assume, NodeView
from engine.model.demo import make_demo_checkpoint
from engine.topology.load import load_topology
from engine.topology.ranks import RankId

GIB = 2**30
BIG = Machine(cores=4, memory_bytes=64 * GIB)
CUDA = ["attention.device=cuda", "experts.device=cuda"]
NPU = ["attention.device=npu", "experts.device=npu"]
TWO_AND_TWO = ["attention.groups=2", "experts.ranks=2"]


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *fabric.INTERFACES.values(),
        "HCCL_BUFFSIZE",
        "NCCL_BUFFSIZE",
        "HCCL_CONNECT_TIMEOUT",
    ):
        monkeypatch.delenv(name, raising=False)
    there = {"lo": ["127.0.0.1"], "eth1": ["10.0.0.1"]}
    monkeypatch.setattr(fabric, "interface_addresses", lambda: there)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, top 2; 4 attention heads; prompts of up to 32768 tokens."""
    path = tmp_path_factory.mktemp("plan") / "demo"
    make_demo_checkpoint(path)
    return path


def plan(
    model: Path,
    *overrides: str,
    nnodes: int = 1,
    node_rank: int = 0,
    address: str = "10.0.0.1",
    machine: Machine = BIG,
    devices: int = 8,
    memory: int = 16 * 10**9,
    assume: Assume = "nothing",
    topology: str | Path = "cpu",
) -> Plan:
    kinds: tuple[Kind, ...] = ("cuda", "npu")
    there = {kind: assumed(kind, devices, memory) for kind in kinds}
    node = NodeView(nnodes, node_rank, address)
    loaded = load_topology(topology, overrides)
    return make_plan(loaded, model, False, machine, there, assume, node)


def problems(model: Path, *overrides: str, **more: object) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan(model, *overrides, **more)  # type: ignore[arg-type]
    return str(caught.value).splitlines()


def test_one_instance_on_one_node_has_all_ranks_here(demo: Path) -> None:
    made = plan(demo, *CUDA, *TWO_AND_TWO)
    assert made.here == tuple((0, rank) for rank in made.ranks)
    assert (made.instances, made.nnodes, made.node_rank, made.address) == (1, 1, 0, "")
    assert made.device_of(0, RankId("expert", 1, 7)) == Slot("cuda", 3, "3")


def test_memory_is_this_node_s_alone(demo: Path) -> None:
    whole = plan(demo, *TWO_AND_TWO, "comm.transport=gloo")
    parts = [plan(demo, *TWO_AND_TWO, nnodes=2, node_rank=rank) for rank in (0, 1)]
    assert [[str(rank.id) for _, rank in part.here] for part in parts] == [
        ["attention 0", "attention 1"],
        ["expert 0", "expert 1"],
    ]
    assert sum(part.memory_needed for part in parts) == whole.memory_needed + BASE_BYTES
    for part in parts:
        assert part.ranks == whole.ranks
    poor = replace(BIG, memory_bytes=parts[1].memory_needed)
    assert plan(demo, *TWO_AND_TWO, nnodes=2, node_rank=1, machine=poor)
    short = [*TWO_AND_TWO, "model.max_model_len=32768"]
    assert "of memory and this machine has" in problems(demo, *short, nnodes=2, machine=poor)[0]


def test_devices_are_this_node_s_alone(demo: Path) -> None:
    more = [*CUDA, "attention.groups=1", "experts.ranks=5"]
    first = plan(demo, *more, nnodes=2, devices=3)
    second = plan(demo, *more, nnodes=2, node_rank=1, devices=3)
    slots = [Slot("cuda", n, str(n)) for n in range(3)]
    assert [rank.device for _, rank in first.here] == slots
    assert [rank.device for _, rank in second.here] == slots
    assert [rank.device for rank in second.ranks] == [None] * 3 + slots
    assert second.device_of(0, RankId("expert", 2)) == slots[0]
    with pytest.raises(ValueError, match="expert 1 of instance 0 is not on node 1"):
        second.device_of(0, RankId("expert", 1))
    (problem,) = problems(demo, *more, nnodes=2, devices=2)
    assert "3 cuda devices are wanted, one a rank, and 2 visible" in problem


def test_a_device_too_small_for_ranks_of_another_node(demo: Path) -> None:
    more = [*CUDA, *TWO_AND_TWO, "experts.device_memory_gb=0.1"]
    assert plan(demo, *more, nnodes=2)
    (problem,) = problems(demo, *more, nnodes=2, node_rank=1)
    assert "[experts] an expert rank needs" in problem


@pytest.mark.parametrize(
    ("overrides", "transport"), [([], "gloo"), (CUDA, "nccl"), (NPU, "hccl"), (CUDA[:1], "gloo")]
)
def test_what_carries_payload_between_nodes(
    demo: Path, overrides: list[str], transport: str
) -> None:
    made = plan(demo, *TWO_AND_TWO, *overrides, nnodes=2)
    assert (made.transport, made.topology.comm.transport) == (transport, transport)
    assert made.address == "10.0.0.1"
    equal = "" if transport == "gloo" else "="
    assert made.environment[f"{transport.upper()}_SOCKET_IFNAME"] == f"{equal}eth1"


def test_what_depends_on_one_machine_is_refused(demo: Path) -> None:
    assert problems(demo, "comm.transport=shm", nnodes=2) == [
        f'cpu.toml: [{section}: "auto" divides what one node has, and this launch has 2; '
        "set a number"
        for section in ("attention] groups", "experts] ranks")
    ] + ['--set comm.transport: shm ends at one node, and this launch has 2; take "auto" or "gloo"']
    (problem,) = problems(demo, *TWO_AND_TWO, "comm.transport=nccl", nnodes=2)
    assert 'take "auto" or "gloo", or set both devices' in problem[problem.index("take") :]


def test_windows_do_not_depend_on_a_node_s_memory(demo: Path) -> None:
    small = replace(BIG, memory_bytes=2 * GIB)
    more = ["attention.groups=2", "experts.ranks=8", "schedule.max_batch_tokens=8192"]
    assert plan(demo, *more, "comm.transport=gloo", machine=small).window_tokens < 8192
    assert plan(demo, *more, machine=small, nnodes=2, node_rank=1).window_tokens == 8192


def test_node_0_decides_how_long_prompts_are(demo: Path) -> None:
    least = plan(demo, *TWO_AND_TWO, "model.max_model_len=4096", nnodes=2).memory_needed
    most = plan(demo, *TWO_AND_TWO, nnodes=2).memory_needed
    tight = replace(BIG, memory_bytes=(least + most) // 2)
    made = plan(demo, *TWO_AND_TWO, nnodes=2, machine=tight)
    assert 4096 < made.max_model_len < 32768
    other = plan(demo, *TWO_AND_TWO, nnodes=2, node_rank=1, machine=tight)
    assert other.max_model_len == 32768
    assert other.refusal(made.max_model_len) is None
    assert any("unless node 0 decides for less" in note for note in other.notes)
    refusal = made.refusal(32768)
    assert refusal and f"set [model] max_model_len to {made.max_model_len}" in refusal
    assert made.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.dtype=bfloat16"], {"[model] dtype"}),
        (["model.max_model_len=5000"], {"[model] max_model_len"}),
        (["comm.window_tokens=100"], {"[comm] window_tokens"}),
        (["schedule.lanes=3"], {"[schedule] lanes"}),
        (["schedule.exclusive_tokens=9000"], {"[schedule] exclusive_tokens"}),
        (["experts.ranks=3"], {"[experts] ranks", "ranks of each node"}),
        (["attention.tensor_parallel=2"], {"[attention] tensor_parallel", "ranks of each node"}),
        (["serve.port=9000", "schedule.max_wait_ms=1"], set()),
    ],
)
def test_what_nodes_must_agree_on(demo: Path, overrides: list[str], names: set[str]) -> None:
    ours = plan(demo, *TWO_AND_TWO, nnodes=2).fingerprint()
    theirs = plan(demo, *TWO_AND_TWO, *overrides, nnodes=2, node_rank=1).fingerprint()
    assert list(ours) == list(theirs)
    assert {name for name in ours if ours[name] != theirs[name]} == names


def test_another_model_of_the_same_sizes_is_noticed(demo: Path, tmp_path: Path) -> None:
    text = (demo / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"x": 1'))
    assert (tmp_path / "config.json").read_text() != text
    (tmp_path / "model.safetensors").symlink_to(demo / "model.safetensors")
    ours, theirs = (plan(model, *TWO_AND_TWO, nnodes=2).fingerprint() for model in (demo, tmp_path))
    assert [name for name in ours if ours[name] != theirs[name]] == ["hash of the model"]


def test_settings_of_hccl_that_both_ends_need_alike(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*NPU, *TWO_AND_TWO]
    ours, cpus = plan(demo, *more, nnodes=2), plan(demo, *TWO_AND_TWO, nnodes=2)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "500")
    monkeypatch.setenv("NCCL_BUFFSIZE", "4194304")
    theirs = plan(demo, *more, nnodes=2, node_rank=1)
    assert ours.fingerprint().keys() == theirs.fingerprint().keys()
    assert theirs.fingerprint()["HCCL_CONNECT_TIMEOUT"] == "500"
    assert ours.fingerprint()["HCCL_CONNECT_TIMEOUT"] == "300"
    assert not any("CCL_" in name for name in cpus.fingerprint())


def test_instances_of_one_node_share_it(demo: Path) -> None:
    one = plan(demo, *CUDA, *TWO_AND_TWO, devices=8)
    two = plan(demo, *CUDA, *TWO_AND_TWO, "instances.count=2", devices=8)
    assert two.instances == 2
    assert [(instance, str(rank.id)) for instance, rank in two.here][3:6] == [
        (0, "expert 1"),
        (1, "attention 0"),
        (1, "attention 1"),
    ]
    assert two.device_of(1, RankId("expert", 1)) == Slot("cuda", 7, "7")
    assert two.ranks == one.ranks
    ranks = one.memory_needed - BASE_BYTES
    assert two.memory_needed == BASE_BYTES + PROCESS_BYTES + 2 * ranks
    (problem,) = problems(demo, *CUDA, *TWO_AND_TWO, "instances.count=3")
    assert "12 cuda devices are wanted" in problem


def test_auto_divides_what_an_instance_gets(demo: Path) -> None:
    made = plan(demo, "instances.count=2", machine=replace(BIG, cores=8))
    assert (made.groups, len(made.experts)) == (4, 4)
    assert not any("take turns" in note for note in made.notes)
    crowded = plan(
        demo,
        "instances.count=2",
        "attention.groups=1",
        "experts.ranks=1",
        machine=replace(BIG, cores=2),
    )
    assert any(note.startswith("4 ranks of one thread share 2 cores") for note in crowded.notes)
    short = replace(BIG, memory_bytes=GIB)
    (problem,) = problems(demo, "instances.count=3", *TWO_AND_TWO, machine=short)
    assert problem.endswith(", or lower [instances] count")


def test_instances_over_nodes(demo: Path) -> None:
    more = [*CUDA, *TWO_AND_TWO, "instances.count=2"]
    second = plan(demo, *more, nnodes=2, node_rank=1, devices=4)
    assert {instance for instance, _ in second.here} == {1}
    assert [rank.device for rank in second.ranks] == [Slot("cuda", n, str(n)) for n in range(4)]
    last = plan(demo, *more, nnodes=4, node_rank=3, devices=2)
    assert [(instance, str(rank.id)) for instance, rank in last.here] == [
        (1, "expert 0"),
        (1, "expert 1"),
    ]
    (problem,) = problems(demo, *more, nnodes=3)
    assert "2 instances cannot be divided over 3 nodes" in problem


def test_explicit_nodes(demo: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        "[attention]\ngroups = 2\n[experts]\nranks = 2\n"
        "[[nodes]]\nexperts = [1]\n[[nodes]]\nattention = [0, 1]\nexperts = [0]\n"
    )
    made = plan(demo, nnodes=2, topology=file)
    assert [str(rank.id) for _, rank in made.here] == ["expert 1"]
    assert made.fingerprint()["ranks of each node"] == (
        "expert 1 | attention 0, attention 1, expert 0"
    )
    for nnodes in (1, 3):
        (problem,) = problems(demo, nnodes=nnodes, topology=file)
        assert problem.startswith(f"{file}: 2 sections [[nodes]], and an instance spans {nnodes}")
        assert problem.endswith("; run it with --nnodes 2, or change [[nodes]]")


def test_wrong_keys_bring_up_no_problems_of_nodes(demo: Path) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(
            "cpu-2a2e",
            ["attention.groups=0", "instances.count=5", "comm.transport=shm"],
            demo,
            node=NodeView(7, 6, "10.0.0.1"),
        )
    found = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in found] == [
        "--set attention.groups",
        "--set comm.transport",
    ]


def test_a_plan_for_any_node_of_machines_that_are_elsewhere(demo: Path) -> None:
    more = [*NPU, *TWO_AND_TWO, "attention.device_memory_gb=64", "experts.device_memory_gb=64"]
    for rank in range(4):
        made = plan(demo, *more, nnodes=4, node_rank=rank, address="", devices=0, assume="devices")
        assert [each.device for _, each in made.here] == [Slot("npu", 0, "0")]
        assert "HCCL_SOCKET_IFNAME" not in made.environment
