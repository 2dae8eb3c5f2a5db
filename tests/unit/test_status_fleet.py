"""`asapctl status`, `stop`, `ps` and `trace` where there are several instances."""

import json
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from asapctl.keys import Key
from asapctl.status_fleet import FleetView, Shown, fleet_health
from asapctl.status_print import described
from engine.control.messages import (
    Latency,
    Message,
    Quit,
    RankSpans,
    Snapshot,
    Span,
    StartTrace,
    TraceReport,
    Watch,
)
from engine.control.perfetto import to_perfetto
from engine.launch.registry import InstanceRecord
from engine.topology.ranks import RankId
from helpers.fake_instances import Answer, fake_instance
from helpers.program import environment, run
from helpers.snapshots import expert_rank, snapshot
from helpers.terminal import Terminal
from helpers.traces import check_trace

RECORD = InstanceRecord(
    name="demo",
    pid=1,
    command="launch",
    model="/models/Qwen3-30B-A3B",
    topology="cpu",
    started=0.0,
    controller="ipc:///x/control",
    url="http://127.0.0.1:8000",
)
SICK = snapshot(ranks=[expert_rank(0, state="stalled")], problems=["expert 0 is stalled"])
THREE = [Shown(snapshot()), Shown(SICK), Shown(snapshot(tokens_per_s=50.0, ttft=Latency()))]


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


# --- the view ---------------------------------------------------------------------------------


def draw(
    view: FleetView, shown: list[Shown], width: int = 80, height: int | None = 30
) -> list[str]:
    lines: list[Text] = view.lines(RECORD, shown, width, height)
    assert all(line.cell_len <= width for line in lines)
    assert height is None or len(lines) <= height
    return [line.plain.rstrip() for line in lines]


def test_a_line_for_each_and_the_ranks_of_one() -> None:
    lines = draw(FleetView(), THREE)
    assert lines[:6] == [
        "demo  degraded  3 instances  up 1 h 02 min  http://127.0.0.1:8000",
        "9 running  36 waiting  3,612 done  3 failed  24,740 prompt tokens/s",
        "     state      running  waiting      done  tokens/s  TTFT p50  work left",
        "> 0  healthy          3       12     1,204    12,345    0.82 s          0",
        "  1  stalled          3       12     1,204    12,345    0.82 s          0",
        "  2  healthy          3       12     1,204        50         -          0",
    ]
    assert lines[6].startswith("demo 0  healthy  up 1 h 02 min")
    assert lines[-1].endswith("tab, 0-9 chooses")


def test_the_sums_of_paced_ones_are_labelled() -> None:
    record = msgspec.structs.replace(RECORD, paced="paced: it waits")
    for height in (30, None):
        title = FleetView().lines(record, THREE, 80, height)[0].plain
        assert title.startswith("demo  degraded  paced  3 instances")
    snapshots = [one.snapshot for one in THREE]
    assert described(record, snapshots)["paced"] == "paced: it waits"
    assert described(RECORD, snapshots)["paced"] is None


def test_keys_choose() -> None:
    view = FleetView()
    keys: list[Key] = ["tab", "tab", "tab", "back tab", "1", "7", "sort", "0"]
    seen = []
    for key in keys:
        draw(view, THREE)
        view.press(key)
        (marked,) = [line for line in draw(view, THREE) if line.startswith(">")]
        (title,) = [line for line in draw(view, THREE) if line.startswith("demo ")][1:]
        assert marked.split()[1] == title.split()[1]
        seen.append(view.chosen)
    assert seen == [1, 2, 0, 2, 1, 1, 1, 0]
    assert "s sorts (by busy)" in draw(view, THREE)[-1]


def test_what_does_not_answer_is_silent_and_not_counted() -> None:
    lines = draw(FleetView(chosen=1), [Shown(snapshot()), Shown(snapshot(), 7.0), Shown(None, 3.0)])
    assert lines[0].startswith("demo  degraded  3 instances")
    assert lines[1].startswith("3 running  12 waiting  1,204 done")
    assert [line.split() for line in lines[4:6]] == [[">", "1", "silent"], ["2", "silent"]]
    assert "! no answer for 7 s" in lines


def test_once_shows_every_instance() -> None:
    lines = draw(FleetView(), THREE, height=None)
    assert [line for line in lines if line.startswith("demo ")][1:] == [
        *("demo 0  healthy  up 1 h 02 min  http://127.0.0.1:8000  Qwen3-30B-A3B",),
        *("demo 1  stalled  up 1 h 02 min  http://127.0.0.1:8000  Qwen3-30B-A3B",),
        *("demo 2  healthy  up 1 h 02 min  http://127.0.0.1:8000  Qwen3-30B-A3B",),
    ]
    assert not any(line.startswith(">") for line in lines)


@given(
    st.integers(1, 200),
    st.none() | st.integers(1, 60),
    st.integers(2, 30),
    st.lists(st.sampled_from(["tab", "back tab", "9", "down", "end", "page up"]), max_size=5),
)
def test_any_size_any_keys(width: int, height: int | None, count: int, keys: list) -> None:
    view = FleetView()
    for key in keys:
        draw(view, [Shown(snapshot(9, 9))] * count, width, height)
        view.press(key)
    lines = draw(view, [Shown(snapshot(9, 9))] * count, width, height)
    if width > 20 and height is not None and height >= 12:
        assert any(line.startswith(f"> {view.chosen}") for line in lines)


def test_health_of_all() -> None:
    assert fleet_health(["healthy", "healthy"]) == "healthy"
    assert fleet_health(["silent", "silent"]) == "silent"
    assert fleet_health(["healthy", "silent"]) == "degraded"
    assert fleet_health(["starting", "stalled"]) == "degraded"
    assert fleet_health(["healthy", "starting"]) == "starting"
    assert fleet_health(["healthy", "stopping", "starting"]) == "stopping"


# --- the commands -----------------------------------------------------------------------------


def saying(shown: Snapshot) -> Answer:
    return lambda message: shown if isinstance(message, Watch) else None


def nothing(message: Message) -> None:
    return None


def test_json_has_all(home: Path) -> None:
    with fake_instance(home, saying(snapshot()), more=[saying(SICK)]):
        done = run("status", "--json", env=environment(home))
        listed = run("ps", env=environment(home))
    assert (done.returncode, done.stderr) == (1, "")
    shown = json.loads(done.stdout)
    assert shown["health"] == "degraded"
    assert shown["instance"]["name"] == "demo"
    assert (shown["running"], shown["finished"]) == (6, 2408)
    assert [(one["index"], one["health"]) for one in shown["instances"]] == [
        *((0, "healthy"), (1, "stalled")),
    ]
    assert shown["instances"][1]["problems"] == ["expert 0 is stalled"]
    assert len(shown["instances"][0]["ranks"]) == 4
    assert "launch x2" in listed.stdout


def test_one_that_is_silent_is_told_from_the_others(home: Path) -> None:
    with fake_instance(home, nothing, more=[saying(snapshot())]):
        done = run("status", "--json", env=environment(home))
        once = run("status", env=environment(home))
    assert (done.returncode, once.returncode) == (1, 1)
    assert [one["health"] for one in json.loads(done.stdout)["instances"]] == ["silent", "healthy"]
    assert "  0  silent\n" in once.stdout
    assert "demo 1  healthy" in once.stdout
    with fake_instance(home, nothing, more=[nothing]):
        done = run("status", "--json", env=environment(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert "did not answer within 2 s" in done.stderr


def test_the_live_view_switches(home: Path) -> None:
    with (
        fake_instance(home, saying(snapshot()), more=[saying(snapshot(finished=77))]),
        Terminal("status", env=environment(home), rows=30) as terminal,
    ):
        terminal.expect("demo 0")
        terminal.press("\t")
        terminal.expect("demo 1")
        terminal.press("\x1b[Z")
        terminal.expect("demo 0")
        terminal.press("1")
        terminal.expect("demo 1")
        terminal.press("q")
        assert terminal.wait() == 0


def test_stop_tells_every_controller(home: Path) -> None:
    quits = threading.Semaphore(0)

    def quitting(message: Message) -> Message | None:
        if isinstance(message, Quit):
            quits.release()
        return snapshot(running=2, waiting=3) if isinstance(message, Watch) else None

    with fake_instance(home, quitting, more=[quitting, quitting]):
        done = run("stop", "--timeout", "1", env=environment(home))
        assert all(quits.acquire(timeout=10) for _ in range(3))
    assert done.returncode == 1
    assert "15 requests are not done" in done.stderr


def test_a_trace_of_all(home: Path) -> None:
    def recording(start: float) -> Answer:
        spans = [
            Span("dispatch", start, start + 0.1, 1, 0, 0, 0, peer=0),
            Span("combine", start + 0.3, start + 0.4, 1, 0, 0, 0, peer=0),
        ]
        report = TraceReport(
            start, start + 1.0, [RankSpans(RankId("attention", 0), 40 + int(start), spans)]
        )

        def answer(message: Message) -> Message | None:
            match message:
                case Watch():
                    return snapshot(1, 0)
                case StartTrace():
                    return report
            return None

        return answer

    with fake_instance(home, recording(5.0), more=[nothing, recording(5.5)]):
        done = run("trace", "--seconds", "0.1", "-o", str(home / "t.json"), env=environment(home))
    assert done.returncode == 0, done.stderr
    assert "4 spans of 2 ranks" in done.stderr
    assert "without instance 1: no answer came in time" in done.stderr
    trace = json.loads((home / "t.json").read_text())
    phases = check_trace(trace)
    names = [e["args"]["name"] for e in phases["M"] if e["name"] == "process_name"]
    assert names == ["instance 0 attention 0 (pid 45)", "instance 2 attention 0 (pid 45)"]
    assert sorted(e["ts"] for e in phases["X"]) == [0, 3e5, 5e5, 8e5]
    # The same batch, layer and tile, of two instances: an arrow each.
    assert len(phases["s"]) == len(phases["f"]) == 2
    assert trace["otherData"]["seconds"] == pytest.approx(1.5)


def test_a_trace_of_one_names_no_instance() -> None:
    report = TraceReport(0.0, 1.0, [RankSpans(RankId("expert", 3), 7, [])])
    (name, _) = to_perfetto(report)["traceEvents"]
    assert name["args"]["name"] == "expert 3 (pid 7)"
