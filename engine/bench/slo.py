"""What an endpoint is to meet: an upper bound of the TTFT, judged by its mean or by its p99."""

import math
from typing import Literal, TypeAlias

from engine.bench.summary import Summary
from engine.echo import plain
from engine.errors import UsageError

Judge: TypeAlias = Literal["mean", "p99"]
JUDGES: tuple[Judge, ...] = ("mean", "p99")


def parse_slo(text: str) -> float:
    """Seconds, of a text like ttft=0.5. Raises UsageError."""
    name, _, value = text.partition("=")
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if name.strip() != "ttft" or not 0 < seconds < math.inf:
        raise UsageError(f"--slo {plain(text)}: give seconds above 0, as --slo ttft=0.5")
    return seconds


def met_by(summary: Summary) -> list[Judge]:
    """The judges that find its SLO met; none where it has no SLO. The mean asks that all were
    answered, the p99 that 99 of 100 were in time.
    """
    if summary.slo_s is None or summary.ttft is None or summary.within_slo is None:
        return []
    by_mean = summary.answered == summary.requests and summary.ttft.mean <= summary.slo_s
    met = {"mean": by_mean, "p99": summary.within_slo >= 0.99}
    return [judge for judge in JUDGES if met[judge]]
