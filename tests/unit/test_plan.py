import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.launch.budget import show_bytes
from engine.launch.checks import plan_of
from engine.launch.machine import Machine
from engine.launch.model_dir import find_model_dir
from engine.launch.plan import Plan, make_plan
from engine.model.demo import make_demo_checkpoint
from engine.topology.load import load_topology

GIB = 2**30
BIG = Machine(cores=4, memory_bytes=64 * GIB)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 experts, top 2; prompts of up to 32768 tokens."""
    path = tmp_path_factory.mktemp("plan") / "demo"
    make_demo_checkpoint(path)
    return path


def plan(
    model: Path, *overrides: str, machine: Machine = BIG, topology: str = "cpu", kv: bool = False
) -> Plan:
    return make_plan(load_topology(topology, overrides), model, kv, machine)


def problems(model: Path, *overrides: str, machine: Machine = BIG) -> list[str]:
    with pytest.raises(UsageError) as caught:
        plan(model, *overrides, machine=machine)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("cores", "overrides", "groups", "ranks"),
    [
        (1, [], 1, 1),
        (2, [], 2, 2),
        (3, [], 3, 3),
        (64, [], 8, 8),
        (4, ["attention.groups=3"], 3, 4),
        (4, ["experts.ranks=1"], 4, 1),
        (2, ["attention.groups=5"], 5, 2),
        (2, ["attention.groups=3", "experts.ranks=8"], 3, 8),
    ],
)
def test_auto_gives_each_side_all_cores(
    demo: Path, cores: int, overrides: list[str], groups: int, ranks: int
) -> None:
    made = plan(demo, *overrides, machine=replace(BIG, cores=cores))
    assert (made.groups, len(made.experts)) == (groups, ranks)
    asked = len(overrides) == 2
    assert any("take turns" in note for note in made.notes) == asked


def test_a_plan_leaves_nothing_open(demo: Path) -> None:
    made = plan(demo, topology="cpu-3a2e")
    assert "auto" not in repr(made.topology)
    assert made.topology.experts.ranks == 2
    assert (made.dtype, made.max_model_len, made.window_tokens) == ("float32", 32768, 4096)
    assert made.experts == (range(4), range(4, 8))
    assert [str(rank.id) for rank in made.ranks] == [
        "attention 0",
        "attention 1",
        "attention 2",
        "expert 0",
        "expert 1",
    ]
    for window, rank in zip(made.windows, made.ranks[3:], strict=True):
        assert (window.rows, window.local_experts, window.lanes) == (4096, 4, 2)
        assert rank.windows_bytes == 3 * window.total_bytes
    assert made.memory_needed > sum(rank.total for rank in made.ranks)
    assert len(made.model_hash) >= 16
    weights = (demo / "model.safetensors").stat().st_size
    attention, *_, expert = made.ranks
    assert attention.weights_bytes + 2 * expert.weights_bytes == pytest.approx(weights, rel=0.01)


def test_uneven_experts_and_payload_size(demo: Path) -> None:
    made = plan(demo, "experts.ranks=3", "model.dtype=bfloat16", "comm.window_tokens=100")
    assert sorted(len(experts) for experts in made.experts) == [2, 3, 3]
    assert [window.local_experts for window in made.windows] == [len(e) for e in made.experts]
    assert {(window.rows, window.payload_bytes) for window in made.windows} == {(100, 2)}


def test_longest_prompt_is_what_fits_and_says_so(demo: Path) -> None:
    topology = "cpu-2a2e"
    roomy = plan(demo, topology=topology)
    least = plan(demo, "model.max_model_len=4096", topology=topology).memory_needed
    tight = replace(BIG, memory_bytes=(least + roomy.memory_needed) // 2)
    made = plan(demo, "comm.window_tokens=4096", topology=topology, machine=tight)
    assert 4096 < made.max_model_len < 32768
    assert made.memory_needed <= tight.memory_bytes
    assert any(f"up to {made.max_model_len} tokens" in note for note in made.notes)
    one_more = ["comm.window_tokens=4096", f"model.max_model_len={made.max_model_len + 1}"]
    with pytest.raises(UsageError, match=f"{made.max_model_len} is the most that fits"):
        plan(demo, *one_more, topology=topology, machine=tight)


@pytest.mark.parametrize(
    ("overrides", "held"),
    [
        (["schedule.lanes=3"], 3 * 16384),  # each lane may hold one prompt that is just not alone
        (["schedule.exclusive_tokens=4096"], 32768),  # a long prompt alone
        (["schedule.lanes=3", "model.max_model_len=100"], 3 * 4096),  # full batches
    ],
)
def test_exported_caches_count(demo: Path, overrides: list[str], held: int) -> None:
    bare, kept = plan(demo, *overrides), plan(demo, *overrides, kv=True)
    per_token = 4 * 2 * 2 * 32 * 4  # layers, key and value, heads, features, bytes
    for before, after in zip(bare.ranks, kept.ranks, strict=True):
        tokens = held if before.id.role == "attention" else 0
        assert after.total - before.total == tokens * per_token


def test_a_working_set_holds_every_lane_or_the_longest_prompt(demo: Path) -> None:
    def working_set(*overrides: str) -> int:
        return plan(demo, *overrides).ranks[0].working_set_bytes

    one = working_set("schedule.lanes=1", "schedule.exclusive_tokens=32768")
    assert working_set("schedule.lanes=3", "schedule.exclusive_tokens=32768") == 3 * one
    assert working_set("schedule.lanes=1", "schedule.exclusive_tokens=4096") == one


def test_auto_shrinks_to_the_memory_there_is(demo: Path) -> None:
    made = plan(demo, machine=Machine(64, GIB))
    assert made.groups < 8
    assert abs(made.groups - len(made.experts)) <= 1
    assert made.memory_needed <= GIB
    assert any("memory has no room for more" in note for note in made.notes)
    small = plan(demo, "attention.groups=4", "experts.ranks=8", machine=Machine(8, 2 * GIB))
    assert small.window_tokens < 4096
    assert sum(rank.windows_bytes for rank in small.ranks) <= 2 * GIB // 8
    assert any(f"windows of {small.window_tokens} tokens" in note for note in small.notes)


def test_too_little_memory_says_how_much_and_what_to_do(demo: Path) -> None:
    (problem,) = problems(
        demo, "comm.window_tokens=1000000", "attention.groups=2", machine=Machine(2, GIB, "a job")
    )
    assert problem.startswith("cpu.toml: needs ")
    assert "a job has 1.0 GiB free" in problem
    assert problem.endswith("lower [comm] window_tokens or [schedule] lanes")


def test_all_problems_come_at_once(demo: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((demo / "config.json").read_bytes())
    found = problems(broken, "experts.ranks=9", "model.max_model_len=40000")
    assert found[:2] == [
        "--set experts.ranks: 9 ranks for 8 experts leave some without any; at most 8",
        "--set model.max_model_len: 40000 is more than the model's own limit, 32768; lower it",
    ]
    assert len(found) == 3
    assert "safetensors" in found[2]


def test_more_windows_than_open_files_are_refused(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    (problem,) = problems(demo, "attention.groups=8", "experts.ranks=4")
    assert problem.startswith("--set experts.ranks: 8 x 4 windows need 128 open files and 64 are")
    assert any("from 1 to 240" in line for line in problems(demo, "attention.groups=241"))


def test_a_model_is_found_where_the_topology_or_the_option_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "topologies"
    folder.mkdir()
    (folder / "mine.toml").write_text('[model]\npath = "../model"', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    mine = load_topology("topologies/mine.toml")
    assert find_model_dir(mine).resolve() == tmp_path / "model"
    assert find_model_dir(mine, Path("other")) == tmp_path / "other"
    assert find_model_dir(mine, "~/m") == Path("/home/someone/m")
    over = load_topology("topologies/mine.toml", ["model.path=here"])
    assert find_model_dir(over) == tmp_path / "here"


def test_the_demo_is_made_once_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes: list[str] = []
    path = find_model_dir(load_topology(), on_note=notes.append)
    assert path.parent == tmp_path / "asapctl"
    made = (path / "config.json").stat().st_mtime_ns
    assert find_model_dir(load_topology(), on_note=notes.append) == path
    assert (path / "config.json").stat().st_mtime_ns == made
    assert "making a small demo checkpoint" in notes[0]
    assert "using the demo checkpoint" in notes[1]

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="give a model with --model"):
        find_model_dir(load_topology())


def test_sizes_for_people() -> None:
    shown = [show_bytes(size) for size in (0, 999, 2048, 1023 * 1024, 12 * 2**20, 5 * 2**40)]
    assert shown == ["0 B", "999 B", "2.0 KiB", "1.0 MiB", "12 MiB", "5.0 TiB"]


def test_a_model_in_a_home_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--model: ~nosuchuser/m is in no home folder"):
        find_model_dir(load_topology(), "~nosuchuser/m")
    for overrides in ([], ["attention.groups=0"]):  # with and without other problems
        with pytest.raises(UsageError, match="--model: ~nosuchuser/m is in no home folder"):
            plan_of("cpu", overrides, "~nosuchuser/m")
    with pytest.raises(UsageError, match=r"--set model\.path: ~nosuchuser/m is in no home"):
        plan_of("cpu", ["model.path=~nosuchuser/m"], None)


@pytest.mark.parametrize("overrides", [[], ["attention.groups=0"]])
def test_a_model_s_name_with_a_line_break(overrides: list[str]) -> None:
    for given in ((overrides, "a\nb"), ([*overrides, "model.path=a\nb"], None)):
        with pytest.raises(UsageError) as caught:
            plan_of("cpu", *given)
        lines = str(caught.value).splitlines()
        assert r"a\nb holds a line break" in lines[-1]
        assert len(lines) == 1 + len(overrides)


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 300])
def test_a_model_s_name_that_no_file_can_have(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    with pytest.raises(UsageError, match="name too long"):
        plan_of("cpu", [], name)


def test_the_demo_s_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    assert find_model_dir(load_topology()).is_relative_to(tmp_path / "relative")


def test_a_config_beyond_its_weights_is_told_quickly(demo: Path, tmp_path: Path) -> None:
    raw = json.loads((demo / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(demo / "model.safetensors")
    for changes, words in (
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000 is too large"),
        ({"num_experts": 10**7}, "num_experts 10000000 is too large"),
        ({"num_hidden_layers": 1000}, "has 1000 layers, but the weights hold 4"),
        ({"num_experts": 16384}, "have 16384 experts, but the weights hold 8"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | changes))
        begun = time.thread_time()
        [*_, problem] = problems(tmp_path)
        assert words in problem
        assert time.thread_time() - begun < 5
