"""`asapctl status` and `asapctl trace` of an instance that is really there: a prefill run."""

import json
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.control.messages import (
    Message,
    RankSpans,
    Span,
    StartTrace,
    TraceReport,
    Watch,
)
from engine.topology.ranks import RankId
from helpers.checkpoints import checkpoint, token_ids
from helpers.fake_instances import fake_instance
from helpers.instances import wait_for
from helpers.program import ASAPCTL, environment, run
from helpers.snapshots import snapshot
from helpers.traces import check_trace


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


class Feeder:
    """A prefill run that reads prompts from us for as long as the test wants."""

    def __init__(self, home: Path) -> None:
        self._process = subprocess.Popen(
            [
                *(ASAPCTL, "prefill", "-", "-o", str(home / "out.jsonl")),
                *("--topology", "cpu-2a2e", "--model", str(checkpoint("qwen3_moe"))),
                *("--set", "schedule.min_batch_tokens=64"),
            ],
            env=environment(home),
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._feed)
        self._thread.start()

    def __enter__(self) -> "Feeder":
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        assert self._process.wait(60) == 0 or error[0]

    def _feed(self) -> None:
        assert self._process.stdin is not None
        number = 0
        while not self._done.wait(0.02):
            for _ in range(4):
                prompt = {"id": str(number), "prompt_token_ids": token_ids(40 + number % 50)}
                self._process.stdin.write(json.dumps(prompt).encode() + b"\n")
                number += 1
            self._process.stdin.flush()
        self._process.stdin.close()


def status(home: Path) -> dict[str, Any]:
    """The JSON; nothing when there is no instance, or none that answers yet."""
    done = run("status", "--json", env=environment(home))
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found


def test_a_prefill_run_is_watched_and_traced(home: Path) -> None:
    with Feeder(home):
        wait_for(lambda: status(home).get("finished", 0) > 20, "prompts get through")
        seen = status(home)
        traced = run("trace", "--seconds", "1", "-o", str(home / "t.json"), env=environment(home))
    assert seen["health"] == "healthy"
    assert seen["instance"]["command"] == "prefill"
    assert seen["tokens_per_s"] > 0
    assert seen["ttft"]["count"] > 20
    assert 0 < seen["ttft"]["p50"] <= seen["ttft"]["p99"]
    roles = Counter(rank["id"]["role"] for rank in seen["ranks"])
    assert roles == {"attention": 2, "expert": 2}
    assert all(rank["busy"] > 0 and rank["memory_bytes"] > 0 for rank in seen["ranks"])
    assert all(rank["hottest"] for rank in seen["ranks"] if rank["id"]["role"] == "expert")

    assert traced.returncode == 0, traced.stderr
    assert "spans of 4 ranks" in traced.stderr
    phases = check_trace(json.loads((home / "t.json").read_text()))
    kinds = Counter(event["cat"] for event in phases["X"])
    assert {"attend", "dispatch", "wait", "combine", "serve", "finish"} <= set(kinds)
    # But for those that were under way at either end, every dispatch is followed to its combine.
    assert len(phases["s"]) > 0
    assert kinds["dispatch"] - 16 <= len(phases["s"]) <= kinds["dispatch"]
    assert len(phases["t"]) >= len(phases["s"]) - 16
    pids = {event["pid"] for event in phases["X"]}
    assert len(pids) == 4
    assert max(event["ts"] + event["dur"] for event in phases["X"]) < 12e6


def answer(message: Message) -> Message | None:
    match message:
        case Watch():
            return snapshot(1, 1)
        case StartTrace():
            spans = [Span("attend", 5.0, 5.5, 1, 0, 0)]
            return TraceReport(5.0, 6.0, [RankSpans(RankId("attention", 0), 10, spans, 7)])
    return None


def test_a_trace_says_what_is_missing(home: Path) -> None:
    with fake_instance(home, answer):
        done = run("trace", "demo", "--seconds", "0.1", "-o", "-", env=environment(home))
    assert done.returncode == 0
    assert len(check_trace(json.loads(done.stdout))["X"]) == 1
    assert done.stderr.splitlines() == [
        "without expert 0: no answer came in time",
        "7 spans more were too many to keep; record for a shorter time",
    ]


def test_a_trace_that_cannot_be_written_is_refused_first(home: Path) -> None:
    with fake_instance(home, answer) as controller:
        for output, why in ((home, "is a folder"), (home / "no/t.json", "there is no folder")):
            done = run("trace", "-o", str(output), env=environment(home))
            assert done.returncode == 2
            assert why in done.stderr
        assert controller.heard == []
    done = run("trace", "-o", str(home / "t.json"), env=environment(home))
    assert done.returncode == 3
    assert not (home / "t.json").exists()


def test_a_trace_of_a_silent_controller(home: Path) -> None:
    with fake_instance(home, lambda message: None):
        done = run("trace", "-o", str(home / "t.json"), env=environment(home))
    assert done.returncode == 1
    assert "did not answer within 2 s" in done.stderr
