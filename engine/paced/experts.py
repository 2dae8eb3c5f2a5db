"""Some of the experts of a network, paced."""

import time

from torch import Tensor

from engine.hardware.table import Hardware
from engine.model.architecture import ModelConfig
from engine.paced.pacer import OPERATIONS_PER_S, Pacer


class PacedExperts:
    """`engine.worker.parts.ExpertPart`, of one of `ranks` expert ranks."""

    def __init__(self, config: ModelConfig, ranks: int, hardware: Hardware, pacer: Pacer) -> None:
        self._tokens_a_pair = tokens_a_pair(config, ranks)
        self._ranks = ranks
        self._hardware = hardware
        self._pacer = pacer

    def flops(self, pairs: int) -> float:
        return self._seconds(pairs) * OPERATIONS_PER_S

    def serve(
        self,
        layer: int,
        hidden: Tensor,
        counts: Tensor,
        row_index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None:
        """Takes as long as the table says; rows come back as zeros."""
        start = time.monotonic()
        out.zero_()
        self._pacer.step(start, self._seconds(len(row_index)))

    def batch_seconds(self, tokens: int) -> float:
        """What the table says of a batch."""
        return self._hardware.experts_s(tokens, self._ranks)

    def _seconds(self, pairs: int) -> float:
        return self._hardware.experts_s(pairs * self._tokens_a_pair, self._ranks)


def tokens_a_pair(config: ModelConfig, ranks: int) -> float:
    """How many tokens of the model stand behind a (token, expert) pair at one of `ranks` ranks,
    since each token has `top_k` of them, evenly divided.
    """
    return ranks / config.top_k
