"""The inflection point of the experts' cost curve, up to which it pays to aggregate prompts."""

from collections.abc import Callable

_FEWEST = 64
_LEAST_GAIN = 0.05


def inflection_point(
    seconds: Callable[[int], float], most: int, budget_s: float = float("inf")
) -> int:
    """The fewest tokens of a batch, 64 times a power of two, from which on twice as many lower the
    time per token by less than 5 %; at most `most`.

    seconds: how long the experts of one layer take for so many tokens. It is asked for ever more of
    them, and no more once it took budget_s: the last number asked for is the answer then.
    """
    tokens = min(_FEWEST, most)
    took = seconds(tokens)
    while 2 * tokens <= most and took < budget_s:
        twice = seconds(2 * tokens)
        if twice > 2 * took * (1 - _LEAST_GAIN):
            break
        tokens, took = 2 * tokens, twice
    return tokens
