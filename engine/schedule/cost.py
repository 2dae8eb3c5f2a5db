"""What a prompt is predicted to cost, so that work can be weighed before it is done."""

import msgspec


class PromptCost(msgspec.Struct, frozen=True):
    """Costs of one model. The unit is what a token takes by itself, in all layers together.

    pair: what a token's attention to one earlier token adds. window: how many tokens up to and
    including itself a token sees; None for all.
    """

    pair: float = 0.0
    window: int | None = None

    def of(self, tokens: int) -> int:
        """Of a prompt, at least 1. Whole numbers, so that sums and differences stay exact."""
        seen = tokens if self.window is None else min(tokens, self.window)
        pairs = seen * seen / 2 + (tokens - seen) * seen
        return max(1, round(tokens + self.pair * pairs))
