"""What asapctl takes before and beside the work: its start, its help, and an instance at rest.

python -m benchmarks.footprint [--rounds N] [--rest S]
"""

import argparse
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import models, programs, report
from engine.bench.workload import random_prompts
from engine.errors import RunError

_POLL_S = 0.002
_SETTLE_S = 3.0


def first_result(model: Path, environment: dict[str, str]) -> float:
    """Seconds from the start of `asapctl prefill` to its first line of results."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        (prompt,) = random_prompts([128], 256)
        source.write_text(json.dumps({"prompt_token_ids": prompt}) + "\n", encoding="ascii")
        start = time.monotonic()
        process = programs.started(
            ("prefill", str(source), "-o", str(output), "--model", str(model)), environment
        )
        while not (output.exists() and output.stat().st_size) and process.poll() is None:
            time.sleep(_POLL_S)
        seconds = time.monotonic() - start
        programs.finished(process)
    return seconds


def show_help() -> float:
    """Seconds of `asapctl --help`."""
    start = time.monotonic()
    subprocess.run(programs.command("--help"), stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def at_rest(model: Path, environment: dict[str, str], rest_s: float) -> float:
    """The share of one core that all processes of a launched instance take without requests."""
    process = programs.started(("launch", "--model", str(model), "--port", "0"), environment)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():  # it says so when it is ready
            raise RunError(f"asapctl launch: {process.communicate()[1]}")
        time.sleep(_SETTLE_S)
        before = programs.cpu_seconds(process.pid)
        time.sleep(rest_s)
        return (programs.cpu_seconds(process.pid) - before) / rest_s
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description="What asapctl takes before and beside the work.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--rest", type=float, default=20.0, metavar="S", help="watch for so long")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    options = parser.parse_args()
    model = models.build("a", options.cache)
    with programs.private_runtime() as environment:
        measures: dict[str, Callable[[], float]] = {
            "start to first result, model a, s": lambda: first_result(model, environment),
            "asapctl --help, s": show_help,
            "instance at rest, % of a core": lambda: (
                100 * at_rest(model, environment, options.rest)
            ),
        }
        first_result(model, environment)  # from now on the page cache is warm
        found = report.alternate(measures, options.rounds)
    print(report.header("Before and beside the work"))
    rows = [{"": name, "median": report.median_range(found[name], 2)} for name in measures]
    print(report.table(rows))


if __name__ == "__main__":
    main()
