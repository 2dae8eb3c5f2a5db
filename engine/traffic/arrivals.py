"""When prompts come, and how long they are."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from engine.traffic.lengths import Lengths


class Arrival(NamedTuple):
    """A prompt of `tokens` tokens that comes `at_s` seconds after the beginning."""

    at_s: float
    tokens: int


def poisson(
    rate: float,
    lengths: Lengths,
    seed: int,
    *,
    duration_s: float = math.inf,
    count: int | None = None,
) -> list[Arrival]:
    """Independent arrivals, `rate` a second in the mean: those within duration_s, and at most
    `count`. One at least, so that there is something to measure.

    The same seed gives the same lengths in the same order, and the same gaps but for their scale,
    at every rate.
    """
    if not 0 < rate < math.inf or (count is None and duration_s == math.inf):
        raise ValueError("a rate above 0, and an end")
    gaps = random.Random(f"gaps {seed}")
    times = [gaps.expovariate(1.0) / rate]
    while count is None or len(times) < count:
        following = times[-1] + gaps.expovariate(1.0) / rate
        if following > duration_s:
            break
        times.append(following)
    tokens = lengths.sample(random.Random(f"lengths {seed}"), len(times))
    return [Arrival(*each) for each in zip(times, tokens, strict=True)]


def scale(
    arrivals: Sequence[Arrival],
    *,
    rate: float = 1.0,
    lengths: float = 1.0,
    max_length: int | None = None,
) -> list[Arrival]:
    """`rate` times as many a second, prompts `lengths` times as long (1 token at least). Prompts
    that are longer than `max_length` then are left out.
    """
    if not (0 < rate < math.inf and 0 < lengths < math.inf):
        raise ValueError("factors above 0")
    scaled = (
        Arrival(arrival.at_s / rate, max(1, round(arrival.tokens * lengths)))
        for arrival in arrivals
    )
    return [each for each in scaled if max_length is None or each.tokens <= max_length]


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Arrivals a second, from the first to the last one; 0 where they all come at once, or where
    there are none.
    """
    span = arrivals[-1].at_s - arrivals[0].at_s if arrivals else 0.0
    return (len(arrivals) - 1) / span if span > 0 else 0.0
