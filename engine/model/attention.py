"""The attention half of the network: everything but the routed experts.

Reads like the architecture: embed, then for each layer attend, then dense or route (and shared)
with the experts' output added in between, then logits. Parameters are named as in the checkpoint.

A member of a tensor-parallel group is this model with fewer heads (`sharding.shard_config`): it
normalises its own rows, mixes all rows with its own heads, and does everything else for its own
rows. `config` is then the member's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.gqa import GroupedQueryAttention
from engine.model.kv import PromptKV
from engine.model.layers import GatedMLP, RMSNorm
from engine.model.mla import LatentAttention
from engine.model.products import Linear, linear
from engine.model.rope import Rotation, rotation
from engine.model.router import Gate
from engine.model.sharding import shard_config
from engine.model.spans import Span

__all__ = ["AttentionModel", "PromptKV", "Rotation", "Routed", "Span"]


class Routed(NamedTuple):
    """x [N, H]: what experts read; experts [N, k] int64; weights [N, k] float32, scaled."""

    x: Tensor
    experts: Tensor
    weights: Tensor


class AttentionModel(nn.Module):
    """Works on packed batches [N, H]: the tokens of all spans, one after another.

    The worker owns the loop over layers; every method is one step of it. `config` is that of what
    is held, `whole` that of the model: they differ in heads when a group of `size` divides them.
    """

    def __init__(self, config: ModelConfig, size: int = 1):
        super().__init__()
        self.whole = config
        self.config = config = shard_config(config, size)
        self.model = _Decoder(config)
        self.lm_head = (
            None
            if config.tied_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are computed in."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are; token ids, positions and hidden states must be there too."""
        return self.model.norm.weight.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """[N] int64 -> [N, H]."""
        hidden: Tensor = self.model.embed_tokens(token_ids)
        return hidden

    def rope(self, positions: Tensor) -> Rotation:
        """Positions [N] int64 of the batch's tokens; computed once and passed to every `attend`."""
        return rotation(self.config.rope, positions, self.dtype)

    def attend(
        self,
        layer: int,
        hidden: Tensor,
        rope: Rotation,
        spans: Sequence[Span],
        kvs: Sequence[PromptKV],
    ) -> Tensor:
        """[N, H] -> [N, H], residual added. `kvs` holds each span's prompt.

        For a model that holds all heads; of a shard, the members' `mix` have to be summed first.
        """
        return hidden + self.mix(layer, self.norm_input(layer, hidden), rope, spans, kvs)

    def norm_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What attention reads: [n, H] -> [n, H], for any rows of a batch."""
        if not len(hidden):
            return hidden
        normed: Tensor = self._block(layer).input_layernorm(hidden)
        return normed

    def mix(
        self,
        layer: int,
        x: Tensor,
        rope: Rotation,
        spans: Sequence[Span],
        kvs: Sequence[PromptKV],
    ) -> Tensor:
        """Attention of all rows x [N, H] of `norm_input`: [N, H], without the residual.

        Of the heads that are held: the outputs of a group's members add up to attention's.
        """
        mixed: Tensor = self._block(layer).self_attn(x, rope, spans, kvs)
        return mixed

    def route(self, layer: int, hidden: Tensor) -> Routed:
        """What a MoE layer sends to the experts; the caller adds their output to `hidden`."""
        if not len(hidden):
            nothing = hidden.new_empty(0, self.config.top_k, dtype=torch.float32)
            return Routed(hidden, nothing.long(), nothing)
        x = self._block(layer).post_attention_layernorm(hidden)
        return Routed(x, *self._moe(layer).gate(x))

    def shared(self, layer: int, x: Tensor) -> Tensor | None:
        """Output [N, H] of the shared experts for the `x` of `route`; None when there are none."""
        experts = self._moe(layer).shared_experts
        return None if experts is None else experts(x)

    def dense(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer without experts: [N, H] -> [N, H], residual added."""
        if not len(hidden):
            return hidden
        block = self._block(layer)
        out: Tensor = block.mlp(block.post_attention_layernorm(hidden))
        return hidden + out

    def layer_flops(self, spans: Sequence[Span]) -> float:
        """About how many floating-point operations `attend` takes for these spans.

        Projections as 4 square matrices; scores and sums over all earlier positions.
        """
        hidden = self.config.hidden_size
        pairs = sum(span.length * (span.start + span.length / 2) for span in spans)
        tokens = sum(span.length for span in spans)
        return 2.0 * hidden * (4 * hidden * tokens + 2 * pairs)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] after the last layer -> [M, V] float32."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(self.model.norm(hidden), head.weight).float()

    def _block(self, layer: int) -> "_Block":
        block = self.model.layers[layer]
        assert isinstance(block, _Block)
        return block

    def _moe(self, layer: int) -> "_MoE":
        moe = self._block(layer).mlp
        assert isinstance(moe, _MoE)
        return moe


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        # Given a weight, it does not draw one: on the meta device that costs 1.5 s of imports.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(_Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        shape = config.attention
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = (
            GroupedQueryAttention(config, shape, layer)
            if isinstance(shape, GroupedQuery)
            else LatentAttention(config, shape, layer)
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = (
            _MoE(config)
            if config.is_moe(layer)
            else GatedMLP(config.hidden_size, config.dense_intermediate)
        )


class _MoE(nn.Module):
    """What the attention side holds of a MoE layer: the gate, and the shared experts if any."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Gate(config)
        self.shared_experts = (
            GatedMLP(config.hidden_size, config.shared_intermediate)
            if config.shared_intermediate
            else None
        )
