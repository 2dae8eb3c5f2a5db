"""The attention half of a network, paced: rows of zeros, and experts by turns."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.hardware.table import Hardware
from engine.model.architecture import ModelConfig
from engine.model.attention import Routed
from engine.model.kv import PromptKV
from engine.model.spans import Span
from engine.paced.pacer import OPERATIONS_PER_S, Pacer


class PacedAttention:
    """`engine.worker.parts.AttentionPart`. Logits are zeros, so the first token is always 0."""

    def __init__(
        self, config: ModelConfig, hardware: Hardware, dtype: torch.dtype, pacer: Pacer
    ) -> None:
        self.config = self.whole = config
        self.dtype = dtype
        self.device = torch.device("cpu")
        self._hardware = hardware
        self._pacer = pacer
        # Token n of a batch chooses experts n, n + stride, ...: every rank gets the same share.
        self._chosen = torch.arange(config.top_k) * (config.experts // config.top_k)

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), self.config.hidden_size, dtype=self.dtype)

    def rope(self, positions: Tensor) -> None:
        return None

    def norm_input(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def mix(
        self, layer: int, x: Tensor, rope: Any, spans: Sequence[Span], kvs: Sequence[PromptKV]
    ) -> Tensor:
        """Takes as long as a layer of attention."""
        self._pacer.step(time.monotonic(), self._hardware.attention_s(spans))
        return torch.zeros_like(x)

    def route(self, layer: int, hidden: Tensor) -> Routed:
        first = torch.arange(len(hidden))[:, None] + layer
        experts = (first + self._chosen) % self.config.experts
        weights = torch.full(experts.shape, 1 / self.config.top_k, dtype=torch.float32)
        return Routed(hidden, experts, weights)

    def shared(self, layer: int, x: Tensor) -> None:
        return None

    def dense(self, layer: int, hidden: Tensor) -> Tensor:
        return hidden

    def layer_flops(self, spans: Sequence[Span]) -> float:
        return self._hardware.attention_s(spans) * OPERATIONS_PER_S

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), self.config.vocab_size)
