"""`asapctl prefill` with streams that are pipes, devices, closed or gone."""

import gzip
import json
import os
import pty
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint, token_ids
from helpers.instances import wait_for
from helpers.program import ASAPCTL, environment, records

COUNT = 40


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt_token_ids": token_ids(50, seed)}) for seed in range(COUNT)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    return tmp_path


def shell(line: str, folder: Path, home: Path) -> "subprocess.CompletedProcess[str]":
    """`prefill` in a line of bash stands for the program with a model."""
    command = f"{ASAPCTL} prefill --model {checkpoint('qwen3_moe')}"
    return subprocess.run(
        ["bash", "-c", line.replace("prefill", command, 1)],
        cwd=folder,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("where", ["2> >(head -c1 >/dev/null)", "2>/dev/full", "2>&-"])
def test_notes_that_nobody_sees_change_nothing(where: str, folder: Path, home: Path) -> None:
    done = shell(f"prefill in.jsonl -o out --set model.max_model_len=60 {where}", folder, home)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(records(folder / "out")) == COUNT


def test_a_terminal_that_is_hung_up_changes_nothing(folder: Path, home: Path) -> None:
    line = json.dumps({"prompt_token_ids": token_ids(300)})
    (folder / "in.jsonl").write_text(f"{line}\n" * 300)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [ASAPCTL, "prefill", "in.jsonl", "-o", "out", "--model", str(checkpoint("qwen3_moe"))],
        cwd=folder,
        env={**environment(home), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    out = folder / "out"
    wait_for(lambda: out.exists() and out.stat().st_size > 0, "some results were written")
    os.close(master)
    assert process.wait(60) == 0
    assert len(records(out)) == 300


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prefill - <in.jsonl >&-", "standard output is closed"),
        ("prefill in.jsonl -o - >&-", "standard output is closed"),
        ("prefill in.jsonl --json >&-", "standard output is closed"),
        ("prefill - -o out <&-", "standard input is closed"),
        ("prefill - -o out 0>/dev/null", "standard input is closed"),
    ],
)
def test_what_is_closed_is_noticed_first(line: str, words: str, folder: Path, home: Path) -> None:
    done = shell(line, folder, home)
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"error: {words}")
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        "prefill in.jsonl -o /dev/stdout | gzip > out.gz",
        "prefill in.jsonl -o >(gzip > part; mv part out.gz)",
        "mkfifo pipe; (gzip < pipe > part; mv part out.gz) & prefill in.jsonl -o pipe",
    ],
)
def test_results_through_a_pipe_with_a_name(line: str, folder: Path, home: Path) -> None:
    done = shell(line, folder, home)
    assert done.returncode == 0, done.stderr
    wait_for((folder / "out.gz").exists, "the reader is done")
    wait_for(lambda: not (folder / "part").exists(), "the reader is done")
    whole = _unpacked(folder / "out.gz")
    assert len({json.loads(record)["custom_id"] for record in whole.splitlines()}) == COUNT
    assert f"{COUNT} prompts: {COUNT} ok" in done.stderr


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def test_a_pipe_that_does_not_block_is_waited_for(folder: Path, home: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        [
            *(ASAPCTL, "prefill", "in.jsonl", "-o", "-", "--model", str(checkpoint("qwen3_moe"))),
            *("--prompt-logprobs", "20"),  # many pipes full
        ],
        cwd=folder,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    taken: list[bytes] = []

    def read() -> None:
        with os.fdopen(reader, "rb") as file:
            taken.extend(file)

    thread = threading.Thread(target=read)
    thread.start()
    _, stderr = process.communicate(timeout=60)
    thread.join()
    assert process.returncode == 0, stderr
    assert len(taken) == COUNT
    assert sum(map(len, taken)) > 1 << 20
