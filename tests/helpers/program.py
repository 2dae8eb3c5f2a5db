"""The installed program `asapctl`, run as its user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ASAPCTL = str(Path(sys.executable).with_name("asapctl"))


def environment(home: Path) -> dict[str, str]:
    """An environment whose caches, logs and sockets are under `home`, which should be short."""
    home.mkdir(exist_ok=True)
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "NO_COLOR": "1",
    }


def start(*arguments: str, env: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [ASAPCTL, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *arguments: str, env: dict[str, str], stdin: bytes | None = None
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [ASAPCTL, *arguments],
        env=env,
        input=stdin or b"",
        capture_output=True,
        check=False,
        timeout=120,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Not gone, and not merely waiting for somebody to read its exit code."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def records(path: Path) -> dict[str, dict[str, Any]]:
    """The records of an output by custom_id; every line is whole, and no id comes twice."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    found: dict[str, dict[str, Any]] = {}
    for line in data.splitlines():
        record = json.loads(line)
        assert record["custom_id"] not in found
        found[record["custom_id"]] = record
    return found
