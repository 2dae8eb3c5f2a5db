"""The highest rates that benchmarks report, and the layouts that they choose by them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparisons import paced
from benchmarks.contenders import STEP, Layout, Probe, best_layouts, limits
from benchmarks.offered import Load
from engine.bench.load import Outcome
from engine.bench.summary import Summary, Times, summarize
from engine.errors import RunError
from engine.launch.checks import plan_of
from engine.traffic.lengths import Uniform

SLO_S = 3.0


@dataclass(frozen=True)
class Curve(Layout):
    """Its mean TTFT meets the target at the rate `edge`, and its p99 is `tail` times as long."""

    edge: float = 1.0
    tail: float = 2.0

    @contextmanager
    def running(self) -> Iterator[Any]:
        yield self

    def p99_edge(self) -> float:
        return self.edge / math.sqrt(self.tail)


class FakeLoad(Load):
    """Answers by the curve that stands where a client does."""

    def __init__(self) -> None:
        super().__init__(1.0, Uniform(1, 1), SLO_S, 1)
        self.offered: list[float] = []

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def run(self, client: Any, rate: float, seed: int, trace_s: float = 0.0) -> Summary:
        self.offered.append(rate)
        mean = SLO_S * (rate / client.edge) ** 2
        summary = summarize([Outcome(0.0, 1, 0.0, mean)], SLO_S)
        return replace(summary, ttft=Times(mean, mean, mean, mean * client.tail))

    def warm_up(self, client: Any) -> None:
        pass


def curve(name: str, edge: float, tail: float = 2.0) -> Curve:
    return Curve("asap", "t", (f"schedule.{name}",), edge=edge, tail=tail)


@pytest.mark.parametrize("near", [0.3, 4.0, 90.0])
def test_the_limit_lies_between_two_rates_that_were_tried(near: float) -> None:
    load, layout = FakeLoad(), curve("x", edge=7.7)
    probe = Probe(layout, layout, load, seed=0)  # type: ignore[arg-type]
    limit = probe.limit("mean", near, STEP**4)
    assert limit.rate == pytest.approx(7.7)
    assert limit.met <= 7.7 < limit.met * STEP * (1 + 1e-9)
    before = len(load.offered)
    assert probe.limit("p99", limit.met).rate == pytest.approx(layout.p99_edge())
    assert len(load.offered) <= before + 2  # what is known of a rate is known for both
    assert len(set(load.offered)) == len(load.offered)


def test_each_judge_has_its_best_layout_and_a_poor_one_costs_one_load_for_each() -> None:
    load = FakeLoad()
    layouts = [curve("a", 10.0), curve("poor", 3.0), curve("b", 9.9, tail=1.1), curve("c", 20.0, 9)]
    best, rows = best_layouts(layouts[:2], load, 10.0, lambda text: None)
    first = len(load.offered) - 2
    assert load.offered[first:] == [best["mean"].met, best["p99"].met]
    assert rows[1]["mean"] == f"less than {best['mean'].met:.2f}/s"
    best, rows = best_layouts(layouts, load, 10.0, lambda text: None)
    assert [row["taken for"] for row in rows] == ["", "", "p99", "mean"]
    found = limits(best, load, seed=0)
    assert found == pytest.approx({"mean": 20.0, "p99": layouts[2].p99_edge()})


def test_a_layout_may_never_meet_the_target_but_not_all_of_a_policy() -> None:
    hopeless = curve("hopeless", 1e-9)
    best, rows = best_layouts([hopeless, curve("a", 5.0)], FakeLoad(), 5.0, lambda text: None)
    assert [row["mean"] for row in rows] == ["never", "5.00/s"]
    assert best["mean"].rate == pytest.approx(5.0)
    with pytest.raises(RunError, match="asap: no layout keeps within the target"):
        best_layouts([hopeless], FakeLoad(), 5.0, lambda text: None)


def test_paced_loads_say_what_they_are_and_no_layout_is_tried_twice(tmp_path: Path) -> None:
    comparison = paced(10.0, quick=False, cache=tmp_path)
    assert comparison.notes[0].startswith("paced: waits instead of computing")
    assert {"asap", "sync", "sync-chunked", "sync-afd"} == set(comparison.layouts)
    for policy, layouts in comparison.layouts.items():
        plans = [
            plan_of(
                layout.topology,
                [f"schedule.policy={policy}", *layout.fixed, *layout.overrides],
                layout.model,
            )
            for layout in layouts
        ]
        assert len({plan.topology.schedule.batch_limit for plan in plans}) == len(layouts)
        assert {(plan.groups, len(plan.experts)) for plan in plans} == {
            (4, 4) if policy in ("asap", "sync-afd") else (8, 8)
        }
