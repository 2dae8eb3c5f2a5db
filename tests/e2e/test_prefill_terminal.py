"""`asapctl prefill` on a terminal: what is on the screen while it runs and afterwards."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint, token_ids
from helpers.program import environment
from helpers.screen import screen
from helpers.terminal import Terminal

FAMILY = "qwen3_moe"
SMALL = ("--set", "schedule.min_batch_tokens=300", "--set", "schedule.max_batch_tokens=600")


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


def write_prompts(path: Path, count: int) -> None:
    line = json.dumps({"prompt_token_ids": token_ids(300)})
    path.write_text(f"{line}\n" * count)


def test_results_on_the_terminal_stay_there(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_prompts(source, 20)
    arguments = ("prefill", str(source), "-o", "-", "--model", str(checkpoint(FAMILY)), *SMALL)
    with Terminal(*arguments, env=environment(home), columns=100) as terminal:
        assert terminal.wait() == 0
        shown = "".join(screen(terminal.raw, 100))
    for number in range(1, 21):
        assert f'"custom_id":"line-{number}"' in shown
    assert "tokens/s |" not in terminal.raw


@pytest.mark.parametrize("columns", [30, 50, 120])
def test_nothing_stale_stays_after_ctrl_c(columns: int, tmp_path: Path, home: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_prompts(source, 3000)
    arguments = ("prefill", str(source), "--model", str(checkpoint(FAMILY)), *SMALL)
    with Terminal(*arguments, env=environment(home), columns=columns) as terminal:
        terminal.expect("expert 0" if columns > 30 else "% ")
        terminal.press("\x03")  # is echoed; the signal is not sent where there is no shell
        os.killpg(terminal.process.pid, signal.SIGINT)
        assert terminal.wait() == 130
        shown = screen(terminal.raw, columns)
    text = "".join(shown)
    assert "tokens/s" not in text
    assert "interrupted: the results so far are in" in text
    assert "loading:" not in text
