"""`asapctl bench serve` as a program, against a real instance of a small model."""

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import checkpoint
from helpers.instances import wait_for
from helpers.launched import launched, private_home
from helpers.program import environment, run, start


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with private_home() as folder:
        yield folder


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with launched(home, checkpoint("qwen3_moe"), "--set", "model.max_model_len=100") as (_, url):
        yield url


def finished(url: str) -> float:
    """How many prompts the instance has answered."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("asapctl_prompts_fin"))


def test_a_trace_on_an_instance(home: Path, url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lengths = [5, 40, 100, 101, 7, 30]
    lines = [{"timestamp": 100 * i, "input_length": n} for i, n in enumerate(lengths)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(
        *("bench", "serve", url, "--trace", str(trace), "--slo", "ttft=60", "--json"),
        env=environment(home),
    )
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(done.stdout)["trials"]
    summary = trial["summary"]
    assert (trial["too_long"], trial["failures"], trial["meets"]) == (1, [], ["mean", "p99"])
    assert (summary["requests"], summary["answered"], summary["within_slo"]) == (5, 5, 1.0)
    assert summary["seconds"] >= 0.5
    assert 0 < summary["ttft"]["p50"] <= summary["ttft"]["p99"]
    ends = [(each["least"], each["most"]) for each in summary["by_length"]]
    assert (ends[0][0], ends[-1][1]) == (5, 100)


def test_the_highest_rate_of_an_instance(home: Path, url: str) -> None:
    """Of an SLO that nothing meets, so that it ends soon."""
    done = run(
        *("bench", "serve", url, "--rate", "20", "--lengths", "uniform:5-50", "--duration", "0.2"),
        *("--slo", "ttft=0.0001", "--find-rate"),
        env=environment(home),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(": too much\n") == 3  # at 20/s, 10/s, 5/s
    assert "highest rate with p99 TTFT within 0.1 ms: none that was tried\n" in done.stdout


def test_interrupted(home: Path, url: str) -> None:
    before = finished(url)
    program = start(
        *("bench", "serve", url, "--rate", "50", "--lengths", "fixed:5", "--duration", "1000"),
        env=environment(home),
    )
    wait_for(lambda: finished(url) >= before + 5, "some were answered")
    program.send_signal(signal.SIGINT)
    stdout, stderr = program.communicate(timeout=30)
    assert (program.returncode, stderr) == (130, "")
    assert "interrupted: what was not answered by then counts as given up" in stdout
    assert "offered" in stdout
    assert "answered" in stdout
