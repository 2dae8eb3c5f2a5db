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
from benchmarks.contenders import Layout, Limits, Load, best_layout, limits, overhead, time_alone
from benchmarks.offered import Outcome, lognormal
from engine.control.messages import TraceReport
from engine.control.perfetto import to_perfetto
from engine.hardware.load import load_hardware
from engine.launch.pacing import LABEL

_TRACE_S = 3.0
_SHARES = (0.3, 0.6, 0.9)  # of sync's highest rate, where TTFT is looked at
_PACED_LAYERS = 6  # of the model of paced-d4e4
_SEARCH_SHARE = 0.5  # of the duration, for choosing a layout


@dataclass(frozen=True)
class Comparison:
    """layouts: of each policy, those to choose from. first_rate: where to begin to look."""

    title: str
    notes: tuple[str, ...]
    layouts: dict[str, list[Layout]]
    load: Load
    first_rate: float


@dataclass(frozen=True)
class Cell:
    """One policy at one rate, in one round. overhead: of paced ranks."""

    outcome: Outcome
    overhead: float


def paced(seconds: float, quick: bool) -> Comparison:
    """D4 E4 against 8 devices that do both, at the paper's costs, lengths and target."""
    layers = load_hardware("cloudmatrix384").layers
    scale = f"paced.scale={layers / _PACED_LAYERS}"
    budgets = (8192,) if quick else (4096, 8192, 16384)

    def made(policy: str, groups: int, ranks: int, *more: str) -> list[Layout]:
        sides = (f"attention.groups={groups}", f"experts.ranks={ranks}")
        return [
            Layout(
                policy,
                "paced-d4e4",
                (scale, *sides, *more, f"schedule.max_batch_tokens={budget}"),
            )
            for budget in budgets
        ]

    return Comparison(
        title="Asynchrony, paced: D4 E4 against synchronous D8 E8 on the same 8 devices",
        notes=(
            LABEL,
            f"the table of costs: cloudmatrix384, {load_hardware('cloudmatrix384').about}",
            f"{_PACED_LAYERS} layers instead of {layers}, each {layers / _PACED_LAYERS:.2f} times "
            "as slow; each device stands for 4 dies",
            "lengths: lognormal, mean 5,000, sigma 1.0, from 31 to 32,768; Poisson arrivals; "
            "target: 5 s",
        ),
        layouts={
            "asap": made("asap", 4, 4),
            "sync": made("sync", 8, 8),
            "sync-chunked": made("sync-chunked", 8, 8, "schedule.chunk_tokens=8192"),
            "sync-afd": made("sync-afd", 4, 4),
        },
        load=Load(seconds, lognormal(5000, 1.0, 31, 32768), slo_s=5.0, vocabulary=32000),
        first_rate=8.0,
    )


def on_cpu(seconds: float, quick: bool, cache: Path) -> Comparison:
    """Model a; the target is 10 times what a prompt of the mean length takes by itself."""
    model = models.build("a", cache)

    def made(policy: str, groups: int, ranks: int, *more: str) -> Layout:
        sides = (f"attention.groups={groups}", f"experts.ranks={ranks}")
        return Layout(policy, "cpu", (*sides, *more), model)

    shapes = ((1, 1),) if quick else ((1, 1), (2, 1), (1, 2), (2, 2))
    batches = (512,) if quick else (512, 2048)
    chunks = (512,) if quick else (512, 2048)
    layouts = {
        "asap": [
            made("asap", *shape, f"schedule.min_batch_tokens={tokens}")
            for shape in shapes
            for tokens in batches
        ],
        "sync": [made("sync", 2, 2, f"schedule.max_batch_tokens={n}") for n in (1024, 4096)],
        "sync-chunked": [made("sync-chunked", 2, 2, f"schedule.chunk_tokens={n}") for n in chunks],
        "sync-afd": [made("sync-afd", *shape) for shape in shapes],
    }
    alone = time_alone(layouts["asap"][0], tokens=512, vocabulary=4096)
    return Comparison(
        title="Asynchrony on the CPU: model a",
        notes=(
            f"target: {10 * alone:.3f} s, 10 times a prompt of 512 tokens alone ({alone:.3f} s)",
            "lengths: lognormal, mean 512, sigma 1.0, at most 4,096; Poisson arrivals",
        ),
        layouts=layouts,
        load=Load(seconds, lognormal(512, 1.0, 1, 4096), slo_s=10 * alone, vocabulary=4096),
        first_rate=1 / alone,
    )


def compare(
    comparison: Comparison, rounds: int, traces: Path | None, say: Callable[[str], None]
) -> str:
    """Markdown: the layouts that were searched, the highest rates, and TTFT at several rates."""
    load = comparison.load
    parts = [report.header(comparison.title), *(f"- {note}" for note in comparison.notes), ""]
    search = replace(load, seconds=load.seconds * _SEARCH_SHARE)
    chosen: dict[str, Layout] = {}
    for policy, layouts in comparison.layouts.items():
        chosen[policy], found = best_layout(layouts, search, comparison.first_rate, say)
        parts += [_layout_lines(chosen[policy], found)]

    def measured(layout: Layout, seeds: list[int]) -> Callable[[], Limits]:
        return lambda: limits(layout, load, _next(seeds), comparison.first_rate)

    highest = report.alternate(
        {policy: measured(layout, list(range(rounds))) for policy, layout in chosen.items()},
        rounds,
    )
    parts += [_limits_table(highest)]
    base = statistics.median(limit.mean for limit in highest["sync"])
    rates = [share * base for share in _SHARES]
    for rate in rates:
        say(f"TTFT at {rate:.2f}/s")
        cells = report.alternate(
            {policy: _measure(layout, load, rate, rounds) for policy, layout in chosen.items()},
            rounds,
        )
        parts += [f"TTFT at {rate:.2f} prompts a second, {rate / base:.0%} of sync's highest rate:"]
        parts += ["", _ttft_table(cells)]
    if traces is not None:
        for policy, layout in chosen.items():
            path = traces / f"{policy}.json"
            path.write_bytes(msgspec.json.encode(_trace(layout, load, rates[-1], comparison.notes)))
            parts += [f"- trace of {policy} at {rates[-1]:.2f}/s: {path}"]
    return "\n".join(parts)


def _measure(layout: Layout, load: Load, rate: float, rounds: int) -> Callable[[], Cell]:
    seeds = list(range(rounds))

    def run() -> Cell:
        with layout.running() as client:
            return Cell(load.run(client, rate, _next(seeds)), overhead(client))

    return run


def _trace(layout: Layout, load: Load, rate: float, notes: Sequence[str]) -> dict[str, object]:
    with layout.running() as client:
        found = load.run(client, rate, 0, _TRACE_S).trace or TraceReport(0.0, 0.0, [])
    return to_perfetto(found) | {"otherData": {"layout": layout.name, "notes": " | ".join(notes)}}


def _next(seeds: list[int]) -> int:
    """The same in each round for every policy."""
    return seeds.pop(0)


def _layout_lines(best: Layout, found: Sequence[tuple[Layout, Limits]]) -> str:
    rows = [
        {
            "layout": layout.name,
            "by mean": f"{limit.mean:.2f}/s",
            "by p99": f"{limit.p99:.2f}/s",
            "taken": "yes" if layout is best else "",
        }
        for layout, limit in found
    ]
    return report.table(rows)


def _limits_table(highest: dict[str, list[Limits]]) -> str:
    rows = []
    asap = highest["asap"]
    for policy, found in highest.items():
        means, p99s = [each.mean for each in found], [each.p99 for each in found]
        rows.append(
            {
                "policy": policy,
                "highest rate by mean": report.median_range(means, 2),
                "by p99": report.median_range(p99s, 2),
                "asap / it, by mean": report.ratio_range([each.mean for each in asap], means),
                "asap / it, by p99": report.ratio_range([each.p99 for each in asap], p99s),
            }
        )
    return report.table(rows)


def _ttft_table(cells: dict[str, list[Cell]]) -> str:
    def seconds(of: Callable[[Outcome], float], found: Sequence[Cell]) -> str:
        return report.median_range([of(cell.outcome) for cell in found], 3)

    rows = []
    for policy, found in cells.items():
        row = {
            "policy": policy,
            "mean s": seconds(lambda outcome: outcome.mean, found),
            "p99 s": seconds(lambda outcome: outcome.p99, found),
            "shortest quarter s": seconds(lambda outcome: outcome.shortest_quarter, found),
            "given up": sum(cell.outcome.given_up for cell in found),
            "driver late, most": f"{max(cell.outcome.late_s for cell in found) * 1e3:.0f} ms",
        }
        if any(cell.overhead for cell in found):
            row["own overhead"] = f"{statistics.median(c.overhead for c in found):.1%} of busy time"
        rows.append(row)
    return report.table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("what", choices=("paced", "cpu"))
    parser.add_argument("--duration", type=float, default=60.0, metavar="S", help="of each load")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--quick", action="store_true", help="one layout a policy, 10 s, 1 round")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="write a trace of each policy")
    parser.add_argument("--cache", type=Path, default=models.DEFAULT_CACHE, metavar="DIR")
    parser.add_argument("--policies", metavar="A,B", help="only these, asap and sync among them")
    options = parser.parse_args()
    seconds, rounds = (10.0, 1) if options.quick else (options.duration, options.rounds)
    made = (
        paced(seconds, options.quick)
        if options.what == "paced"
        else on_cpu(seconds, options.quick, options.cache)
    )
    if options.policies:
        names = options.policies.split(",")
        if not {"asap", "sync"} <= set(names) <= set(made.layouts):
            parser.error(f"--policies: asap, sync and others of {', '.join(made.layouts)}")
        made = replace(made, layouts={name: made.layouts[name] for name in names})
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
    print(compare(made, rounds, options.traces, lambda text: print(text, file=sys.stderr)))


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    main()
