"""Figures of an open-loop load: TTFT and its percentiles, goodput, by length of prompt too."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench.load import Outcome

_CLASSES = 4


@dataclass(frozen=True)
class Times:
    """In seconds; percentiles by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class LengthClass:
    """The requests of `least` to `most` tokens. ttft, within_slo: as of Summary."""

    least: int
    most: int
    requests: int
    ttft: Times | None
    within_slo: float | None


@dataclass(frozen=True)
class Summary:
    """failed: without those that were given up.

    seconds: from the beginning to the last answer, or to when it was given up. All that is per
    second is over these.
    ttft: of those that were answered, and of those given up with the time that they had waited,
    which is less than it would have been; None where all failed.
    within_slo: share of all requests, those that failed too, answered within the SLO; goodput:
    those per second. Both None without an SLO.
    late_median_s, late_most_s: how late the driver itself was.
    by_length: quarters of the requests, the shortest first; fewer where there are fewer requests.
    """

    requests: int
    answered: int
    failed: int
    given_up: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    ttft: Times | None
    slo_s: float | None
    within_slo: float | None
    goodput: float | None
    late_median_s: float
    late_most_s: float
    by_length: list[LengthClass]


def summarize(outcomes: Sequence[Outcome], slo_s: float | None = None) -> Summary:
    """outcomes: at least one. slo_s: the TTFT that is good enough."""
    answered = [each for each in outcomes if each.answered]
    given_up = sum(each.given_up for each in outcomes)
    seconds = max(each.at_s + each.ttft_s for each in outcomes)
    late = [each.late_s for each in outcomes]
    good = None if slo_s is None else sum(each.ttft_s <= slo_s for each in answered)
    return Summary(
        requests=len(outcomes),
        answered=len(answered),
        failed=len(outcomes) - len(answered) - given_up,
        given_up=given_up,
        seconds=seconds,
        tokens_per_s=_rate(sum(each.tokens for each in answered), seconds),
        requests_per_s=_rate(len(answered), seconds),
        ttft=_times(outcomes),
        slo_s=slo_s,
        within_slo=None if good is None else good / len(outcomes),
        goodput=None if good is None else _rate(good, seconds),
        late_median_s=statistics.median(late),
        late_most_s=max(late),
        by_length=_by_length(outcomes, slo_s),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """By nearest rank. ordered: ascending, not empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _by_length(outcomes: Sequence[Outcome], slo_s: float | None) -> list[LengthClass]:
    ordered = sorted(outcomes, key=lambda each: each.tokens)
    ends = [math.ceil(len(ordered) * number / _CLASSES) for number in range(_CLASSES + 1)]
    parts = [ordered[start:end] for start, end in itertools.pairwise(ends)]
    return [_length_class(part, slo_s) for part in parts if part]


def _length_class(part: Sequence[Outcome], slo_s: float | None) -> LengthClass:
    within = None
    if slo_s is not None:
        within = sum(each.answered and each.ttft_s <= slo_s for each in part) / len(part)
    return LengthClass(part[0].tokens, part[-1].tokens, len(part), _times(part), within)


def _times(outcomes: Sequence[Outcome]) -> Times | None:
    found = sorted(each.ttft_s for each in outcomes if each.answered or each.given_up)
    if not found:
        return None
    return Times(statistics.fmean(found), *(percentile(found, share) for share in (0.5, 0.9, 0.99)))


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
