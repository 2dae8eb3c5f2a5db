"""Instances started by `asapctl launch`, and requests to them."""

import json
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.instances import wait_for
from helpers.program import alive, descendants, environment, run, start

SMALL = ("--set", "attention.groups=1", "--set", "experts.ranks=1")


@contextmanager
def private_home() -> Iterator[Path]:
    """A folder for sockets and logs; afterwards, no instance has left anything in it."""
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        yield Path(folder)
        assert left_behind(Path(folder)) == []


def left_behind(home: Path) -> list[str]:
    base = home / "asapctl"
    return [path.name for path in base.iterdir()] if base.exists() else []


@contextmanager
def launched(
    home: Path, model: Path, *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A launched instance and its URL. It is killed at the end, if it has not ended by then."""
    process = start(
        *("launch", "cpu", "--model", str(model), "--port", "0", *SMALL, *arguments),
        env={
            **environment(home),
            "HTTP_PROXY": "http://127.0.0.1:9",
            "ALL_PROXY": "http://127.0.0.1:9",
        },
    )
    others = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(process.communicate()[1])
        others = descendants(process.pid)
        yield process, line.split()[1]
    finally:
        process.kill()
        process.communicate(timeout=30)
        wait_for(lambda: not any(map(alive, others)), "every process ended", deadline_s=10)
        wait_for(lambda: left_behind(home) == [], "the runtime folder is gone", deadline_s=10)


def instances(home: Path) -> list[dict[str, Any]]:
    """What `asapctl ps` lists."""
    done = run("ps", "--json", env=environment(home))
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def complete(url: str, ids: Sequence[int], timeout_s: float = 60.0) -> dict[str, Any]:
    """The answer to a completion of one token. Raises urllib.error.HTTPError."""
    body = {"prompt": list(ids), "max_tokens": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
