"""The program with its standard streams closed, full, slow, or without a reader."""

import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from engine.streams import is_readable, is_writable, write_all
from helpers.program import ASAPCTL


def shell(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """`asapctl` in a line of bash, which connects its streams."""
    return subprocess.run(
        ["bash", "-c", line.replace("asapctl", ASAPCTL)],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("command", ["check --json", "check", "--help"])
@pytest.mark.parametrize(
    ("where", "why"),
    [
        (">/dev/full", "No space left on device"),
        (">&-", "it is closed"),
        ("1</dev/null", "it is closed"),
    ],
)
def test_output_that_gets_lost_is_one_error(
    command: str, where: str, why: str, tmp_path: Path
) -> None:
    done = shell(f"asapctl {command} {where}", tmp_path)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("no model given")]
    assert (done.returncode, errors) == (1, [f"error: standard output: cannot write: {why}"])


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", "2> >(true)"])
def test_notes_that_nobody_sees_are_no_error(where: str, tmp_path: Path) -> None:
    done = shell(f"asapctl check --json {where}", tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("{")
    assert shell(f"asapctl check --set a=b {where}", tmp_path).returncode == 2
    assert shell(f"asapctl no-such-command {where}", tmp_path).returncode == 2


def test_a_file_never_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    program = (
        "from asapctl.standard_streams import prepare\n"
        "prepare()\n"
        "import sys\n"
        "print(open('/dev/null').fileno() > 2, file=open('said', 'w'))\n"
        "print('note', file=sys.stderr)\n"
    )
    (tmp_path / "program.py").write_text(program)
    python = Path(ASAPCTL).with_name("python")
    done = shell(f"PYTHONPATH={Path.cwd()} {python} program.py <&- >&- 2>&-", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "said").read_text() == "True\n"


def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path: Path) -> None:
    done = shell("asapctl check --model $'no\\xff'", tmp_path)
    assert done.returncode == 2
    assert "no\\udcff" in done.stderr


@pytest.mark.parametrize(
    ("flags", "reads", "writes"),
    [(os.O_RDONLY, True, False), (os.O_WRONLY, False, True), (os.O_RDWR, True, True)],
)
def test_what_a_descriptor_is_open_for(flags: int, reads: bool, writes: bool) -> None:
    fd = os.open(os.devnull, flags)
    assert (is_readable(fd), is_writable(fd)) == (reads, writes)
    os.close(fd)
    for gone in (fd, -1):
        assert (is_readable(gone), is_writable(gone)) == (False, False)


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    size = 4 * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    thread = threading.Thread(target=write_all, args=(writer, b"x" * size))
    thread.start()
    taken = 0
    while taken < size:
        taken += len(os.read(reader, 1000))
    thread.join()
    os.close(reader)
    os.close(writer)
