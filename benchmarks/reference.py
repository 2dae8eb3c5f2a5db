"""What disaggregation costs: the engine beside the same kernels in plain processes, and the peak.

    python -m benchmarks.reference [MODEL ...] [--rounds N]

The plain processes (benchmarks/plain.py) are one a core, of one thread, each with the whole model.
Both run the same batches of the same prompts, in turn; the other one sleeps meanwhile.
"""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

from benchmarks import models, report
from benchmarks.plain import PlainProcesses, engine_batches, least_batch
from engine.bench.offline import prompts_flop
from engine.bench.peak import Peak
from engine.bench.rounds import run_round
from engine.launch.checks import plan_of
from engine.launch.running import start_instance
from engine.offline.job import window_of


def compare(name: str, rounds: int, cache: Path, overrides: list[str]) -> dict[str, object]:
    """A row of the table."""
    model, prompts = models.build(name, cache), models.workload()
    lengths = [len(prompt) for prompt in prompts]
    plan = plan_of("cpu", overrides, model)
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        client = stack.enter_context(start_instance(plan))
        plain = stack.enter_context(PlainProcesses(model, cores))
        peak = stack.enter_context(Peak(cores))
        least = least_batch(client)
        batches = engine_batches(plan.topology, plan.groups, least, lengths)

        def engine() -> float:
            done = run_round(client, prompts, window_of(plan))
            tokens["asapctl"] = done.token_ids
            return sum(lengths) / done.seconds

        def processes() -> float:
            seconds, tokens["plain"] = plain.run(prompts, batches)
            return sum(lengths) / seconds

        tokens: dict[str, list[int]] = {}
        engine()
        processes()  # warm
        measures = {"asapctl": engine, "plain": processes, "peak": peak.measure}
        found = report.alternate(measures, rounds)
    flop = prompts_flop(plan.config, lengths) / sum(lengths)
    reached = [speed * flop for speed in found["asapctl"]]
    same = sum(a == b for a, b in zip(tokens["asapctl"], tokens["plain"], strict=True))
    return {
        "model": name,
        "asapctl tokens/s": report.median_range(found["asapctl"]),
        "plain processes tokens/s": report.median_range(found["plain"]),
        "ratio": report.ratio_range(found["asapctl"], found["plain"]),
        "asapctl GFLOP/s": report.median_range([each / 1e9 for each in reached], 1),
        "peak GFLOP/s": report.median_range([each / 1e9 for each in found["peak"]], 1),
        "share of peak": report.ratio_range(reached, found["peak"]),
        "same first tokens": f"{same} of {len(prompts)}",
        "layout": f"{plan.groups} attention, {len(plan.experts)} expert ranks, "
        f"batches from {least} tokens",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What disaggregation costs, and how far the peak.")
    parser.add_argument("names", nargs="*", default=models.NAMES, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    print(report.header("Against the peak, and against plain processes"))
    made = (options.rounds, options.cache, options.set)
    print(report.table([compare(name, *made) for name in options.names]))


if __name__ == "__main__":
    main()
