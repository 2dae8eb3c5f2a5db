"""`asapctl status` as a program, of an instance that only seems to be there."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.control.messages import Message, Snapshot, Watch
from helpers.fake_instances import fake_instance
from helpers.instances import wait_for
from helpers.program import ASAPCTL, environment, run
from helpers.snapshots import expert_rank, snapshot
from helpers.terminal import Terminal


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


def healthy(message: Message) -> Snapshot | None:
    return snapshot() if isinstance(message, Watch) else None


def stalled(message: Message) -> Snapshot:
    return snapshot(
        ranks=[expert_rank(0, state="stalled")],
        problems=["expert 0 has work and has made no progress for 12 s"],
    )


def test_one_picture_without_a_terminal(home: Path) -> None:
    with fake_instance(home, healthy):
        done = run("status", env=environment(home))
        dumb = run("status", "demo", "--once", env={**environment(home), "TERM": "dumb"})
        ascii_ = run(
            "status", "--once", env={**environment(home), "PYTHONIOENCODING": "ascii", "LANG": "C"}
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo  healthy" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines()[-7:]] == [
        ["attention", "state"],
        ["0", "computing"],
        ["1", "waiting"],
        [],
        ["expert", "state"],
        ["0", "computing"],
        ["1", "+1"],
    ]
    assert "\x1b" not in done.stdout
    assert dumb.stdout == done.stdout
    assert (ascii_.returncode, ascii_.stdout.isascii()) == (0, True)


def test_json_is_all_that_is_printed(home: Path) -> None:
    with fake_instance(home, healthy):
        done = run("status", "--json", env=environment(home))
    assert (done.returncode, done.stderr) == (0, "")
    shown = json.loads(done.stdout)
    assert shown["health"] == "healthy"
    assert shown["instance"]["name"] == "demo"
    assert {"ready", "waiting", "tokens_per_s", "goodput", "history", "problems"} <= set(shown)
    assert set(shown["ttft"]) == {"count", "mean", "p50", "p90", "p99"}
    attention, *_, expert = shown["ranks"]
    assert attention["id"] == {"role": "attention", "rank": 0, "incarnation": 0}
    assert attention["lanes"][0] == {"lane": 0, "batch": 17, "tokens": 4096, "layer": 12}
    assert expert["hottest"] == {"expert": 7, "tokens": 900, "imbalance": 1.84}


@pytest.mark.parametrize("form", ["--json", "--once"])
def test_the_exit_code_says_that_something_is_wrong(home: Path, form: str) -> None:
    with fake_instance(home, stalled):
        done = run("status", form, env=environment(home))
    assert (done.returncode, done.stderr) == (1, "")
    assert "no progress for 12 s" in done.stdout


def test_no_instance(home: Path) -> None:
    done = run("status", "--json", env=environment(home))
    assert (done.returncode, done.stdout) == (3, "")
    with fake_instance(home, healthy):
        done = run("status", "other", env=environment(home))
        assert (done.returncode, done.stdout) == (3, "")
        assert "other" in done.stderr
        with fake_instance(home, healthy, name="second"):
            done = run("status", env=environment(home))
    assert done.returncode == 2
    assert "demo, second" in done.stderr


def test_a_controller_that_does_not_answer(home: Path) -> None:
    with fake_instance(home, lambda message: None):
        done = run("status", "--json", env=environment(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert "did not answer within 2 s" in done.stderr


def test_a_reader_that_leaves(home: Path) -> None:
    with fake_instance(home, healthy), Path("/dev/full").open("w") as full:
        reader, writer = os.pipe()
        os.close(reader)
        for output in (writer, full):
            done = subprocess.run(
                [ASAPCTL, "status", "--json"],
                env=environment(home),
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 1
            assert done.stderr.startswith("error: ")
            assert len(done.stderr.splitlines()) == 1
        os.close(writer)


def test_keys_in_a_terminal(home: Path) -> None:
    many = snapshot(64, 64)
    with (
        fake_instance(home, lambda message: many),
        Terminal("status", env=environment(home)) as terminal,
    ):
        terminal.expect("(1 of 130)")
        assert terminal.modes != terminal.before
        terminal.press("\x1b[B")
        terminal.expect("(2 of 130)")
        terminal.press("\x1b[B\x1b[B\x1b[A\x1b[C")  # the last one means nothing
        terminal.expect("(3 of 130)")
        terminal.press("\x1b[F")
        terminal.expect("(115 of 130)")
        terminal.press("\x1b[")
        terminal.press("H")
        terminal.expect("(1 of 130)")
        terminal.press("s")
        terminal.expect("s sorts (by busy)")
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.modes == terminal.before
        assert terminal.raw.rstrip().endswith("\x1b[?25h\x1b[?1049l")  # the cursor is back


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_the_terminal_as_it_was(home: Path, number: int, code: int) -> None:
    with fake_instance(home, healthy), Terminal("status", env=environment(home)) as terminal:
        terminal.expect("q quits")
        terminal.process.send_signal(number)
        assert terminal.wait() == code
        assert terminal.modes == terminal.before
        assert "\x1b[?1049l" in terminal.raw


def test_it_can_be_suspended(home: Path) -> None:
    with fake_instance(home, healthy), Terminal("status", env=environment(home)) as terminal:
        process = psutil.Process(terminal.process.pid)
        terminal.expect("q quits")
        terminal.process.send_signal(signal.SIGTSTP)
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "it stops")
        assert terminal.modes == terminal.before
        process.resume()
        terminal.expect("q quits")
        terminal.press("q")
        assert terminal.wait() == 0


def test_it_is_drawn_several_times_a_second(home: Path) -> None:
    counter = iter(range(100_000))
    with (
        fake_instance(home, lambda message: snapshot(finished=next(counter))) as controller,
        Terminal("status", env=environment(home)) as terminal,
    ):
        terminal.expect("0 done")
        deadline = time.monotonic() + 30
        while True:  # on a busy machine, not in every second
            asked = [when for when, _ in controller.heard]
            if any(
                later - earlier <= 1.0 for earlier, later in zip(asked, asked[4:], strict=False)
            ):
                break
            assert time.monotonic() < deadline
            terminal.expect(f"{len(asked)} done")
        terminal.press("q")
        assert terminal.wait() == 0


@pytest.mark.parametrize(("columns", "rows"), [(20, 5), (1, 1), (300, 80)])
def test_terminals_of_any_size(home: Path, columns: int, rows: int) -> None:
    with (
        fake_instance(home, stalled),
        Terminal("status", env=environment(home), columns=columns, rows=rows) as terminal,
    ):
        terminal.expect("demo" if columns > 4 else "…")
        terminal.press("\x1b[Bs")
        terminal.press("q")
        assert terminal.wait() == 1


def test_silence_and_the_end_are_seen(home: Path) -> None:
    answers = {"on": True}
    with fake_instance(home, lambda m: snapshot() if answers["on"] else None):
        with Terminal("status", env=environment(home)) as terminal:
            terminal.expect("healthy")
            answers["on"] = False
            terminal.expect("no answer for")
            terminal.press("q")
            assert terminal.wait() == 1
        answers["on"] = True
        terminal = Terminal("status", env=environment(home))
        terminal.expect("healthy")
    with terminal:
        terminal.expect("instance demo has ended")
        assert terminal.wait() == 0
        assert terminal.modes == terminal.before
