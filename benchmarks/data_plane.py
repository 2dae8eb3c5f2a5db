"""What the data plane costs: round trips by size, doorbell to compute, dispatch and combine against
plain copies, and what is allocated for a message.

python -m benchmarks.data_plane [--rounds N] [--cache DIR] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import report
from benchmarks.carriers import CARRIERS
from benchmarks.instance_doorbell import doorbell_in_instance
from benchmarks.models import DEFAULT_CACHE
from benchmarks.pair import EmptyExpert, Sender, place, random_part, sender
from engine.comm.layout import WindowShape

_SIZES = {"64 B": 64, "4 KB": 2**12, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}
_DOORBELL_BAR_US, _COPIES_BAR = 150, 2.0
_TOKENS, _HIDDEN, _EXPERTS, _TOP_K = 1024, 1024, 32, 4
_SHAPE = WindowShape(_TOKENS, _HIDDEN, _TOP_K, _EXPERTS, 4, lanes=2)
_IDLE_S = 0.005
_MESSAGES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the data plane between two processes.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="a few messages of each, to try it")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    torch.set_num_threads(1)
    share = 0.05 if options.quick else 1.0
    with torch.inference_mode():
        print(report.header("The data plane"))
        print("Round trip by size, median of medians of each round, microseconds\n")
        print(by_size(options.rounds, share))
        print(f"From the attention rank's ring to the start of computing (bar: {_DOORBELL_BAR_US})")
        print()
        print(doorbell(options.rounds, share, options.cache))
        shape = f"{_TOKENS} tokens x {_HIDDEN} float32, top-{_TOP_K} of {_EXPERTS} experts"
        print(f"Dispatch and combine of {shape} (bar: {_COPIES_BAR:g} times the plain copies)\n")
        print(against_copies(options.rounds, share))
        print(f"Allocated for each message (a dispatch and its combine), {shape}\n")
        print(allocations(max(10, int(_MESSAGES * share))))


def by_size(rounds: int, share: float) -> str:
    """Each carrier moves the bytes there and back into memory of the sender's own."""
    rows = []
    for name, size in _SIZES.items():
        count = max(3, int(share * min(500, max(20, 2**26 // size))))

        measures = {c: partial(_carry, c, size, count) for c in CARRIERS}
        found = report.alternate(measures, rounds)
        rows.append({"size": name} | {c: report.median_range(found[c]) for c in CARRIERS})
    return report.table(rows)


def _carry(carrier: str, size: int, count: int) -> float:
    with CARRIERS[carrier](size) as trip:
        return _median_us(trip, count)


def doorbell(rounds: int, share: float, cache: Path) -> str:
    """Medians of rounds, with the expert rank waiting by blocking, as it always does."""
    count = max(10, int(400 * share))
    found = report.alternate(
        {
            "endpoints alone, one message right after the other": partial(_doorbell, count, 0.0),
            "endpoints alone, 5 ms of nothing in between": partial(_doorbell, count, _IDLE_S),
            "an instance of model a, and writing the 64 tokens": partial(
                doorbell_in_instance, cache
            ),
        },
        rounds,
    )
    return report.table(
        {"between": name, "us, median (range)": report.median_range(values)}
        for name, values in found.items()
    )


def _doorbell(count: int, idle_s: float) -> float:
    shape = WindowShape(64, 512, _TOP_K, _EXPERTS, 4, lanes=2)
    with sender(shape, random_part(64, _EXPERTS, _TOP_K)) as (attention, where):
        waits: list[int] = []
        for _ in range(count):
            attention.round_trip()
            waits.append(where.opened_ns.value - attention.endpoint.rang_ns)
            time.sleep(idle_s)
    return statistics.median(waits) / 1e3


def against_copies(rounds: int, share: float) -> str:
    """Both move the rows and the routing into the window, and the rows of the answer out of it."""
    count = max(5, int(100 * share))
    with sender(_SHAPE, random_part(_TOKENS, _EXPERTS, _TOP_K)) as (attention, _):
        found = report.alternate(
            {
                "copies": partial(_median_us, attention.plain_copies, count),
                "whole": partial(_median_us, attention.round_trip, count),
            },
            rounds,
        )
    return report.table(
        [
            {
                "plain copies, us": report.median_range(found["copies"]),
                "dispatch + combine, us": report.median_range(found["whole"]),
                "ratio": report.ratio_range(found["whole"], found["copies"]),
            }
        ]
    )


def allocations(messages: int) -> str:
    """Of both ends together, which share this process here so that one profile sees them."""
    with place(_SHAPE) as where:
        attention = Sender(where, random_part(_TOKENS, _EXPERTS, _TOP_K))
        expert = EmptyExpert(where)

        def exchange() -> None:
            attention.round_trip(meanwhile=expert.serve)

        exchange()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(messages):
                exchange()
        tensors = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.nbytes() > 0]
        tracemalloc.start()
        exchange()
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(messages):
            exchange()
        _, peak = tracemalloc.get_traced_memory()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        attention.endpoint.close()
        expert.endpoint.close()
    return report.table(
        [
            {
                "tensors": f"{len(tensors) / messages:.1f}",
                "of bytes": f"{sum(tensors) / messages:,.0f}",
                "most bytes of Python objects at a time": f"{peak - before:,}",
                "bytes kept": f"{(after - before) / messages:.1f}",
            }
        ]
    )


def _median_us(trip: Callable[[], None], count: int) -> float:
    for _ in range(3):
        trip()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        trip()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
