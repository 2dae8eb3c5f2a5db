import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from asapctl.check_view import rank_table, spans
from asapctl.cli import app
from engine.launch.accelerators import Slot
from engine.launch.budget import RankPlan
from engine.topology.ranks import RankId

PLAN = ["check", "d4-t4-e16", "--model", "qwen3-235b-a22b", "--assume-devices"]


def table(ranks: list[RankPlan]) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rank_table(ranks))
    return console.export_text()


def rank(role: str, size: int, device: Slot | None, kv: int = 0) -> RankPlan:
    on_device = frozenset({"weights", "windows", "working set", "communicators", "driver"})
    return RankPlan(
        id=RankId(role, 239),  # type: ignore[arg-type]
        experts=range(100, 128),
        weights_bytes=size,
        windows_bytes=size,
        working_set_bytes=size,
        kv_bytes=kv,
        process_bytes=size,
        communicators_bytes=size,
        driver_bytes=size,
        on_device=on_device if device else frozenset(),
        device=device,
    )


def test_the_widest_table_of_devices_fits_80_columns() -> None:
    size = 990 * 10**6
    text = table([rank(role, size, Slot("cuda", 15, "15")) for role in ("attention", "expert")])
    assert "\u2026" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in ("attention 239 cuda 15 100-127 (28)", "links", "process", "total"):
        assert word in text
    assert "KV" not in text


def test_what_lies_on_a_device_is_in_its_unit_and_alone_in_its_total() -> None:
    row = table([rank("expert", 10**9, Slot("npu", 3, "3"))]).splitlines()[-1]
    assert " ".join(row.split()[-12:]) == "1.0 GB 1.0 GB 1.0 GB 1.0 GB 954 MiB 5.0 GB"
    row = table([rank("expert", 2**20, None)]).splitlines()[-1]
    assert row.split()[-2:] == ["6.0", "MiB"]


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HCCL_BUFFSIZE", "20")


def test_a_plan_of_devices_for_people(runtime: None) -> None:
    result = CliRunner().invoke(app, PLAN)
    assert result.exit_code == 0, result.output
    for words in (
        "4, of 4 attention ranks each",
        "4096 tokens a dispatch, hccl",
        "npu 31",
        "controller and zygote; not looked at here",
        "16 for expert ranks: expert 0 needs",
        "of 64 GB, 1.1 GB of it an estimate",
        "HCCL_BUFFSIZE=20",
        "there is only a config of this model: weights were not looked at",
    ):
        assert words in result.output


def test_a_plan_of_devices_as_json(runtime: None) -> None:
    plan = json.loads(CliRunner().invoke(app, [*PLAN, "--json"]).stdout)
    assert (plan["tensor_parallel"], plan["transport"], len(plan["ranks"])) == (4, "hccl", 32)
    assert plan["config_only"]
    assert plan["assumed"]
    assert plan["memory_available_bytes"] is None
    assert plan["environment"]["HCCL_BUFFSIZE"] == "20"
    last = plan["ranks"][-1]
    assert (last["device"], last["device_limit_bytes"]) == ("npu 31", 64 * 10**9)
    assert last["device_bytes"] + last["host_bytes"] == last["total_bytes"]
    assert last["communicators_bytes"] == 32 * 2 * 20 * 2**20


def test_a_paced_plan_says_so_at_every_rank(runtime: None) -> None:
    words = ["--set", "attention.groups=2", "--set", "experts.ranks=3"]
    result = CliRunner().invoke(app, ["check", "paced-d4e4", *words])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert [row[2] for row in rows if row[:1] in (["attention"], ["expert"])] == ["paced"] * 5
    plan = json.loads(CliRunner().invoke(app, ["check", "paced-d4e4", *words, "--json"]).stdout)
    assert {rank["device"] for rank in [*plan["ranks"], *plan["here"]]} == {"paced"}
    assert plan["paced"] in plan["notes"]
    plan = json.loads(CliRunner().invoke(app, ["check", "cpu-2a2e", "--json"]).stdout)
    assert {rank["device"] for rank in plan["ranks"]} == {"cpu"}
    assert plan["paced"] is None


def test_a_plan_of_one_node_of_several(runtime: None) -> None:
    more = ["--nnodes", "4", "--node-rank", "3", "--set", "instances.count=2"]
    result = CliRunner().invoke(app, [*PLAN, *more])
    assert result.exit_code == 0, result.output
    for words in (
        "instances 2, of 32 ranks each; instance 1 on this node, in part",
        "nodes     4; this is node 3, with expert 0-15",
        "devices   instance 1 on npu 0-15",
        "attention 15 node 2",
        "expert 0     npu 0 ",
        "with zygote;",
        "16 for expert ranks",
    ):
        assert words in result.output
    assert "for attention ranks" not in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines() if "expert 1" in line)


def test_a_plan_of_one_node_of_several_as_json(runtime: None) -> None:
    more = ["--nnodes", "4", "--node-rank", "2", "--set", "instances.count=2", "--json"]
    plan = json.loads(CliRunner().invoke(app, [*PLAN, *more]).stdout)
    assert (plan["instances"], plan["nnodes"], plan["node_rank"]) == (2, 4, 2)
    assert [(rank["node"], rank["device"]) for rank in plan["ranks"][15:17]] == [
        (2, "npu 15"),
        (3, None),
    ]
    assert plan["here"][3] == {"instance": 1, "rank": "attention 3", "device": "npu 3"}
    assert len(plan["here"]) == 16


def test_a_node_that_there_is_not() -> None:
    result = CliRunner().invoke(app, ["check", "cpu-2a2e", "--nnodes", "2", "--node-rank", "2"])
    assert result.exit_code == 2
    assert "with --nnodes 2 the last one is 1" in result.output


def test_numbers_for_people() -> None:
    assert [spans(each) for each in ([3], [0, 1, 2, 6, 8, 9], [])] == ["3", "0-2, 6, 8-9", ""]
