"""How long prompts are: a distribution that is written in a few words, or lengths of a file."""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean

from engine.echo import plain
from engine.errors import UsageError
from engine.files import absolute, exists

TRACES = (
    "Mooncake JSONL (timestamp, input_length), Azure CSV (TIMESTAMP, ContextTokens) or BurstGPT "
    "CSV (Timestamp, Request tokens)"
)
FORMS = (
    "fixed:512, uniform:10-20, lognormal:mean=512,sigma=1.0,max=4096[,min=1], or a file: one "
    f"length a line, {TRACES}"
)
MOST_TOKENS = 10_000_000  # of a prompt: more than any model takes
_NORMAL = NormalDist()
_LEAST_SHARE = 1e-6  # of a distribution, that must lie within its bounds
_MOST_SIGMA = 5.0
_SHORT = 100  # up to here rounding moves the mean


class Lengths(ABC):
    """A distribution of prompt lengths in tokens, each at least 1."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Of what `sample` draws."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """That `sample` may draw."""

    @abstractmethod
    def sample(self, rng: random.Random, n: int) -> list[int]:
        """`n` lengths. The first ones do not depend on how many follow."""


@dataclass(frozen=True)
class Uniform(Lengths):
    """Every whole number from `least` to `most` is as likely."""

    least: int
    most: int

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    @property
    def longest(self) -> int:
        return self.most

    def sample(self, rng: random.Random, n: int) -> list[int]:
        return [rng.randint(self.least, self.most) for _ in range(n)]


@dataclass(frozen=True)
class Lognormal(Lengths):
    """full_mean: of the whole distribution; lengths outside of [least, most] are left out, so that
    `mean` is another one. sigma: the standard deviation of the logarithms.
    """

    full_mean: float
    sigma: float
    least: int
    most: int

    @property
    def share(self) -> float:
        """Of the whole distribution, that lies within the bounds."""
        return self._share(self.least, self.most)

    @property
    def mean(self) -> float:
        long = min(max(self.least, _SHORT), self.most + 1)
        total = sum(length * self._share(length, length) for length in range(self.least, long))
        low, high = self._bounds(long, self.most)
        within = _NORMAL.cdf(high - self.sigma) - _NORMAL.cdf(low - self.sigma)
        return (total + self.full_mean * within) / self.share

    @property
    def longest(self) -> int:
        return self.most

    def sample(self, rng: random.Random, n: int) -> list[int]:
        # By the inverse: one draw for each length, however narrow the bounds are.
        low, high = map(_NORMAL.cdf, self._bounds(self.least, self.most))
        mu = self._mu()
        found = []
        for _ in range(n):
            at = min(max(low + rng.random() * (high - low), 1e-12), 1 - 1e-12)
            length = round(math.exp(mu + self.sigma * _NORMAL.inv_cdf(at)))
            found.append(min(max(length, self.least), self.most))
        return found

    def _mu(self) -> float:
        return math.log(self.full_mean) - self.sigma**2 / 2

    def _share(self, least: int, most: int) -> float:
        low, high = self._bounds(least, most)
        return _NORMAL.cdf(high) - _NORMAL.cdf(low)

    def _bounds(self, least: int, most: int) -> tuple[float, float]:
        """As deviations of the logarithm. A length stands for all that is rounded to it."""
        mu = self._mu()
        return (
            (math.log(least - 0.5) - mu) / self.sigma,
            (math.log(most + 0.5) - mu) / self.sigma,
        )


@dataclass(frozen=True)
class Listed(Lengths):
    """Lengths that were seen, drawn with replacement."""

    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        return fmean(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def sample(self, rng: random.Random, n: int) -> list[int]:
        return rng.choices(self.lengths, k=n)


def parse_lengths(text: str) -> Lengths:
    """text: one of FORMS. Raises UsageError: it is none, or its numbers or its file cannot be."""
    if not text.strip():
        raise UsageError(f"--lengths is empty; give {FORMS}")
    kind, colon, rest = text.partition(":")
    parser = _PARSERS.get(kind) if colon else None
    path = absolute(text, "--lengths")
    if parser is None or exists(path):
        return _read(text, path)
    try:
        return parser(rest)
    except ValueError as error:
        raise UsageError(f"--lengths {plain(text)}: {error}; give {FORMS}") from None


def _read(text: str, path: Path) -> Lengths:
    from engine.traffic.traces import read_lengths

    if not exists(path):
        raise UsageError(f"--lengths {plain(text)}: no such file or distribution; give {FORMS}")
    return Listed(tuple(read_lengths(path, FORMS)))


def _fixed(text: str) -> Lengths:
    length = _tokens(text)
    return Uniform(length, length)


def _uniform(text: str) -> Lengths:
    low, dash, high = text.partition("-")
    if not dash:
        raise ValueError("two lengths with a dash between them are needed")
    least, most = _tokens(low), _tokens(high)
    if least > most:
        raise ValueError(f"{least} is more than {most}")
    return Uniform(least, most)


def _lognormal(text: str) -> Lengths:
    given: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in ("mean", "sigma", "max", "min") or key in given:
            raise ValueError("mean, sigma, max and min are set once each, as mean=512")
        given[key] = value
    if missing := [key for key in ("mean", "sigma", "max") if key not in given]:
        raise ValueError(f"{' and '.join(missing)} must be set")
    made = Lognormal(
        _positive("mean", given["mean"], MOST_TOKENS),
        _positive("sigma", given["sigma"], _MOST_SIGMA),
        _tokens(given.get("min", "1")),
        _tokens(given["max"]),
    )
    if made.least > made.most:
        raise ValueError(f"min={made.least} is more than max={made.most}")
    if made.share < _LEAST_SHARE:
        raise ValueError("next to nothing of it lies between min and max")
    return made


_PARSERS: dict[str, Callable[[str], Lengths]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
}


def _tokens(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) < 1:
        raise ValueError(f"{plain(text)!r} is not a length from 1 to {MOST_TOKENS:,}")
    if int(text) > MOST_TOKENS:
        raise ValueError(f"{text} is not a length from 1 to {MOST_TOKENS:,}")
    return int(text)


def _positive(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise ValueError(f"{name}={plain(text)} is not a number above 0, up to {most:,g}")
    return value
