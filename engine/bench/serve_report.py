"""The figures of `asapctl bench serve`."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from engine.bench.load import Outcome
from engine.bench.slo import Judge, met_by
from engine.bench.summary import Summary, summarize

Prompts: TypeAlias = Literal["token ids", "text"]

_MOST_REASONS = 5
# A driver that is later than this measures itself.
_LATE_MEDIAN_S = 2e-3
_LATE_MOST_S = 50e-3


class Failures(msgspec.Struct, frozen=True):
    """So many requests failed for the same reason."""

    reason: str
    count: int


class Measurement(msgspec.Struct, frozen=True):
    """rate: requests a second that were offered. too_long: prompts that were left out. late: the
    driver itself was late, so that the figures are too high. failures: the most frequent ones.
    meets: by which judges the SLO was met.
    """

    rate: float
    too_long: int
    late: bool
    failures: list[Failures]
    meets: list[Judge]
    summary: Summary


class Highest(msgspec.Struct, frozen=True):
    """rate: the highest that met the SLO; 0 where none did. too_high: the lowest that did not."""

    judge: Judge
    rate: float
    too_high: float | None


class Report(msgspec.Struct, frozen=True):
    """prompts: what they are made of. paced: as in engine.control.messages.Snapshot. is_search: the
    trials are those of a search for the highest rate, in order; otherwise there is one, of what was
    offered.
    """

    url: str
    model: str
    paced: str | None
    prompts: Prompts
    slo_s: float | None
    is_search: bool
    trials: list[Measurement]
    highest: list[Highest]
    interrupted: bool


class Result(msgspec.Struct, frozen=True):
    """outcomes: of the last load that was measured."""

    report: Report
    outcomes: list[Outcome]


def measured(
    outcomes: Sequence[Outcome], rate: float, too_long: int, slo_s: float | None
) -> Measurement:
    """outcomes: at least one."""
    summary = summarize(outcomes, slo_s)
    reasons = Counter(each.error for each in outcomes if each.error and not each.given_up)
    return Measurement(
        rate=rate,
        too_long=too_long,
        late=summary.late_median_s > _LATE_MEDIAN_S or summary.late_most_s > _LATE_MOST_S,
        failures=[Failures(reason, n) for reason, n in reasons.most_common(_MOST_REASONS)],
        meets=met_by(summary),
        summary=summary,
    )
