import os
from importlib import resources
from pathlib import Path

import pytest

from engine.errors import UsageError
from engine.topology.load import TopologyError, load_topology, packaged_topologies
from engine.topology.schema import SECTIONS, SUPPORTED, Node, Schedule, Serve, Topology
from engine.topology.validate import field_types


def problems(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_topology(path, overrides)
    return str(caught.value).splitlines()


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "mine.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_every_packaged_topology_loads_and_says_where_it_fits() -> None:
    names = packaged_topologies()
    assert {"cpu", "cpu-2a2e", "cpu-3a2e"} <= set(names)
    for name in names:
        assert load_topology(name).source == f"{name}.toml"
        assert load_topology(f"{name}.toml") == load_topology(name)
        header = (resources.files("topologies") / f"{name}.toml").read_text(encoding="utf-8")
        assert header.startswith("# Fits ")
    topology = load_topology("cpu-3a2e")
    assert (topology.attention.groups, topology.experts.ranks) == (3, 2)


def test_an_empty_file_is_all_defaults(in_folder: Path) -> None:
    topology = load_topology(write(""))
    assert topology == Topology(source="mine.toml", folder=in_folder)
    assert topology.schedule.max_batch_tokens == Schedule().max_batch_tokens


def test_a_file_wins_over_a_packaged_name_and_a_folder_does_not(in_folder: Path) -> None:
    Path("cpu-2a2e.toml").mkdir()
    assert load_topology("cpu-2a2e.toml").attention.groups == 2
    write("[attention]\ngroups = 7", "cpu-3a2e.toml")
    assert load_topology("cpu-3a2e.toml").attention.groups == 7
    assert load_topology("cpu-3a2e").attention.groups == 3


def test_byte_order_mark_and_crlf_are_fine(in_folder: Path) -> None:
    Path("mine.toml").write_bytes(b"\xef\xbb\xbf[attention]\r\ngroups = 2\r\n")
    assert load_topology("mine.toml").attention.groups == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[attention]\ngrops = 2", '[attention] grops: unknown key; did you mean "groups"?'),
        ("[attention]\nlanes = 2", "[attention] lanes: unknown key; it belongs in [schedule]"),
        (
            "[experts]\nthreads = 1\nqqq = 1",
            "[experts] qqq: unknown key; "
            "[experts] has ranks, device, device_memory_gb, threads, shared_experts, order, "
            "replicas",
        ),
        ("[atention]\n", "[atention]: unknown section; did you mean [attention]?"),
        ("lanes = 2", "lanes: stands outside any section; put it in [schedule]"),
        ("attention = 2", "[attention]: expected one section, got 2"),
        ("[[attention]]\n", "[attention]: expected one section, got several sections"),
        (
            "[attention]\ngroups = true",
            '[attention] groups: expected a whole number from 1 to 240, or "auto", got true',
        ),
        (
            "[experts]\nranks = 0",
            '[experts] ranks: expected a whole number from 1 to 240, or "auto", got 0',
        ),
        (
            "[schedule]\nmax_wait_ms = nan",
            "[schedule] max_wait_ms: expected a number from 0 to 3600000, got nan",
        ),
        (
            "[schedule]\nmax_wait_ms = inf",
            "[schedule] max_wait_ms: expected a number from 0 to 3600000, got inf",
        ),
        (
            '[model]\npath = ""',
            '[model] path: expected a string that is not empty, got ""',
        ),
        (
            '[model]\ndtype = "fp8"',
            '[model] dtype: expected "auto", "float32", "float16" or "bfloat16", got "fp8"',
        ),
        (
            '[experts]\norder = "first-ready"',
            '[experts] order: this version has only "round-robin", not "first-ready"; '
            "change or remove the key",
        ),
        (
            '[comm]\ntransport = "mpi"',
            '[comm] transport: expected "auto", "shm", "gloo", "nccl" or "hccl", got "mpi"',
        ),
        (
            "[serve]\nport = 65536",
            "[serve] port: expected a whole number from 0 to 65535, got 65536",
        ),
        ('[serve]\napi_key = ""', '[serve] api_key: expected a string that is not empty, got ""'),
        (
            "[serve]\nkv_max_gb = 0",
            "[serve] kv_max_gb: expected a number from 0.001 to 1000000, got 0",
        ),
        (
            "[nodes]\nattention = [0]",
            "[[nodes]]: expected a section [[nodes]] for each node, got one section, [nodes]",
        ),
        ("nodes = 2", "[[nodes]]: expected a section [[nodes]] for each node, got 2"),
        ("nodes = [1]", "[[nodes]] (node 0): expected a section of keys, got 1"),
        ("[[node]]", "[node]: unknown section; did you mean [[nodes]]?"),
        (
            "[[nodes]]\nattention = [0]\n[[nodes]]\nexprts = [0]",
            '[[nodes]] (node 1) exprts: unknown key; did you mean "experts"?',
        ),
        (
            "[[nodes]]\nattention = [-1]",
            "[[nodes]] (node 0) attention: expected a list of whole numbers from 0, as in [0, 1], "
            "got [-1]",
        ),
        (
            "[[nodes]]\nattention = [0]\nexperts = [0]",
            "[[nodes]]: say where each rank is, so [attention] groups and [experts] ranks cannot "
            "be auto; set a number",
        ),
        (
            "[comm]\nnode_timeout_s = 1",
            "[comm] node_timeout_s: expected a number from 2 to 3600, got 1",
        ),
        (
            "[instances]\ncount = 0",
            "[instances] count: expected a whole number from 1 to 240, got 0",
        ),
        (
            "[schedule]\nttft_slo_s = true",
            "[schedule] ttft_slo_s: expected a number from 0.001 to 31536000, got true",
        ),
        (
            "[schedule]\nmin_batch_tokens = 9999",
            "[schedule] min_batch_tokens: 9999 is more than max_batch_tokens, 4096; "
            "lower it, or raise max_batch_tokens",
        ),
    ],
)
def test_a_problem_names_file_key_and_remedy(in_folder: Path, text: str, problem: str) -> None:
    assert problems(write(text)) == [f"mine.toml: {problem}"]


COUNTS = "[attention]\ngroups = 2\n[experts]\nranks = 3\n"


def test_nodes_say_where_ranks_are(in_folder: Path) -> None:
    path = write(
        f"{COUNTS}[[nodes]]\nattention = [1, 0]\n[[nodes]]\nexperts = [0, 2]\n"
        "[[nodes]]\nexperts = [1]\n[instances]\ncount = 2\n"
    )
    topology = load_topology(path)
    assert topology.nodes == (Node(attention=(1, 0)), Node(experts=(0, 2)), Node(experts=(1,)))
    assert topology.instances.count == 2
    assert problems(path, "experts.ranks=4") == [
        "mine.toml: [[nodes]]: no node has expert rank 3; name each in one of [[nodes]]"
    ]


def test_each_rank_is_on_one_node(in_folder: Path) -> None:
    path = write(
        f"{COUNTS}[[nodes]]\nattention = [0, 0]\nexperts = [3]\n[[nodes]]\n"
        "[[nodes]]\nattention = [0]\n"
    )
    assert [line.removeprefix("mine.toml: [[nodes]]") for line in problems(path)] == [
        " (node 0) attention: attention group 0 is twice; give it one place",
        " (node 2) attention: attention group 0 is on node 0 too; give it one place",
        ": no node has attention group 1; name each in one of [[nodes]]",
        " (node 0) experts: there is no expert rank 3; the last one is 2",
        ": no node has expert ranks 0, 1, 2; name each in one of [[nodes]]",
        " (node 1) has no ranks; give it some, or remove it",
    ]


def test_all_problems_come_at_once(in_folder: Path) -> None:
    path = write("[attention]\ngrops = 1\ngroups = 0\n[schedule]\nlanes = 1.5\n[foo]\n")
    assert [line.split(": ")[1] for line in problems(path, "experts.ranks=-1", "nothing=1")] == [
        "name the section too, as in section.nothing=1",
        "[attention] grops",
        "[attention] groups",
        "[schedule] lanes",
        "[foo]",
        'expected a whole number from 1 to 240, or "auto", got -1',
    ]


def test_overrides_replace_values_and_are_named_in_problems(in_folder: Path) -> None:
    path = write("[attention]\ngroups = 2\n")
    topology = load_topology(
        path,
        ["attention.groups=3", "model.path = /a folder/b=c", 'model.dtype="float16"'],
    )
    assert topology.attention.groups == 3
    assert topology.model.path == "/a folder/b=c"
    assert topology.model.dtype == "float16"
    assert topology.where("attention", "groups") == "--set attention.groups"
    assert topology.where("experts", "ranks") == "mine.toml: [experts] ranks"
    assert problems(path, "attention.groups=0")[0].startswith("--set attention.groups: expected")
    assert problems(path, "attention.grops=1") == [
        '--set attention.grops: unknown key; did you mean "groups"?'
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("attention.groups", "expected section.key=value, as in attention.groups=2"),
        ("threads=2", "name the section too, as in attention.threads=2 or experts.threads=2"),
        ("atention.groups=2", 'unknown section "atention"; did you mean attention.groups?'),
        ("nodes.count=2", "[[nodes]] are several sections; write them in a topology file"),
        ("nodes=2", "[[nodes]] are several sections; write them in a topology file"),
    ],
)
def test_a_malformed_override_is_explained(override: str, problem: str) -> None:
    assert problems("cpu", override) == [f"--set {override}: {problem}"]


def test_serving_and_its_goals_are_part_of_a_topology(in_folder: Path) -> None:
    assert load_topology("cpu").serve == Serve(host="127.0.0.1", port=8000, api_key=None)
    assert load_topology("cpu").schedule.ttft_slo_s is None
    path = write(
        "[serve]\nport = 0\nkv_dir = 'kv'\n[schedule]\nttft_slo_s = 2\nstall_timeout_s = 5"
    )
    topology = load_topology(path, ["serve.host=::1", "serve.api_key=a b"])
    assert topology.serve == Serve(host="::1", port=0, api_key="a b", kv_dir="kv")
    assert (topology.schedule.ttft_slo_s, topology.schedule.stall_timeout_s) == (2.0, 5.0)


def test_a_path_counts_from_where_it_was_written(in_folder: Path) -> None:
    (in_folder / "sub").mkdir()
    path = write("[serve]\nkv_dir = 'kv'", "sub/mine.toml")
    assert load_topology(path).resolve("serve", "kv_dir", "kv") == in_folder / "sub" / "kv"
    overridden = load_topology(path, ["serve.kv_dir=kv"])
    assert overridden.resolve("serve", "kv_dir", "kv") == in_folder / "kv"
    assert overridden.resolve("serve", "kv_dir", "/kv") == Path("/kv")


def test_a_key_of_another_section_is_shown_to_its_own(in_folder: Path) -> None:
    path = write("[schedule]\nwindow_tokens = 5\n")
    assert problems(path) == [
        "mine.toml: [schedule] window_tokens: unknown key; it belongs in [comm]"
    ]
    assert problems("cpu", "schedule.window_tokens=5", "comm.threads=1") == [
        "--set schedule.window_tokens: unknown key; did you mean comm.window_tokens?",
        "--set comm.threads: unknown key; did you mean attention.threads or experts.threads?",
    ]


def test_what_is_right_is_left_to_look_for_more() -> None:
    with pytest.raises(TopologyError) as caught:
        load_topology("cpu", ["schedule.lanes=0", "experts.ranks=33", "schedule.ranks=2"])
    usable = caught.value.usable
    assert (usable.schedule.lanes, usable.experts.ranks) == (Schedule().lanes, 33)
    assert usable.where("experts", "ranks") == "--set experts.ranks"


def test_an_override_cannot_smuggle_in_other_keys() -> None:
    value = "1\n[experts]\nranks = 5"
    assert load_topology("cpu", [f"model.path={value}"]).model.path == value


def test_a_file_that_cannot_be_read_is_explained(in_folder: Path) -> None:
    assert problems("nowhere/cpux.toml") == [
        'nowhere/cpux.toml: no such topology file; did you mean "cpu", which comes with asapctl?'
    ]
    assert problems("zzz") == [
        f"zzz: no such topology file; these come with asapctl: {', '.join(packaged_topologies())}"
    ]
    assert problems(".")[0].startswith(".: is a folder; give a TOML file")
    assert problems(write("[a]\nb = = 2")) == [
        "mine.toml: not valid TOML: invalid value (at line 2, column 5)"
    ]
    Path("mine.toml").write_bytes(b"[a\xff]")
    assert problems("mine.toml") == ["mine.toml: not UTF-8 text (byte 2); save it as UTF-8"]
    assert problems("x" * 300)[0].startswith("xxx")


def test_what_is_supported_is_part_of_the_schema() -> None:
    for section, key in SUPPORTED:
        assert key in field_types(section)
    assert set(SECTIONS) <= set(Topology.__struct_fields__)


DEEP = "[" * 2000 + "]" * 2000
DIGITS = "9" * 5001


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"a = {DEEP}", "not valid TOML: nested too deep"),
        ("a." * 5000 + "b = 1", "not valid TOML: nested too deep"),
        (f"[attention]\ngroups = {DIGITS}", "not valid TOML: a number has too many digits"),
        (
            f"[attention]\ngroups = 0x{'f' * 5001}",
            '[attention] groups: expected a whole number from 1 to 240, or "auto", got such a',
        ),
        ('[attention]\n"a\\nb" = 1', "[attention] a\\nb: unknown key; "),
        ('["a\\nb"]', "[a\\nb]: unknown section; "),
        ('[model]\ndtype = "a\\nb"', '[model] dtype: expected "auto", '),
        (f"[attention]\n{'x' * 9999} = 1", f"[attention] {'x' * 77}...: unknown key; "),
        (f"[{'x' * 9999}]", f"[{'x' * 77}...]: unknown section; "),
    ],
)
def test_hostile_toml_is_one_short_line(in_folder: Path, text: str, problem: str) -> None:
    [line] = problems(write(text))
    assert line.startswith(f"mine.toml: {problem}")
    assert len(line) < 400


@pytest.mark.parametrize(
    "override",
    [
        f"attention.groups={DIGITS}",
        f"attention.groups=0x{'f' * 5001}",
        f"attention.groups={DEEP}",
        f"attention.{'x' * 9999}=1",
        f"{'x' * 9999}.groups=1",
        f"{'x' * 9999}=1",
        "x" * 9999,
        f"groups={DIGITS}",
        "attention.groups=1\n2",
        "attention.gro\nups=1",
        "atten\ntion.groups=1",
        "gro\nups=1",
        "groups=1\n2",
    ],
)
def test_hostile_overrides_are_one_short_line(override: str) -> None:
    [line] = problems("cpu", override)
    assert line.startswith("--set ")
    assert len(line) < 400


def test_thousands_of_problems_are_counted(in_folder: Path) -> None:
    lines = problems(write("".join(f"key{i} = 1\n" for i in range(5000))))
    assert len(lines) < 50
    assert lines[-1].startswith("mine.toml: 49")
    assert lines[-1].endswith("more problems like these")


def test_only_files_and_pipes_of_a_sane_size_are_read(in_folder: Path) -> None:
    assert "not a regular file" in problems("/dev/zero")[0]
    with Path("mine.toml").open("wb") as file:
        file.truncate(1 << 40)
    assert problems("mine.toml") == [
        "mine.toml: cannot be read: larger than 1 MiB; give a TOML file"
    ]
    reading, writing = os.pipe()  # as a shell's <(...) gives one
    os.write(writing, b"[attention]\ngroups = 2")
    os.close(writing)
    assert load_topology(f"/dev/fd/{reading}").attention.groups == 2
    os.close(reading)


def test_a_home_that_is_not_known_is_a_usage_error(in_folder: Path) -> None:
    topology = load_topology(write("[model]\npath = '~nosuchuser/m'"))
    with pytest.raises(
        UsageError, match=r"mine\.toml: \[model\] path: ~nosuchuser/m is in no home"
    ):
        topology.resolve("model", "path", topology.model.path)
