"""What `asapctl status` draws, for terminals of every size."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asapctl.status_rows import SORTS, bar
from asapctl.status_view import StatusView, health_of, is_good, sparkline
from asapctl.units import count, memory, seconds
from engine.control.messages import HistoryPoint, Snapshot
from engine.launch.registry import InstanceRecord
from helpers.snapshots import attention_rank, expert_rank, snapshot

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


def draw(
    view: StatusView, shown: Snapshot, width: int, height: int | None, silent_s: float = 0.0
) -> list[str]:
    lines = view.lines(RECORD, shown, width, height, silent_s)
    assert all(line.cell_len <= width for line in lines)
    assert height is None or len(lines) <= height
    return [line.plain for line in lines]


def test_all_of_a_small_instance_is_on_80x24() -> None:
    text = "\n".join(draw(StatusView(), snapshot(), 80, 24))
    for expected in (
        "demo  healthy  up 1 h 02 min  http://127.0.0.1:8000",
        "3 running  12 waiting  1,204 done  1 failed",
        "12,345 prompt tokens/s  goodput 3.20/s (TTFT within 2.00 s)",
        "TTFT p50 0.82 s  p90 1.30 s  p99 2.01 s",
        "0         computing  50%  25% ████▒▒·· #17 4096t L12  #18 2048t L3       256 MiB",
        "1  +1     waiting    75% ██████··     3    1,000 3,5",
        "#7 1.8x     1.0 GiB",
        "q quits  s sorts (by rank)  arrows scroll",
    ):
        assert expected in text
    assert "…" not in text
    (throughput,) = [line for line in text.splitlines() if line.startswith("tokens/s")]
    assert throughput.endswith("▇▇█████ 59 (of 59)")


def test_it_is_readable_without_colour_and_without_unicode() -> None:
    console = Console(file=io.StringIO(), width=80, no_color=True, force_terminal=False)
    with console.capture() as capture:
        for line in StatusView(ascii_only=True).lines(RECORD, snapshot(), 80):
            console.print(line)
    text = capture.get()
    assert text.isascii()
    assert "\x1b" not in text
    assert "####--.." in text
    assert "computing" in text


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_nothing_breaks_on_20x5(ranks: int) -> None:
    view = StatusView()
    lines = draw(view, snapshot(ranks, ranks, problems=["expert 1 is dead"]), 20, 5)
    assert lines[0].startswith("demo  degraded")
    assert lines[2] == "! expert 1 is dead"
    assert lines[4].split()[:2] == ["0", "50%"]
    for _ in range(3):
        view.press("page down")
        assert len(draw(view, snapshot(ranks, ranks), 20, 5)) == 5


@given(
    st.integers(1, 200),
    st.none() | st.integers(1, 60),
    st.integers(0, 70),
    st.integers(0, 70),
    st.lists(
        st.sampled_from(["up", "down", "page up", "page down", "home", "end", "sort"]), max_size=5
    ),
    st.booleans(),
)
def test_any_size_any_keys(
    width: int, height: int | None, attention: int, experts: int, keys: list, wrong: bool
) -> None:
    view = StatusView()
    shown = snapshot(attention, experts, problems=["it is wrong"] * 9 * wrong)
    for key in keys:
        draw(view, shown, width, height, silent_s=3.0 * wrong)
        view.press(key)
    draw(view, shown, width, height)


def test_every_rank_of_many_can_be_scrolled_to() -> None:
    view, shown = StatusView(), snapshot(64, 64)
    seen = {"attention": set(), "expert": set()}
    for _ in range(200):
        lines = draw(view, shown, 80, 24)
        role = ""
        for line in lines[7:-1]:  # the tables
            first = line.split()[0]
            if first in seen:
                role = first
            else:
                assert role, "a row without its heading"
                seen[role].add(int(first))
        view.press("down")
    assert seen == {"attention": set(range(64)), "expert": set(range(64))}
    assert lines[-1].endswith("(115 of 130)")
    view.press("home")
    assert draw(view, shown, 80, 24)[8].startswith("0 ")
    view.press("end")
    assert draw(view, shown, 80, 24) == lines
    assert "(" not in draw(view, snapshot(2, 2), 80, 24)[-1].removeprefix("q quits  s sorts (")


def test_sorting() -> None:
    ranks = [
        attention_rank(0, recent_busy=0.1, state="idle"),
        attention_rank(1, recent_busy=0.9, state="computing"),
        attention_rank(2, recent_busy=0.9, state="dead"),
        expert_rank(0),
    ]
    view, orders = StatusView(), {}
    for _ in SORTS:
        lines = draw(view, snapshot(ranks=ranks), 80, None)
        start = next(n for n, line in enumerate(lines) if line.startswith("attention state"))
        orders[view.sort] = [line.split()[0] for line in lines[start + 1 : start + 4]]
        view.press("sort")
    assert view.sort == "rank"
    assert orders["rank"] == ["0", "1", "2"]
    assert orders["busy"] == ["1", "2", "0"]
    assert orders["state"] == ["2", "1", "0"]
    assert orders["memory"] == ["2", "1", "0"]


def test_health() -> None:
    assert health_of(snapshot()) == "healthy"
    assert health_of(snapshot(ready=False)) == "starting"
    assert health_of(snapshot(quitting=True)) == "stopping"
    assert health_of(snapshot(problems=["x"])) == "degraded"
    assert health_of(snapshot(ranks=[expert_rank(0, state="dead")])) == "degraded"
    stalled = snapshot(ranks=[expert_rank(0, state="stalled")], problems=["x"], quitting=True)
    assert health_of(stalled) == "stalled"
    assert not is_good("stalled")
    assert is_good("starting")


def test_problems_are_shown_and_the_silence_of_a_controller() -> None:
    lines = draw(StatusView(), snapshot(problems=[f"p{n}" for n in range(9)]), 80, 24)
    assert [line for line in lines if line.startswith("!")] == [
        *("! p0", "! p1", "! p2"),
        "! 6 problems: see --once",
    ]
    assert "! p8" in draw(StatusView(), snapshot(problems=[f"p{n}" for n in range(9)]), 80, None)
    lines = draw(StatusView(), snapshot(), 80, 24, silent_s=7.0)
    assert "silent" in lines[0]
    assert "! no answer for 7 s" in lines


def test_before_anything_happened() -> None:
    empty = Snapshot(False, 0, 0, 0, 0, [])
    text = "\n".join(draw(StatusView(), empty, 80, 24))
    assert "demo  starting" in text
    assert "TTFT of the last minute: none yet" in text


def test_sparklines_and_bars() -> None:
    assert sparkline([0, 1, 50, 100], 100) == "▁▂▅█"
    assert sparkline([0.0, 0.0], 0.0) == "▁▁"
    assert sparkline([0, 100], 100, ascii_only=True) == "_#"
    assert bar(0.5, 0.25, 8, False).plain == "████▒▒··"
    assert bar(0.99, 0.5, 8, False).plain == "████████"
    assert bar(2.0, 2.0, 4, True).plain == "####"
    history = [HistoryPoint(1000.0 * n, 0, 0) for n in range(60)]
    assert "59,000 (of 59,000)" in "\n".join(
        draw(StatusView(), snapshot(history=history), 80, None)
    )


def test_units() -> None:
    assert [memory(n) for n in (0, 2**20, 900 * 2**20, 2**31, 2**41)] == [
        *("", "1.0 MiB", "900 MiB", "2.0 GiB", "2.0 TiB")
    ]
    assert [seconds(s) for s in (0.008, 0.82, 12.34, 123.4)] == [
        "8 ms",
        "0.82 s",
        "12.3 s",
        "123 s",
    ]
    assert [count(n) for n in (0, 99_999, 1_234_567, 12_345_678, 2e9)] == [
        *("0", "99,999", "1,235k", "12.3M", "2.0G")
    ]
    assert max(len(count(10.0**n)) for n in range(13)) <= 8
