"""Logs of several processes as one stream, and those that are kept of instances that failed."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from asapctl.launch_view import live_text
from engine.control.messages import Latency, Snapshot
from engine.errors import UsageError
from engine.launch.kept_logs import find_kept, keep_logs
from engine.launch.logs import Logs


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def read(logs: Logs, last: bool = False) -> list[tuple[str, str]]:
    return [(line.source, line.text) for line in logs.read(last)]


def at(second: int, text: str) -> str:
    return f"2026-06-11 12:00:{second:02},000 {text}"


def test_lines_come_in_the_order_of_their_time(folder: Path) -> None:
    append(folder / "attention-0.log", f"{at(1, 'a')}\n{at(5, 'b')}\nTraceback\n  more\n")
    append(folder / "expert-1.log", f"started\n{at(2, 'c')}\n{at(6, 'd')}\n")
    with Logs(folder) as logs:
        assert read(logs) == [
            ("expert-1", "started"),
            ("attention-0", at(1, "a")),
            ("expert-1", at(2, "c")),
            ("attention-0", at(5, "b")),
            ("attention-0", "Traceback"),  # of the same moment as the line before it
            ("attention-0", "  more"),
            ("expert-1", at(6, "d")),
        ]
        assert read(logs) == []


def test_there_is_no_kept_log_where_nobody_can_look(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_kept("x") is None
    state.write_text("")  # not a folder
    assert find_kept("x") is None
    monkeypatch.delenv("XDG_STATE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert find_kept("x") is None


def test_a_line_is_shown_when_it_is_whole(folder: Path) -> None:
    log = folder / "http.log"
    append(log, "one\ntw")
    with Logs(folder) as logs:
        assert read(logs) == [("http", "one")]
        append(log, "o\r\nthr")
        assert read(logs) == [("http", "two")]
        append(folder / "expert-0.log", "new\n")  # of a process that started later
        assert read(logs) == [("expert-0", "new")]
        assert read(logs, last=True) == [("http", "thr")]


def test_what_is_not_text_does_no_harm(folder: Path) -> None:
    (folder / "http.log").write_bytes(b"\xff\xfe\n\n" + b"x" * 200_000 + b"\n")
    with Logs(folder) as logs:
        assert [len(text) for _, text in read(logs)] == [2, 0, 200_000]


@pytest.mark.parametrize("name", ["expert-1", "expert 1", "expert:1", " expert.1"])
def test_one_process(folder: Path, name: str) -> None:
    append(folder / "expert-1.log", "mine\n")
    append(folder / "expert-0.log", "other\n")
    with Logs(folder, name) as logs:
        assert read(logs) == [("expert-1", "mine")]
    with pytest.raises(UsageError, match='no log of "expert"; there are: expert-0, expert-1'):
        Logs(folder, "expert")


def test_following_ends_with_the_last_lines_of_a_folder_that_is_gone(folder: Path) -> None:
    append(folder / "http.log", "first\n")

    def alive() -> Iterator[bool]:
        yield True
        append(folder / "http.log", "last\nwithout end")
        (folder / "http.log").unlink()
        folder.rmdir()
        yield False

    states = alive()
    with Logs(folder) as logs:
        found = [line.text for line in logs.follow(lambda: next(states))]
    assert found == ["first", "last", "without end"]


def test_logs_of_failed_instances_are_found_by_name(tmp_path: Path, state: Path) -> None:
    def fail(name: str, text: str) -> Path:
        logs = tmp_path / "now"
        logs.mkdir()
        append(logs / "http.log", text)
        return keep_logs(logs, name)

    assert find_kept("default") is None
    first = fail("default", "one")
    os.utime(first, (1, 1))
    second = fail("default", "two")  # within the same second
    fail("default-2", "another")
    assert first.parent == second.parent == state / "asapctl" / "logs"
    assert find_kept("default") == second
    assert find_kept(first.name) == first
    assert find_kept("default.") is None
    for number in range(20):
        os.utime(fail(f"many-{number}", ""), (10 + number, 10 + number))
    assert not first.exists()
    assert len(list(first.parent.iterdir())) <= 21


def test_the_live_line_says_the_most_important_first() -> None:
    snapshot = Snapshot(ready=True, waiting=2, running=3, finished=1234, failed=0, ranks=[])
    assert live_text(snapshot) == "3 running, 2 waiting, 1,234 done"
    busy = Snapshot(
        ready=True,
        waiting=0,
        running=1,
        finished=5,
        failed=2,
        ranks=[],
        tokens_per_s=12345.6,
        ttft=Latency(count=5, p50=0.05, p99=1.5),
        quitting=True,
        problems=["expert 1 is stalled"],
    )
    assert live_text(busy) == (
        "stopping | expert 1 is stalled | 1 running, 0 waiting, 5 done, 2 failed | "
        "12,346 tokens/s | TTFT p50 50 ms, p99 1.50 s"
    )
