"""Plans for devices. There are none here: what a machine has is made up."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.device.grouped_mlp import workspace_bytes
from engine.errors import UsageError
from engine.launch.accelerators import Kind, Slot, assumed
from engine.launch.budget import DRIVER_BYTES, show_device_bytes
from engine.launch.checks import plan_of
from engine.launch.machine import Machine
from engine.launch.plan import Plan, make_plan
from engine.launch.resources import Assume
from engine.model.demo import make_demo_checkpoint
from engine.topology.load import load_topology

GIB = 2**30
BIG = Machine(cores=4, memory_bytes=64 * GIB)
CUDA = ["attention.device=cuda", "experts.device=cuda"]
NPU = ["attention.device=npu", "experts.device=npu"]
TWO_AND_TWO = ["attention.groups=2", "experts.ranks=2"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HCCL_BUFFSIZE", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, top 2; 4 attention heads and 2 key-value heads; float32."""
    path = tmp_path_factory.mktemp("plan") / "demo"
    make_demo_checkpoint(path)
    return path


def plan(
    model: Path,
    *overrides: str,
    machine: Machine = BIG,
    devices: int = 8,
    memory: int | None = 16 * 10**9,
    kv: bool = False,
    assume: Assume = "nothing",
) -> Plan:
    kinds: tuple[Kind, ...] = ("cuda", "npu")
    there = {kind: assumed(kind, devices, memory) for kind in kinds}
    return make_plan(load_topology("cpu", overrides), model, kv, machine, there, assume)


def problems(model: Path, *overrides: str, devices: int = 8, **more: object) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan(model, *overrides, devices=devices, **more)  # type: ignore[arg-type]
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], "shm"),
        (CUDA, "nccl"),
        (NPU, "hccl"),
        (["attention.device=cuda"], "shm"),
        (["attention.device=cuda", "experts.device=npu"], "shm"),
        ([*CUDA, "comm.transport=gloo"], "gloo"),
        ([*NPU, "comm.transport=shm"], "shm"),
    ],
)
def test_auto_takes_what_connects_both_sides(
    demo: Path, overrides: list[str], transport: str
) -> None:
    made = plan(demo, *overrides)
    assert (made.transport, made.topology.comm.transport) == (transport, transport)


def test_a_transport_between_devices_that_it_does_not_reach(demo: Path) -> None:
    (problem,) = problems(demo, "comm.transport=nccl", "experts.device=cuda")
    assert problem == (
        "--set comm.transport: nccl connects cuda devices only, and [attention] device is cpu; "
        'take "auto", "shm" or "gloo", or set both devices to "cuda"'
    )
    (problem,) = problems(demo, "comm.transport=hccl", *CUDA)
    assert "[attention] device is cuda and [experts] device is cuda" in problem


def test_members_of_a_group_divide_heads_and_rows(demo: Path) -> None:
    more = ["experts.ranks=2", "comm.window_tokens=101"]
    one = plan(demo, "attention.groups=2", *more)
    two = plan(demo, "attention.groups=3", "attention.tensor_parallel=2", *more)
    assert (two.groups, two.tensor_parallel, two.window_tokens) == (3, 2, 101)
    assert [str(rank.id) for rank in two.ranks[:6]] == [f"attention {n}" for n in range(6)]
    assert {window.rows for window in two.windows} == {51}
    assert two.ranks[6].windows_bytes == 6 * two.windows[0].total_bytes
    assert one.ranks[0].weights_bytes > two.ranks[0].weights_bytes > one.ranks[0].weights_bytes / 2
    even = ["experts.ranks=2", "comm.window_tokens=100"]
    alone = plan(demo, "attention.groups=2", *even).ranks[-1]
    shared = plan(demo, "attention.tensor_parallel=2", *even).ranks[-1]
    side_by_side = 2 * 100 * two.config.hidden_size * 4  # members' rows, in and out
    assert shared.working_set_bytes - alone.working_set_bytes == side_by_side
    assert "GLOO_SOCKET_IFNAME" in two.environment
    assert one.environment == {}


def test_heads_that_cannot_be_divided(demo: Path) -> None:
    (problem,) = problems(demo, "attention.tensor_parallel=3")
    assert problem.startswith("--set attention.tensor_parallel: 4 attention heads")
    assert "possible: 1, 2, 4" in problem
    (problem,) = problems(
        demo, "attention.groups=100", "attention.tensor_parallel=4", assume="devices"
    )
    assert "100 groups of 4 ranks are too many; at most 240 ranks" in problem


def test_a_divided_group_puts_caches_together_on_its_first_member(demo: Path) -> None:
    alone = plan(demo, kv=True).ranks[0]
    first, second, *_ = plan(demo, "attention.tensor_parallel=2", kv=True).ranks
    assert first.kv_bytes == second.kv_bytes == alone.kv_bytes // 2
    per_token = 4 * 2 * 2 * 32 * 4  # layers, key and value, heads, features, bytes
    assert (first.gathered_bytes, second.gathered_bytes) == (32768 * per_token, 0)


def test_without_shared_memory_both_ends_have_windows(demo: Path) -> None:
    shm = plan(demo, *TWO_AND_TWO)
    gloo = plan(demo, *TWO_AND_TWO, "comm.transport=gloo")
    assert [rank.windows_bytes for rank in shm.ranks[:2]] == [0, 0]
    sizes = [window.total_bytes for window in gloo.windows]
    assert [rank.windows_bytes for rank in gloo.ranks] == [sum(sizes)] * 2 + [2 * sizes[0]] * 2
    assert gloo.memory_needed - shm.memory_needed == 2 * sum(sizes)
    assert all(rank.communicators_bytes == 0 for rank in gloo.ranks)


def test_communicators_and_windows_lie_on_devices(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "3")
    made = plan(demo, *NPU, "attention.groups=2", "experts.ranks=3")
    each = 2 * 3 * 2**20
    assert [rank.communicators_bytes for rank in made.ranks] == [6 * each] * 2 + [4 * each] * 3
    for rank in made.ranks:
        assert rank.device_bytes == rank.total - rank.process_bytes
        assert rank.driver_bytes == DRIVER_BYTES
    divided = plan(demo, *NPU, "experts.ranks=3", "attention.tensor_parallel=2")
    assert divided.ranks[0].communicators_bytes == 7 * each
    assert divided.environment["HCCL_DETERMINISTIC"] == "true"
    assert any("HCCL_BUFFSIZE=3 is kept" in note for note in divided.notes)


def test_windows_of_devices_lie_in_the_host_s_memory_with_shm(demo: Path) -> None:
    made = plan(demo, *TWO_AND_TWO, "experts.device=cuda")
    attention, expert = made.ranks[0], made.ranks[-1]
    assert (attention.device_bytes, attention.device) == (0, None)
    assert expert.host_bytes == expert.process_bytes + expert.windows_bytes
    assert expert.windows_bytes == 2 * made.windows[1].total_bytes
    cpu = plan(demo, *TWO_AND_TWO).ranks[-1]
    # What it copies to the device, and what it computes all experts at once with.
    shape = made.windows[1]
    sizes = made.config.hidden_size, made.config.expert_intermediate, shape.payload_bytes
    workspace = workspace_bytes(shape.rows, shape.pairs, shape.local_experts, *sizes)
    more = expert.working_set_bytes - cpu.working_set_bytes
    assert more == shape.total_bytes + workspace


def test_every_rank_has_a_device_of_its_own(demo: Path) -> None:
    made = plan(demo, *CUDA, "attention.tensor_parallel=2", "attention.groups=2", devices=8)
    assert [rank.device for rank in made.ranks] == [Slot("cuda", n, str(n)) for n in range(8)]
    assert len(made.experts) == 4
    environment = made.environment_of(made.ranks[5].device)
    assert environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment.items() >= made.environment.items() > set()
    assert "CUDA_VISIBLE_DEVICES" not in made.environment_of(None)


@pytest.mark.parametrize(
    ("overrides", "devices", "groups", "ranks"),
    [
        (CUDA, 8, 4, 4),
        (CUDA, 3, 2, 1),
        ([*CUDA, "attention.tensor_parallel=4"], 8, 1, 4),
        ([*CUDA, "experts.ranks=2"], 8, 6, 2),
        ([*CUDA, "attention.groups=5"], 8, 5, 3),
        (["attention.device=cuda"], 2, 2, 4),
        (["experts.device=npu"], 6, 4, 6),
    ],
)
def test_auto_divides_the_devices(
    demo: Path, overrides: list[str], devices: int, groups: int, ranks: int
) -> None:
    made = plan(demo, *overrides, devices=devices)
    assert (made.groups, len(made.experts)) == (groups, ranks)


def test_too_few_devices_says_how_many(demo: Path) -> None:
    (problem,) = problems(demo, *NPU, *TWO_AND_TWO, devices=3)
    assert problem.startswith("cpu.toml: 4 npu devices are wanted, one a rank, and 3 visible")
    assert problem.endswith("`asapctl check --assume-devices` plans for another machine")
    made = plan(demo, *NPU, *TWO_AND_TWO, devices=0, assume="devices")
    assert [rank.device for rank in made.ranks] == [Slot("npu", n, str(n)) for n in range(4)]
    assert made.assumed


def test_too_small_a_device_says_what_takes_it(demo: Path) -> None:
    small = [*CUDA, *TWO_AND_TWO, "comm.window_tokens=1000000", "attention.device_memory_gb=50"]
    (problem,) = problems(demo, *small, "experts.device_memory_gb=1", devices=4, memory=None)
    assert problem.startswith("cpu.toml: [experts] an expert rank needs ")
    assert "of its cuda device, which has 1.0 GB (4 experts a layer: weights" in problem
    assert problem.endswith("lower [comm] window_tokens")
    both = problems(demo, *CUDA, *TWO_AND_TWO, memory=10**8)
    assert [line.split("needs")[0] for line in both] == [
        "cpu.toml: [attention] an attention rank ",
        "cpu.toml: [experts] an expert rank ",
    ]


def test_the_longest_prompt_is_what_fits_on_a_device(demo: Path) -> None:
    one = ["attention.device=cuda", "schedule.lanes=1", "comm.window_tokens=4096"]
    roomy = plan(demo, *one)
    least = plan(demo, *one, "model.max_model_len=4096").ranks[0].device_bytes
    tight = (roomy.ranks[0].device_bytes + least) // 2
    made = plan(demo, *one, memory=tight)
    assert 4096 < made.max_model_len < 32768
    assert made.ranks[0].device_bytes <= tight
    assert any(f"{show_device_bytes(tight)} of a device's memory" in note for note in made.notes)
    (problem,) = problems(demo, *one, "model.max_model_len=32768", memory=tight)
    assert f"each has {show_device_bytes(tight)}; {made.max_model_len} is the most" in problem


def test_the_memory_of_a_device_is_the_smaller_of_what_is_said_and_what_is_there(
    demo: Path,
) -> None:
    more = plan(demo, *CUDA, "experts.device_memory_gb=80")
    assert more.limits.device("expert") == 16 * 10**9
    assert any("device_memory_gb is 80, and a cuda device here has 16 GB" in n for n in more.notes)
    less = plan(demo, *CUDA, "experts.device_memory_gb=8")
    assert (less.limits.attention, less.limits.expert) == (16 * 10**9, 8 * 10**9)
    assert plan(demo, *CUDA, "experts.device_memory_gb=80", assume="devices").limits.expert == (
        80 * 10**9
    )
    unknown = problems(demo, *CUDA, "attention.device_memory_gb=80", memory=None)
    assert unknown == [
        "cpu.toml: [experts] device_memory_gb: how much memory a cuda device has is not known "
        "here; set it, in 10^9 bytes"
    ]


def test_assumed_devices_are_as_many_as_it_takes(demo: Path) -> None:
    more = [*CUDA, "comm.window_tokens=1024", "attention.device_memory_gb=9"]
    assert len(plan(demo, *more, devices=0, memory=9 * 10**9, assume="devices").experts) == 1
    one = plan(demo, *more, "experts.ranks=1", devices=0, assume="devices")
    full = one.ranks[-1].device_bytes
    made = plan(demo, *more, devices=0, memory=full - 1, assume="devices")
    assert len(made.experts) == 2
    poor = replace(BIG, memory_bytes=GIB)
    assert plan(demo, *CUDA, *TWO_AND_TWO, machine=poor, assume="devices").assumed
    assert "of memory and" in problems(demo, *CUDA, *TWO_AND_TWO, machine=poor)[0]


def test_a_device_computes_in_the_checkpoint_s_own_type(demo: Path, tmp_path: Path) -> None:
    text = (demo / "config.json").read_text()
    assert '"float32"' in text
    (tmp_path / "config.json").write_text(text.replace('"float32"', '"bfloat16"'))
    (tmp_path / "model.safetensors").symlink_to(demo / "model.safetensors")
    assert plan(tmp_path).dtype == "float32"
    assert plan(tmp_path, *CUDA).dtype == "bfloat16"
    assert plan(tmp_path, "experts.device=npu").dtype == "bfloat16"
    assert plan(tmp_path, *CUDA, "model.dtype=float16").dtype == "float16"


def test_a_setting_of_the_user_s_that_cannot_be(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "soon")
    (problem,) = problems(demo, *NPU)
    assert problem.startswith("HCCL_CONNECT_TIMEOUT=soon")
    monkeypatch.delenv("HCCL_CONNECT_TIMEOUT")
    monkeypatch.setenv("NCCL_BUFFSIZE", "x")
    (problem,) = problems(demo, *CUDA)
    assert problem.startswith("NCCL_BUFFSIZE=x")


def test_wrong_keys_do_not_bring_up_missing_devices() -> None:
    with pytest.raises(UsageError) as caught:
        plan_of("cpu", [*NPU, "attention.groups=0", "experts.ranks=9"], None)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "--set attention.groups",
        "--set experts.ranks",
    ]
