"""How long prompts are: a distribution in a few words, or a file of lengths."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from engine.errors import UsageError
from engine.files import MIB, read_file

_MAX_TOKENS = 10_000_000
_MAX_BYTES = 64 * MIB
_FORMS = (
    "fixed:512, uniform:10-20, lognormal:mean=512,sigma=1.0,max=4096 (and min=1), or a file with "
    "one length a line"
)
# Where less of a lognormal distribution lies between the bounds, they cannot be meant.
_LEAST_SHARE = 1e-6


@dataclass(frozen=True)
class Lengths:
    """Draws lengths in tokens, 1 or more."""

    draw: Callable[[random.Random], int]

    def sample(self, rng: random.Random, n: int) -> list[int]:
        return [self.draw(rng) for _ in range(n)]


def parse_lengths(text: str) -> Lengths:
    """fixed:N; uniform:LOW-HIGH, both included; lognormal:mean=M,sigma=S,max=N[,min=N], whose mean
    is that of the distribution before what lies outside of the bounds is left out; or a file with
    one length a line, each as likely as the others.

    Raises UsageError for anything else.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "fixed":
        length = _count(text, rest)
        return Lengths(lambda rng: length)
    if colon and kind == "uniform":
        return _uniform(text, rest)
    if colon and kind == "lognormal":
        return _lognormal(text, rest)
    lengths = _read(Path(text))
    return Lengths(lambda rng: rng.choice(lengths))


def _uniform(text: str, rest: str) -> Lengths:
    low, dash, high = rest.partition("-")
    if not dash:
        raise _wrong(text, "uniform wants LOW-HIGH")
    first, last = _count(text, low), _count(text, high)
    if first > last:
        raise _wrong(text, f"{first} is more than {last}")
    return Lengths(lambda rng: rng.randint(first, last))


def _lognormal(text: str, rest: str) -> Lengths:
    given: dict[str, str] = {}
    for part in rest.split(","):
        name, _, value = part.partition("=")
        if name not in ("mean", "sigma", "max", "min") or name in given:
            raise _wrong(text, f"lognormal wants mean, sigma, max and min, each once, not {part!r}")
        given[name] = value
    if missing := [name for name in ("mean", "sigma", "max") if name not in given]:
        raise _wrong(text, f"lognormal lacks {' and '.join(missing)}")
    mean, sigma = _number(text, given["mean"]), _number(text, given["sigma"])
    least, most = _count(text, given.get("min", "1")), _count(text, given["max"])
    # Each length is what rounds to it.
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    low, high = normal.cdf(math.log(least - 0.5)), normal.cdf(math.log(most + 0.5))
    if high - low < _LEAST_SHARE:
        raise _wrong(text, f"next to nothing of it lies between {least} and {most}")

    def draw(rng: random.Random) -> int:
        share = low + (high - low) * rng.random()
        length = round(math.exp(normal.inv_cdf(min(max(share, 1e-16), 1 - 1e-16))))
        return min(max(length, least), most)

    return Lengths(draw)


def _read(path: Path) -> list[int]:
    try:
        lines = read_file(path, _MAX_BYTES).decode().splitlines()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"lengths {str(path)!r}: {why}; give {_FORMS}") from None
    lengths = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            lengths.append(_count(f"{path}, line {number}", line.strip()))
    if not lengths:
        raise UsageError(f"lengths {path}: there are none in it")
    return lengths


def _count(where: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,8}", text) or not 1 <= int(text) <= _MAX_TOKENS:
        raise _wrong(where, f"{text[:50]!r} is no number of tokens from 1 to {_MAX_TOKENS:,}")
    return int(text)


def _number(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_TOKENS:
        raise _wrong(where, f"{text[:50]!r} is no number above 0")
    return value


def _wrong(where: str, why: str) -> UsageError:
    return UsageError(f"lengths {where}: {why}; give {_FORMS}")
