"""What a load benchmark offers: a trace or Poisson arrivals, at any rate."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.bench.workload import STANDARD_LENGTHS
from engine.errors import UsageError
from engine.files import absolute
from engine.traffic.arrivals import Arrival, mean_rate, poisson, scale
from engine.traffic.lengths import Lengths, Listed, parse_lengths

_MOST_PROMPTS = 5_000_000


class Offered(ABC):
    """Arrivals of one kind, with lengths that are scaled by the same number at every rate."""

    def __init__(self, lengths_scale: float) -> None:
        self._lengths_scale = lengths_scale

    @property
    @abstractmethod
    def rate(self) -> float:
        """Requests a second that it has by itself; 0 where they all come at once."""

    @abstractmethod
    def own(self) -> list[Arrival]:
        """At its own rate."""

    @abstractmethod
    def at(self, rate: float, duration_s: float) -> list[Arrival]:
        """At another one, for about so long. Its own must not be 0."""

    def _scaled(self, arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
        return scale(arrivals, rate=rate, lengths=self._lengths_scale)


class PoissonOffered(Offered):
    def __init__(
        self, rate: float, lengths: Lengths, seed: int, duration_s: float, lengths_scale: float
    ) -> None:
        super().__init__(lengths_scale)
        self._rate = rate
        self._lengths = lengths
        self._seed = seed
        self._duration_s = duration_s

    @property
    def rate(self) -> float:
        return self._rate

    def own(self) -> list[Arrival]:
        return self.at(self._rate, self._duration_s)

    def at(self, rate: float, duration_s: float) -> list[Arrival]:
        arrivals = poisson(rate, self._lengths, self._seed, duration_s=duration_s)
        return self._scaled(arrivals, 1.0)


class TraceOffered(Offered):
    """rate_scale: how many times as fast as it was recorded. duration_s: where it is cut, by the
    scaled time.
    """

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        rate_scale: float,
        duration_s: float,
        lengths_scale: float,
    ) -> None:
        super().__init__(lengths_scale)
        self._arrivals = arrivals
        self._rate_scale = rate_scale
        self._duration_s = duration_s

    @property
    def rate(self) -> float:
        return mean_rate(self._arrivals) * self._rate_scale

    def own(self) -> list[Arrival]:
        scaled = self._scaled(self._arrivals, self._rate_scale)
        return [each for each in scaled if each.at_s <= self._duration_s]

    def at(self, rate: float, duration_s: float) -> list[Arrival]:
        """Its first requests, as many as come in the time at that rate, with their gaps stretched
        or shortened together so that they do; it begins anew where it has too few.
        """
        count = max(1, round(rate * duration_s))
        period = self._arrivals[-1].at_s + 1 / mean_rate(self._arrivals)
        turns = math.ceil(count / len(self._arrivals))
        taken = [
            Arrival(each.at_s + turn * period, each.tokens)
            for turn in range(turns)
            for each in self._arrivals
        ][:count]
        end = taken[-1].at_s
        return self._scaled(taken, end / duration_s if end > 0 else 1.0)


def parse_offered(
    trace: str | None,
    rate: float | None,
    lengths: str | None,
    duration_s: float | None,
    scale_lengths: float,
    scale_rate: float,
    seed: int,
) -> Offered:
    """Of the options of that name. duration_s: None for a whole trace. Raises UsageError."""
    for name, value in (
        ("--rate", rate),
        ("--duration", duration_s),
        ("--scale-lengths", scale_lengths),
        ("--scale-rate", scale_rate),
    ):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value:g}: give a number above 0")
    if (trace is None) == (rate is None):
        raise UsageError("give --trace FILE or --rate R, one of them: they say when prompts come")
    if trace is not None:
        if lengths is not None:
            raise UsageError("--lengths goes with --rate; a trace has its own (--scale-lengths)")
        from engine.traffic.traces import read_trace

        arrivals = read_trace(absolute(trace, "--trace"))
        return TraceOffered(arrivals, scale_rate, duration_s or math.inf, scale_lengths)
    assert rate is not None and duration_s is not None
    rate *= scale_rate
    if rate * duration_s > _MOST_PROMPTS:
        raise UsageError(
            f"--rate {rate:g} for {duration_s:g} s are more than {_MOST_PROMPTS:,} prompts; "
            "lower --rate or --duration"
        )
    drawn = Listed(STANDARD_LENGTHS) if lengths is None else parse_lengths(lengths)
    return PoissonOffered(rate, drawn, seed, duration_s, scale_lengths)
