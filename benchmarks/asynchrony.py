"""What asynchrony is worth: the highest rate within a TTFT target, asap against the synchronous.

python -m benchmarks.asynchrony paced    ranks that wait by a table, at the ASAP paper's ratios
python -m benchmarks.asynchrony cpu      model a on this machine's cores
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks import models, report
from benchmarks.comparisons import Comparison, on_cpu, paced
from benchmarks.contenders import (
    JUDGES,
    STEP,
    Layout,
    Limit,
    best_layouts,
    limits,
    overhead,
    ttft_of,
)
from benchmarks.offered import Load, trace_of
from engine.bench.summary import Summary
from engine.control.perfetto import to_perfetto

_TRACE_S = 2.0
_TRACE_SHARE = 0.9  # of sync's highest rate
_SEARCH_SHARE = 0.5  # of a load, for choosing a layout
_SHARE = 0.6  # of sync's highest rate, where TTFT is looked at
_DURATION_S = {"paced": 10.0, "cpu": 12.0}


@dataclass(frozen=True)
class Cell:
    """One policy at one rate, in one round. overhead: of paced ranks."""

    summary: Summary
    overhead: float


def compare(
    comparison: Comparison,
    rounds: int,
    traces: Path | None,
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Writes markdown as it is known: the layouts that were searched, the highest rates, and TTFT
    at a part of sync's.
    """
    load = comparison.load
    write(report.header(comparison.title))
    for note in (
        *comparison.notes,
        f"target: {load.slo_s:.3f} s; a load: {load.seconds:g} s; rounds: {rounds}, in each of "
        "which all get the same prompts; median (lowest to highest)",
        f"rates: loads {STEP - 1:.0%} apart, and between the last that meets the target and the "
        "next by the logarithm of TTFT",
    ):
        write(f"- {note}")
    search = replace(load, seconds=_SEARCH_SHARE * load.seconds)
    write(
        "\nLayouts: what each policy was tried on, and its highest rate by mean and by p99, from "
        f"loads of {search.seconds:g} s.\n"
    )
    best: dict[str, dict[str, Limit]] = {}
    near = comparison.first_rate
    for policy, layouts in comparison.layouts.items():
        best[policy], rows = best_layouts(layouts, search, near, say)
        near = best[policy]["mean"].met
        write(report.table(rows))
    seeds = {policy: iter(range(rounds)) for policy in best}

    def measured(policy: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            found = limits(best[policy], load, next(seeds[policy]))
            say(f"{policy}: {', '.join(f'{rate:.2f}/s by {j}' for j, rate in found.items())}")
            return found

        return run

    highest = report.alternate({policy: measured(policy) for policy in best}, rounds)
    write("Highest rates in prompts a second, each on its best layout.\n")
    write(_limits_table(highest))
    base = statistics.median(found["mean"] for found in highest["sync"])
    chosen = {policy: found["mean"].layout for policy, found in best.items()}
    rate = _SHARE * base
    say(f"TTFT at {rate:.2f}/s")
    cells = report.alternate(
        {policy: _measure(layout, load, rate, rounds) for policy, layout in chosen.items()}, rounds
    )
    write(f"TTFT at {rate:.2f} prompts a second, {_SHARE:.0%} of sync's highest by mean.\n")
    write(_ttft_table(cells))
    if traces is not None:
        rate = _TRACE_SHARE * base
        for policy, layout in chosen.items():
            path = traces / f"{policy}.json"
            path.write_bytes(msgspec.json.encode(_trace(layout, load, rate, comparison.notes)))
            write(f"- trace of {policy} at {rate:.2f}/s: {path}")


def _measure(layout: Layout, load: Load, rate: float, rounds: int) -> Callable[[], Cell]:
    seeds = iter(range(rounds))

    def run() -> Cell:
        with layout.running() as client:
            load.warm_up(client)
            return Cell(load.run(client, rate, next(seeds)), overhead(client))

    return run


def _trace(layout: Layout, load: Load, rate: float, notes: Sequence[str]) -> dict[str, object]:
    with layout.running() as client:
        load.warm_up(client)
        load.run(client, rate, 0, _TRACE_S)
        found = trace_of(client, _TRACE_S)
    return to_perfetto(found) | {"otherData": {"layout": layout.name, "notes": " | ".join(notes)}}


def _limits_table(highest: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for policy, found in highest.items():
        row = {"policy": policy}
        for judge in JUDGES:
            rates = [each[judge] for each in found]
            row[f"by {judge}"] = report.median_range(rates, 2)
            ours = [each[judge] for each in highest["asap"]]
            row[f"asap / it, by {judge}"] = report.ratio_range(ours, rates)
        rows.append(row)
    return report.table(rows)


def _ttft_table(cells: dict[str, list[Cell]]) -> str:
    def shortest_quarter(summary: Summary) -> float:
        ttft = summary.by_length[0].ttft
        assert ttft is not None  # no prompt failed
        return ttft.mean

    def seconds(of: Callable[[Summary], float], found: Sequence[Cell]) -> str:
        return report.median_range([of(cell.summary) for cell in found], 3)

    rows = []
    for policy, found in cells.items():
        row = {
            "policy": policy,
            "mean s": seconds(lambda summary: ttft_of(summary).mean, found),
            "p99 s": seconds(lambda summary: ttft_of(summary).p99, found),
            "shortest quarter s": seconds(shortest_quarter, found),
            "it / asap, shortest quarter": report.ratio_range(
                [shortest_quarter(cell.summary) for cell in found],
                [shortest_quarter(cell.summary) for cell in cells["asap"]],
            ),
            "given up": sum(cell.summary.given_up for cell in found),
            "driver late, most": f"{max(cell.summary.late_most_s for cell in found) * 1e3:.0f} ms",
        }
        if any(cell.overhead for cell in found):
            row["own overhead"] = f"{statistics.median(c.overhead for c in found):.1%} of busy time"
        rows.append(row)
    return report.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("what", choices=("paced", "cpu"))
    parser.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="of each load (default: 10 paced, 12 cpu); the longer, the less a queue that only "
        "grows is taken for one that lasts",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument(
        "--quick", action="store_true", help="one layout a policy, half as long, 1 round"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="write a trace of each policy")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--policies", metavar="A,B", help="only these, asap and sync among them")
    options = parser.parse_args()
    seconds = options.duration or _DURATION_S[options.what]
    rounds = options.rounds
    if options.quick:
        seconds, rounds = seconds / 2, 1
    comparison = paced if options.what == "paced" else on_cpu
    made = comparison(seconds, options.quick, options.cache)
    if options.policies:
        names = options.policies.split(",")
        if not {"asap", "sync"} <= set(names) <= set(made.layouts):
            parser.error(f"--policies: asap, sync and others of {', '.join(made.layouts)}")
        made = replace(made, layouts={name: made.layouts[name] for name in names})
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    compare(
        made,
        rounds,
        options.traces,
        write=lambda text: print(text, flush=True),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    main()
