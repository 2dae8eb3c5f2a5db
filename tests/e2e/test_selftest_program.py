"""`asapctl selftest`: what is good passes, what is not is named, and nothing is left behind."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from asapctl.cli import app
from engine.selftest import job
from engine.selftest.reference import Reference
from helpers.instances import wait_for
from helpers.launched import left_behind, private_home
from helpers.program import alive, descendants, environment, start

OPERATORS = ("rms_norm", "rotate", "attend", "gate", "experts")
MESSAGES = 400
Selftest = Callable[..., Result]


@pytest.fixture
def home() -> Iterator[Path]:
    with private_home() as folder:
        yield folder


@pytest.fixture
def selftest(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Selftest]:
    """Runs the command in this process, with fewer messages. changes: of its internal options."""
    original = job.run_selftest
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # for entries of tests
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def invoke(*arguments: str, **changes: Any) -> Result:
        def with_changes(options: job.Options, watcher: job.Watcher) -> Any:
            return original(
                msgspec.structs.replace(options, **{"messages": MESSAGES} | changes), watcher
            )

        monkeypatch.setattr(job, "run_selftest", with_changes)
        return CliRunner().invoke(app, ["selftest", *arguments])

    yield invoke
    assert list(folder.iterdir()) == []


def check_report(report: dict[str, Any], attention: int, experts: int) -> None:
    assert report["good"]
    assert report["failures"] == []
    assert report["exchange"]["good"] == report["exchange"]["sent"] == MESSAGES
    pairs = {(pair["attention"], pair["expert"]) for pair in report["pairs"]}
    assert pairs == {(a, e) for a in range(attention) for e in range(experts)}
    assert all(pair["latency_us"] > 0 and pair["bandwidth_gb_s"] > 0 for pair in report["pairs"])
    assert len(report["operators"]) == attention + experts
    for rank in report["operators"]:
        assert tuple(result["operator"] for result in rank["results"]) == OPERATORS
        assert all(result["error"] <= result["tolerance"] for result in rank["results"])
    model = report["logprobs"]
    assert 1 in model["lengths"]
    assert model["positions"] + model["left_out"] == (
        sum(model["lengths"]) * model["prompts"] // len(model["lengths"])
    )
    assert model["left_out"] == 0
    assert 0 < model["error"] <= model["tolerance"][0] == 1e-5


@pytest.mark.parametrize(
    ("topology", "changes", "attention"),
    [
        ("cpu-2a2e", (), 2),
        ("cpu-2a2e", ("--set", "comm.transport=gloo", "--set", "schedule.lanes=3"), 2),
        ("cpu-tp2", ("--set", "comm.window_tokens=201"), 2),
    ],
)
def test_a_good_topology(
    selftest: Selftest, topology: str, changes: tuple[str, ...], attention: int
) -> None:
    # A model and a length that are not there do not count: a small model stands in.
    away = ("--set", "model.path=/nowhere", "--set", "model.max_model_len=1000000")
    result = selftest(topology, *changes, *away, "--json")
    assert result.exit_code == 0, result.output
    check_report(json.loads(result.stdout), attention, experts=2)


def test_whatever_is_wrong_is_named(selftest: Selftest, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reference.run

    def shifted(self: Reference, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, gaps = right(self, ids)
        return logprobs + 1e-3 * (len(ids) == 65), gaps

    monkeypatch.setattr(Reference, "run", shifted)
    entries = {
        "attention": "helpers.broken_ranks:attention_with_a_wrong_operator",
        "expert": "helpers.broken_ranks:expert_that_corrupts_a_value",
    }
    two = ("--set", "attention.groups=1", "--set", "experts.ranks=1")
    result = selftest("cpu", *two, entries=entries, messages=40)
    assert result.exit_code == 1
    assert "39 of 40 right in every value" in result.stdout
    failures = [line for line in result.stdout.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 4
    operator, message, total, logits = failures
    assert operator.startswith("failed: attention 0: operator rms_norm is off by ")
    assert message.startswith("failed: attention 0 and expert 0: message 7 (lane ")
    assert " 1 of " in message
    assert total == "failed: of 40 messages, 40 came right and 39 were answered right"
    assert "largest difference of log-probabilities is " in logits
    assert "all good" not in result.stdout


def test_a_lost_answer_ends_with_who_waits_for_what(selftest: Selftest, tmp_path: Path) -> None:
    entries = {
        "attention": "engine.selftest.attention:main",
        "expert": "helpers.broken_ranks:expert_that_loses_an_answer",
    }
    result = selftest("cpu-tp2", "--json", entries=entries, stall_s=3.0)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    report = json.loads(result.stdout)
    assert not report["good"]
    (failure,) = report["failures"]
    reason, logs = failure.splitlines()
    assert reason.startswith("attention ")
    assert "waits in vain for the answer to message 5 of expert " in reason
    assert logs.startswith(f"logs: {tmp_path}/state/asapctl/logs/selftest-")
    assert report["logprobs"] is None


def test_what_cannot_run_is_refused_by_the_plan(selftest: Selftest) -> None:
    for arguments, reason in (
        (("gpu-8",), "cuda devices are wanted"),
        (("nosuch",), "no such topology file"),
        (("cpu", "--set", "experts.ranks=0"), "--set experts.ranks: expected a whole number"),
    ):
        done = selftest(*arguments, "--json")
        assert done.exit_code == 2
        assert reason in done.stderr
        assert done.stdout == ""


def test_help_fits_a_screen() -> None:
    done = CliRunner().invoke(app, ["selftest", "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "Example: asapctl selftest" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_an_interrupt_leaves_nothing(home: Path, tmp_path: Path) -> None:
    process = start("selftest", "cpu-2a2e", env=environment(home) | {"TMPDIR": str(tmp_path)})
    try:
        found = []

        def exchanging() -> bool:
            found[:] = descendants(process.pid)
            return len(found) >= 5 and process.poll() is None  # the zygote and four ranks

        wait_for(exchanging, "the ranks are there")
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in stderr
    wait_for(lambda: not any(map(alive, found)), "every process ended", deadline_s=10)
    assert left_behind(home) == []
    assert list(tmp_path.iterdir()) == []
