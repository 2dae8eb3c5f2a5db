import io
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from asapctl.live_lines import cropped
from asapctl.prefill_view import duration, may_draw, progress_text, summary_text
from engine.control.durations import Durations
from engine.control.messages import RankStatus, Snapshot
from engine.offline.stats import Summary, Tally, summarize
from engine.topology.ranks import RankId

RANKS = [
    RankStatus(RankId("expert", 0), 1, True, busy=0.25),
    RankStatus(RankId("attention", 0), 1, True, busy=0.5),
]


def test_progress() -> None:
    tally = Tally()
    tally.prompts, tally.ok, tally.prompt_tokens = 40, 19, 5000
    tally.fail("empty_prompt", "line 3: the prompt is empty", 50)
    tally.bytes_done += 200
    tally.first_admission = 100.0
    text = progress_text(tally, 1000, Snapshot(True, 0, 0, 0, 0, RANKS), now=110.0)
    # Lines of 250 bytes are finished: a quarter in 10 s, however much has been read.
    assert text == (
        "20 prompts | 1 failed | 500 tokens/s | 25% | 30 s left\nattention 0 50%  expert 0 25%"
    )


def test_progress_says_that_ranks_are_paced() -> None:
    snapshot = Snapshot(True, 0, 0, 0, 0, [], paced="paced: it waits")
    assert progress_text(Tally(), None, snapshot, now=1.0) == "paced | 0 prompts"


@pytest.mark.parametrize("known", [600, 0])
def test_progress_of_a_rerun_goes_by_its_own_rate(known: int) -> None:
    tally = Tally(bytes_before=known)
    for _ in range(6):
        tally.skip(100)
    tally.ok, tally.bytes_done, tally.first_admission = 1, 100, 100.0
    # 100 bytes in 10 s, and 300 are left; the 600 of the run before cost nothing.
    text = progress_text(tally, 1000, None, now=110.0)
    assert text == "7 prompts | 0 tokens/s | 70% | 30 s left"


def test_progress_before_anything_and_of_a_pipe() -> None:
    tally = Tally()
    assert progress_text(tally, 0, None, now=1.0) == "0 prompts"
    tally.first_admission, tally.ok = 0.0, 1
    assert progress_text(tally, None, None, now=1.0) == "1 prompt | 0 tokens/s"


def test_drawn_lines_never_reach_the_edge() -> None:
    ranks = [RankStatus(RankId("expert", n), 1, True) for n in range(30)]
    text = progress_text(Tally(), None, Snapshot(True, 0, 0, 0, 0, ranks), now=1.0)
    for width in (20, 50, 300):
        console = Console(width=width, file=io.StringIO())
        lines = console.render_lines(cropped(text, width), pad=False)
        assert len(lines) == 2
        assert all(sum(segment.cell_length for segment in line) <= width - 4 for line in lines)


@pytest.mark.parametrize(
    ("source", "output", "may"),
    [
        ("in.jsonl", None, True), ("in.jsonl", "out.jsonl", True), ("in.jsonl", "-", False),
        ("-", None, False), ("-", "out.jsonl", True), ("in.jsonl", "/dev/stdout", False),
        ("/dev/null", None, False),
    ],
)  # fmt: skip
def test_nothing_is_drawn_over_results(
    source: str, output: str | None, may: bool, tmp_path: Path
) -> None:
    """Standard output is a pipe, standard input is not a terminal."""
    (tmp_path / "in.jsonl").touch()
    code = (
        "import sys; from asapctl.prefill_view import may_draw\n"
        f"print(may_draw({source!r}, {output!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, stdin=subprocess.DEVNULL, check=True,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert done.stdout == f"{may}\n"


def test_progress_may_be_drawn_where_results_go_to_a_file_by_redirection(tmp_path: Path) -> None:
    code = (
        "import sys; from asapctl.prefill_view import may_draw\n"
        "print(may_draw('-', None), may_draw('x', '-'))"
    )
    with (tmp_path / "out").open("w+") as out:
        subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=out, check=True
        )
        out.seek(0)
        assert out.read() == "True True\n"


def test_nothing_is_drawn_while_prompts_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 0)
    assert not may_draw("-", "out.jsonl")


def summary(tally: Tally, ranks: Sequence[RankStatus] = ()) -> Summary:
    return summarize(tally, ranks, model="m", dtype="float32", topology="t", output="out")


def test_the_summary_counts_failures_and_names_the_first() -> None:
    tally = Tally()
    tally.prompts = 3
    tally.fail("invalid_json", "line 2: not JSON: " + "x" * 500, 1)
    tally.fail("empty_prompt", "line 3: the prompt is empty", 1)
    tally.fail("empty_prompt", "line 4: the prompt is empty", 1)
    done = summary(tally)
    assert done.failures == {"empty_prompt": 2, "invalid_json": 1}
    text = summary_text(done)
    assert "failed: 2 empty_prompt, 1 invalid_json; the first is line 2: not JSON: xxx" in text
    assert max(map(len, text.splitlines())) < 400


def test_the_summary_says_one_prompt_and_nothing_to_do() -> None:
    tally = Tally()
    tally.prompts = tally.ok = 1
    assert summary_text(summary(tally)).startswith("1 prompt: 1 ok, 0 failed -> out\n")
    tally = Tally()
    for _ in range(12):
        tally.prompts += 1
        tally.skip(5)
    assert summary_text(summary(tally)) == "nothing to do: 12 prompts were done before -> out"


def test_the_summary_tells_of_ranks_that_were_started_again() -> None:
    tally = Tally()
    tally.prompts = tally.ok = 2
    ranks = [
        RankStatus(RankId("expert", 0, 2), 1, True, deaths=2),
        RankStatus(RankId("expert", 1, 1), 1, True, deaths=1),
        RankStatus(RankId("attention", 0), 1, True),
    ]
    done = summary(tally, ranks)
    assert done.restarts == 3
    assert [share.restarts for share in done.ranks] == [0, 2, 1]
    words = "ranks that ended and were started again: expert 0 (2 times), expert 1 (once)"
    assert words in summary_text(done)


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.4, "5 s"), (65, "1 min 05 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quantiles_are_close_without_keeping_every_value() -> None:
    draw = random.Random(2)
    values = [draw.lognormvariate(0, 2) for _ in range(5000)]
    durations = Durations()
    assert (durations.mean, durations.quantile(0.99)) == (0.0, 0.0)
    for value in values:
        durations.add(value)
    exact = sorted(values)[round(0.99 * len(values)) - 1]
    assert exact <= durations.quantile(0.99) <= exact * 1.02
    assert durations.quantile(1.0) == max(values)
    assert durations.mean == pytest.approx(sum(values) / len(values))
    durations.add(0.0)
