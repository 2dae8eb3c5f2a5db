"""What flags, torchrun's environment and Slurm's say about this node's place in a launch."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from asapctl.cli import app
from engine.errors import UsageError
from engine.launch import endpoint as endpoint_module
from engine.launch.endpoint import endpoint, split_endpoint
from engine.launch.hostlist import expand, first_host
from engine.launch.nodes import NodeOptions, node_options, own_address

SECRET = "a secret of some length"
ELSEWHERE = "198.51.100.7"  # set aside for documentation: nobody has it


def options(
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    secret_file: Path | None = None,
    **environ: str,
) -> NodeOptions:
    environ.setdefault("ASAPCTL_SECRET", SECRET)
    return node_options(nnodes, node_rank, rdzv_endpoint, secret_file, environ, patience_s=0)


def refusal(*arguments: Any, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        options(*arguments, **environ)
    return str(caught.value)


def test_flags_say_it_all() -> None:
    assert options("2", 1, f"{ELSEWHERE}:7000") == NodeOptions(
        2, 1, ELSEWHERE, 7000, SECRET.encode()
    )
    assert options("2:2", 1, ELSEWHERE).port == 29400
    found = options("3", 2, "[2001:db8::1]:7000")
    assert (found.host, found.port) == ("2001:db8::1", 7000)


def test_with_one_node_nothing_else_matters() -> None:
    for arguments in ((), ("1",), ("1", 0, "localhost:0")):
        assert options(*arguments, ASAPCTL_SECRET="x", SLURM_NNODES="4") == NodeOptions()
    assert options("1", PET_NNODES="2", SLURM_NODEID="1", SLURM_NNODES="2") == NodeOptions()
    assert "there is one node, whose rank is 0" in refusal(None, 1)


def test_torchruns_environment_is_read() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": f"{ELSEWHERE}:5"}
    found = options(**environ)
    assert (found.nnodes, found.node_rank, found.host, found.port) == (2, 1, ELSEWHERE, 5)
    found = options("3", 2, "192.0.2.9", **environ)
    assert (found.nnodes, found.node_rank, found.host, found.port) == (3, 2, "192.0.2.9", 29400)


@pytest.mark.parametrize("prefix", ["", "PET_"])
def test_master_addr_and_port_are_read(prefix: str) -> None:
    addr, port = f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT"
    assert options("2", 1, **{addr: ELSEWHERE, port: "5"}).port == 5
    assert options("2", 1, **{addr: ELSEWHERE}).port == 29400
    for written in ("2001:db8::1", "[2001:db8::1]"):
        assert options("2", 1, **{addr: written, port: "5"}).host == "2001:db8::1"
    assert f"{addr}: {ELSEWHERE}:x: expected HOST:PORT" in refusal(
        "2", 1, **{addr: ELSEWHERE, port: "x"}
    )


def test_slurms_environment_is_read_by_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "resolve", lambda *_: [])
    job = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "gpu[07-10]"}
    assert options(**job) == NodeOptions()  # a shell of salloc
    found = options(SLURM_NODEID="3", **job)
    assert (found.nnodes, found.node_rank, found.host, found.port) == (4, 3, "gpu07", 29400)
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[09-10]"}
    found = options(SLURM_NODEID="1", **job, **step)
    assert (found.nnodes, found.node_rank, found.host) == (2, 1, "gpu09")
    assert options(SLURM_NODEID="1", PET_NNODES="3", MASTER_ADDR="a", **job).host == "a"
    assert "srun --ntasks-per-node=1" in refusal(SLURM_NODEID="1", SLURM_LOCALID="1", **job)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a.b-c,d", ["a.b-c", "d"]),
        ("gpu[07-09,12]", ["gpu07", "gpu08", "gpu09", "gpu12"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[0-1]n[1,3]x,y[2]", ["rack0n1x", "rack0n3x", "rack1n1x", "rack1n3x", "y2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert list(expand(text, "X")) == hosts
    assert first_host(text, "X") == hosts[0]


@pytest.mark.parametrize("text", ["", "a[", "a[]", "a[3-1]", "a[x]", "a[1-999999999]", ",b", "a b"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match=r"^X=.*--rdzv-endpoint HOST:PORT$"):
        first_host(text, "X")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("2", 2, ELSEWHERE), "--node-rank 2: with 2 nodes it is from 0 to 1"),
        (("2", -1, ELSEWHERE), "--node-rank -1: with 2 nodes it is from 0 to 1"),
        (("1:2", 1, ELSEWHERE), "--nnodes 1:2: the number of nodes is fixed at the start"),
        (("0", 0, ELSEWHERE), "--nnodes 0: expected a whole number from 1 to 4096"),
        (("two", 0, ELSEWHERE), "--nnodes two: expected a whole number"),
        (("2", None, ELSEWHERE), "which of the 2 nodes is this? Give --node-rank, from 0 to 1"),
        (("2", 1), "where is node 0? Give --rdzv-endpoint HOST:PORT"),
        (("2", 1, "no.such.invalid"), "cannot resolve no.such.invalid: "),
        (("2", 1, f"{'x' * 70}.example"), "cannot resolve xxx"),
        (("2", 0, ELSEWHERE), "it is no address of this machine, which is node 0"),
        (("2", 1, "0.0.0.0"), "it stands for every address"),
        (("2", 1, "[::]"), "it stands for every address"),
    ],
)
def test_a_problem_says_where_and_what_to_do(arguments: tuple[Any, ...], problem: str) -> None:
    assert problem in refusal(*arguments)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost", "[::1]"])
def test_loopback_is_refused_with_the_reason(host: str) -> None:
    for rank in (0, 1):
        problem = refusal("2", rank, f"{host}:1234")
        assert "this machine's alone (loopback)" in problem
        assert "ASAPCTL_ALLOW_LOOPBACK=1" in problem
    allowed = options("2", 1, f"{host}:1234", ASAPCTL_ALLOW_LOOPBACK="1")
    assert endpoint(allowed.host, allowed.port) == f"{host}:1234"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty: expected HOST:PORT"),
        ("a:b", "expected HOST:PORT, as in 10.0.0.1:29400"),
        ("a:", "expected HOST:PORT"),
        (":29400", "expected HOST:PORT"),
        ("tcp://a:1", "leave out what is before it"),
        ("fd00::1", "put an IPv6 address in brackets, as in [fd00::1]:29400"),
        ("[fd00::g]:1", "fd00::g is not an IPv6 address"),
        ("[10.0.0.1]:1", "10.0.0.1 is not an IPv6 address"),
        ("[fd00::1", "expected HOST:PORT"),
        ("a b:1", "expected HOST:PORT"),
        ("a:0", "the port has to be from 1 to 65535"),
        ("a:65536", "the port has to be from 1 to 65535"),
    ],
)
def test_malformed_endpoints(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_endpoint(text, "--rdzv-endpoint")
    assert str(caught.value).startswith("--rdzv-endpoint: ")
    assert problem in str(caught.value)


def test_an_endpoint_is_as_it_was_written() -> None:
    for host, port in (("10.0.0.1", 1), ("node-1.example", 65535), ("fe80::1%eth0", 2)):
        assert split_endpoint(endpoint(host, port), "X") == (host, port)


def test_a_name_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = socket.getaddrinfo(ELSEWHERE, 5, type=socket.SOCK_STREAM)
    answers = iter([socket.gaierror(-2, "Name or service not known"), there])

    def resolve(*_: object) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(endpoint_module, "resolve", resolve)
    monkeypatch.setattr(endpoint_module, "_LOOK_S", 0.0)
    notes: list[str] = []
    environ = {"ASAPCTL_SECRET": SECRET}
    found = node_options("2", 1, "late:5", None, environ, notes.append, patience_s=60)
    assert found.host == "late"
    assert notes == ["late is not known here yet; looking for 60 s"]


@pytest.fixture
def secret_file(tmp_path: Path) -> Callable[..., Path]:
    def write(content: bytes, mode: int = 0o600) -> Path:
        path = tmp_path / "secret"
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
        return path

    return write


def test_the_secret_comes_from_a_file_or_else_the_environment(
    secret_file: Callable[..., Path],
) -> None:
    path = secret_file(b"from a file, long enough\r\n")
    assert options("2", 1, ELSEWHERE, path).secret == b"from a file, long enough"
    assert options("2", 1, ELSEWHERE).secret == SECRET.encode()
    missing = refusal("2", 1, ELSEWHERE, ASAPCTL_SECRET="")
    assert "give --secret-file FILE, or set ASAPCTL_SECRET; make one with" in missing


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_secret_that_others_can_read_is_none(secret_file: Callable[..., Path], mode: int) -> None:
    problem = refusal("2", 1, ELSEWHERE, secret_file(b"x" * 32, mode))
    assert f"others may read or change it (mode {mode:o}); chmod 600 it" in problem


def test_bad_secrets_are_never_shown(secret_file: Callable[..., Path], tmp_path: Path) -> None:
    short = refusal("2", 1, ELSEWHERE, secret_file(b"hunter2hunter2!\n"))
    assert "the secret has 15 bytes, and needs 16 or more" in short
    assert "hunter2" not in short
    assert "No such file" in refusal("2", 1, ELSEWHERE, tmp_path / "none")
    assert "ASAPCTL_SECRET: the secret has 1 bytes" in refusal(
        "2", 1, ELSEWHERE, ASAPCTL_SECRET="x"
    )
    found = options("2", 1, ELSEWHERE)
    for text in (repr(found), str(found), f"{found!r}", repr([found])):
        assert SECRET not in text
    assert ELSEWHERE in repr(found)


def test_all_problems_come_at_once() -> None:
    problem = refusal("2", 9, "fd00::1", ASAPCTL_SECRET="")
    assert len(problem.splitlines()) == 3


def test_the_address_on_the_way_to_node_0() -> None:
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    assert own_address("localhost", 9) in ("127.0.0.1", "::1")
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint no\.such\.invalid:9: there is no way"):
        own_address("no.such.invalid", 9)


Invoke = Callable[..., Result]


@pytest.fixture
def dry_run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs `asapctl launch --dry-run`, and fails if that would start anything."""
    from engine.launch import job

    cache = tmp_path_factory.getbasetemp() / "options-cache"  # of the demo model
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    for name in ("PET_NNODES", "PET_RDZV_ENDPOINT", "MASTER_ADDR", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job, "run_launch", lambda *_: pytest.fail("something was started"))
    return lambda *words: CliRunner().invoke(app, ["launch", *words, "--dry-run"])


def test_a_dry_run_shows_every_node_and_rank(dry_run: Invoke) -> None:
    result = dry_run("cpu-2a2e", "--nnodes", "4", "--set", "instances.count=2", "--port", "0")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    nodes = [line for line in lines if line.startswith("node ")]
    assert nodes == [
        f"node {node}: asapctl launch cpu-2a2e --set instances.count=2 --port 0 --nnodes 4 "
        f"--node-rank {node} --rdzv-endpoint NODE0:29400 --secret-file SECRET-FILE"
        for node in range(4)
    ]
    ranks = [line.split()[1:4] for line in lines if line.startswith("  instance ")]
    assert ranks == [
        [str(instance), role, str(rank)]
        for instance in range(2)
        for role in ("attention", "expert")
        for rank in range(2)
    ]
    assert "  controllers of instances 0 to 1, and HTTP" in lines


def test_a_dry_run_shows_paced_ranks_as_such(dry_run: Invoke) -> None:
    result = dry_run("paced-d4e4", "--port", "0")
    assert result.exit_code == 0, result.output
    assert "instance 0  attention 3  paced" in result.stdout
    assert "  cpu" not in result.stdout
    assert "note: paced: waits instead of computing" in result.stdout


def test_a_dry_run_as_json_has_masks_and_environment(dry_run: Invoke) -> None:
    result = dry_run(
        *("d4-t4-e16", "--model", "qwen3-235b-a22b", "--nnodes", "2", "--json"),
        *("--rdzv-endpoint", "[fd00::1]:7", "--secret-file", "/x y"),
    )
    found = json.loads(result.stdout)
    assert found["transport"] == "hccl"
    for node, run in enumerate(found["nodes"]):
        assert run["node_rank"] == node
        assert run["command"][-8:] == [
            *("--nnodes", "2", "--node-rank", str(node)),
            *("--rdzv-endpoint", "[fd00::1]:7", "--secret-file", "/x y"),
        ]
        for device, rank in enumerate(run["ranks"]):
            assert rank["device"] == f"npu {device}"
            assert rank["environment"]["ASCEND_RT_VISIBLE_DEVICES"] == str(device)
            assert "HCCL_BUFFSIZE" in rank["environment"]
    assert [run["controllers"] for run in found["nodes"]] == [[0], []]


def test_a_dry_run_tells_what_cannot_be(dry_run: Invoke) -> None:
    for words, problem in (
        (("cpu", "--nnodes", "2"), '[attention] groups: "auto" divides what one node has'),
        (("cpu-2a2e", "--nnodes", "5"), "too few for the 5 nodes of an instance"),
        (("cpu-2a2e", "--nnodes", "1:2"), "the number of nodes is fixed at the start"),
        (("cpu-2a2e", "--nnodes", "2", "--rdzv-endpoint", "::1"), "in brackets"),
    ):
        result = dry_run(*words)
        assert result.exit_code == 2
        assert problem in result.stderr
    result = CliRunner().invoke(app, ["launch", "--json"])
    assert (result.exit_code, "belongs to --dry-run" in result.stderr) == (2, True)


def test_flags_reach_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.launch import job

    given: list[job.Options] = []
    monkeypatch.setattr(job, "run_launch", lambda options, _: given.append(options))
    monkeypatch.setenv("ASAPCTL_SECRET", SECRET)
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", f"{ELSEWHERE}:7"]
    assert CliRunner().invoke(app, ["launch", "cpu-2a2e", *words]).exit_code == 0
    assert CliRunner().invoke(app, ["launch", "cpu-2a2e"]).exit_code == 0
    several, one = given
    assert several.nodes == NodeOptions(2, 1, ELSEWHERE, 7, SECRET.encode())
    assert one.nodes == NodeOptions()
