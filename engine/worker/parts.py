"""What a rank asks of its half of the network, whether that computes or only waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.model.architecture import ModelConfig
from engine.model.attention import Routed
from engine.model.kv import PromptKV
from engine.model.spans import Span


class AttentionPart(Protocol):
    """See `engine.model.attention.AttentionModel`. What `rope` returns only `mix` looks into."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def whole(self) -> ModelConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def embed(self, token_ids: Tensor) -> Tensor: ...
    def rope(self, positions: Tensor) -> Any: ...
    def norm_input(self, layer: int, hidden: Tensor) -> Tensor: ...
    def mix(
        self, layer: int, x: Tensor, rope: Any, spans: Sequence[Span], kvs: Sequence[PromptKV]
    ) -> Tensor: ...
    def route(self, layer: int, hidden: Tensor) -> Routed: ...
    def shared(self, layer: int, x: Tensor) -> Tensor | None: ...
    def dense(self, layer: int, hidden: Tensor) -> Tensor: ...
    def layer_flops(self, spans: Sequence[Span]) -> float: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class ExpertPart(Protocol):
    """See `engine.model.experts.ExpertModel`."""

    def flops(self, pairs: int) -> float: ...
    def serve(
        self,
        layer: int,
        hidden: Tensor,
        counts: Tensor,
        row_index: Tensor,
        weights: Tensor,
        out: Tensor,
    ) -> None: ...
