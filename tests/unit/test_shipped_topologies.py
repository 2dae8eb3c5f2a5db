"""The topologies and configs that come with asapctl: what fits where, memory included.

Nothing here runs on a device. It is the arithmetic of the plan, for machines that are made up.
"""

import shutil
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.launch.checks import plan_of
from engine.launch.model_dir import find_model_dir, packaged_configs
from engine.launch.plan import Plan
from engine.launch.resources import NodeView
from engine.model.config import load_config
from engine.topology.load import load_topology, packaged_topologies

QWEN, DEEPSEEK = "qwen3-235b-a22b", "deepseek-v3"
# Groups, tensor parallel, expert ranks, transport, 10^9 bytes a device.
SHAPES = {
    "gpu-8": (1, 1, 7, "nccl", 80),
    "atlas-a3": (2, 2, 12, "hccl", 64),
    "d4-t4-e16": (4, 4, 16, "hccl", 64),
}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HCCL_BUFFSIZE", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"):
        monkeypatch.delenv(name, raising=False)


def plan(topology: str, model: str, *overrides: str) -> Plan:
    return plan_of(topology, overrides, model, only_to_look=True, assume_devices=True)


def refusal(topology: str, model: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        plan(topology, model, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("topology", SHAPES)
def test_qwen3_235b_fits(topology: str) -> None:
    groups, members, ranks, transport, gigabytes = SHAPES[topology]
    made = plan(topology, QWEN)
    assert (made.groups, made.tensor_parallel, len(made.experts)) == (groups, members, ranks)
    assert (made.transport, made.dtype, made.max_model_len) == (transport, "bfloat16", 40960)
    for rank in made.ranks:
        assert 5e9 < rank.device_bytes <= gigabytes * 1e9
        assert min(rank.windows_bytes, rank.communicators_bytes) > 0
        assert rank.on_device >= {"windows", "communicators", "weights", "working set"}
    experts = [rank.weights_bytes for rank in made.ranks if rank.id.role == "expert"]
    assert sum(experts) == 94 * 128 * 3 * 4096 * 1536 * 2  # layers, experts, gate, up and down
    assert len({rank.device for rank in made.ranks}) == len(made.ranks)


def test_deepseek_v3_does_not_fit_on_the_papers_instance_and_the_figure_is_told() -> None:
    problem = refusal("d4-t4-e16", DEEPSEEK)
    assert problem.count("\n") == 0
    assert "[experts] an expert rank needs 87 GB of its npu device, which has 64 GB" in problem
    for part in ("16 experts a layer: weights 82 GB", "windows 0.9 GB", "communicators 1.0 GB"):
        assert part in problem
    assert problem.endswith("with [experts] ranks = 24 it would fit")
    made = plan("d4-t4-e16", DEEPSEEK, "experts.ranks=24")
    assert all(rank.device_bytes <= 64e9 for rank in made.ranks)
    assert "needs" in refusal("d4-t4-e16", DEEPSEEK, "experts.ranks=23")
    enough = ["experts.device_memory_gb=128", "attention.device_memory_gb=128"]
    assert plan("d4-t4-e16", DEEPSEEK, *enough).groups == 4


@pytest.mark.parametrize("topology", ["gpu-8", "atlas-a3"])
def test_deepseek_v3_does_not_fit_on_one_node(topology: str) -> None:
    assert "weights 1" in refusal(topology, DEEPSEEK)  # 189 and 112 GB


def test_what_the_header_of_gpu_8_says() -> None:
    two_and_six = ["attention.groups=2", "experts.ranks=6"]
    assert "weights 78 GB" in refusal("gpu-8", QWEN, *two_and_six)
    large = ["attention.device_memory_gb=141", "experts.device_memory_gb=141"]
    assert plan("gpu-8", QWEN, *two_and_six, *large).groups == 2


def test_sizes_of_the_configs_are_the_published_ones() -> None:
    from engine.model.sizes import weight_bytes

    for name, billions in ((QWEN, 235), (DEEPSEEK, 671)):
        config = load_config(find_model_dir(load_topology(), name))
        numbers = weight_bytes(config, "expert", config.experts, 1)
        numbers += weight_bytes(config, "attention", 0, 1)
        assert numbers / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_supernode_is_12_instances_of_two_nodes() -> None:
    devices = set()
    for node in range(24):
        made = plan_of(
            *("cloudmatrix384", [], QWEN),
            only_to_look=True,
            assume_devices=True,
            node=NodeView(24, node),
        )
        assert made.instances == 12
        (instance,) = {instance for instance, _ in made.here}
        (role,) = {rank.id.role for _, rank in made.here}
        assert (instance, role) == (node // 2, ("attention", "expert")[node % 2])
        assert all(rank.device_bytes <= 64e9 for _, rank in made.here)
        devices |= {(node, rank.device) for _, rank in made.here}
    assert len(devices) == 384


def test_the_papers_instance_is_two_nodes() -> None:
    node = NodeView(2, 1)
    made = plan_of("d4-t4-e16", [], QWEN, only_to_look=True, assume_devices=True, node=node)
    assert [str(rank.id) for _, rank in made.here] == [f"expert {rank}" for rank in range(16)]


@pytest.mark.parametrize("topology", [t for t in packaged_topologies() if t.startswith("cpu")])
def test_those_for_a_cpu_run_here(topology: str, tmp_path: Path) -> None:
    from engine.model.demo import make_demo_checkpoint

    make_demo_checkpoint(tmp_path / "demo")
    made = plan_of(topology, [], tmp_path / "demo")
    assert made.transport == ("gloo" if topology == "cpu-gloo" else "shm")
    assert made.tensor_parallel == (2 if topology == "cpu-tp2" else 1)
    assert {rank.device for rank in made.ranks} == {None}


def test_headers_say_what_was_not_run() -> None:
    assert {*SHAPES, "cpu", "cpu-gloo", "cpu-tp2"} <= set(packaged_topologies())
    folder = Path(__file__).parents[2] / "topologies"
    for name in (*SHAPES, "cloudmatrix384"):
        text = (folder / f"{name}.toml").read_text()
        assert "Never run" in text
        assert f"{SHAPES[name][4] if name in SHAPES else 64} GB" in text


@pytest.mark.parametrize("command", ["prefill", "launch"])
def test_a_config_alone_does_not_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from asapctl.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    Path("in.jsonl").write_text('{"prompt": "x"}\n')
    first = "in.jsonl" if command == "prefill" else "cpu"
    result = CliRunner().invoke(app, [command, first, "--model", QWEN])
    text = str(result.exception) + result.output
    assert result.exit_code != 0
    assert f"model {QWEN}: asapctl has its config only, to plan with (asapctl check)" in text


def test_a_folder_goes_before_a_packaged_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert packaged_configs() == (DEEPSEEK, "paced", QWEN)
    monkeypatch.chdir(tmp_path)
    packaged = find_model_dir(load_topology(), QWEN)
    assert packaged.parent.name == "models"
    in_file = load_topology(overrides=[f"model.path={QWEN}"])
    assert find_model_dir(in_file) == packaged
    shutil.copytree(packaged, tmp_path / QWEN)
    assert find_model_dir(load_topology(), QWEN) == tmp_path / QWEN
    with pytest.raises(UsageError, match="safetensors"):  # no weights, and not one of ours
        plan_of("cpu", [], QWEN, only_to_look=True, assume_devices=True)
