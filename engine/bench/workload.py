"""The prompts that every throughput figure is measured on, unless it says otherwise."""

import random
from collections.abc import Sequence

# 64 lengths in a fixed, shuffled order: 33,929 tokens, 23 to 2,048, five at 2,048. They follow the
# quantiles of a lognormal distribution (sigma 1.15, median 358) that is cut off at 2,048.
STANDARD_LENGTHS: tuple[int, ...] = (
    *(203, 117, 907, 50, 175, 65, 2048, 1522, 41, 337, 102, 87, 281, 245, 234, 95),
    *(568, 166, 2048, 110, 667, 467, 141, 444, 1241, 1367, 322, 213, 748, 540, 193, 598),
    *(513, 353, 369, 631, 184, 2048, 405, 133, 2048, 973, 23, 424, 257, 795, 32, 1137),
    *(73, 125, 223, 489, 294, 269, 2048, 308, 80, 149, 58, 706, 848, 1049, 386, 157),
)
# What a vocabulary usually has before its ordinary tokens: padding, beginning, end, unknown.
_FIRST_TOKEN = 4
_POOL_STARTS = 4096
_POOL_STRIDE = 1009  # a prime, so that neighbours share little


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One prompt of random token ids for each length; the same seed gives the same prompts."""
    rng = random.Random(seed)
    tokens = range(min(_FIRST_TOKEN, vocab_size - 1), vocab_size)
    return [rng.choices(tokens, k=length) for length in lengths]


class PromptPool:
    """Prompts of up to `longest` random tokens each, cut from one sequence: at no cost when they
    are due, and no two begin alike. The same seed gives the same prompts.
    """

    def __init__(self, longest: int, vocab_size: int, seed: int = 0) -> None:
        (self._tokens,) = random_prompts([2 * longest + _POOL_STARTS], vocab_size, seed)
        self._starts = longest + _POOL_STARTS

    def prompt(self, key: int, tokens: int) -> list[int]:
        """Token ids of prompt no. `key`; tokens: at most `longest`."""
        start = key * _POOL_STRIDE % self._starts
        return self._tokens[start : start + tokens]
