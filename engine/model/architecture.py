"""What a model is, in one vocabulary for all families. Plain data: no torch.

A family file turns its config.json into a `ModelConfig`; the layers are built from that alone, so
a new family that combines known parts needs no code but its reading.
"""

from typing import Literal, TypeAlias

import msgspec

RopeKind: TypeAlias = Literal["default", "linear", "llama3", "yarn"]


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding of `dim` features a head (see engine.model.rope for the formulas).

    interleaved: the checkpoint rotates neighbouring features (x0, x1) instead of halves.
    attention_factor: what cosine and sine are multiplied by (YaRN).
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    interleaved: bool = False


class GroupedQuery(msgspec.Struct, frozen=True, tag=True):
    """Attention with `heads` query heads that share `kv_heads` key and value heads."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    qk_norm: bool
    scale: float


class Latent(msgspec.Struct, frozen=True, tag=True):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from a latent.

    q_rank None: queries come straight from the hidden state. scale includes YaRN's correction.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool
    scale: float


class Router(msgspec.Struct, frozen=True):
    """How a token chooses `top_k` of the experts and weighs them.

    sigmoid scores come with a selection bias (it selects but does not weigh) and group-limited
    choice: `top_groups` of `groups`, a group scored by its two best. normalize: the chosen
    weights are divided by their sum; then everything is multiplied by `scaling`.
    """

    kind: Literal["softmax", "sigmoid"]
    top_k: int
    normalize: bool
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1


class Names(msgspec.Struct, frozen=True):
    """How a family's checkpoints spell what differs between families.

    moe_modules: the names of a layer's MoE module, of which a checkpoint uses one; the first is
    the one that transformers writes. expert_projections: gate, up and down of one expert.
    """

    moe_modules: tuple[str, ...] = ("mlp",)
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class ModelConfig(msgspec.Struct, frozen=True):
    """A Mixture-of-Experts decoder. Sizes in features, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    moe_layers: tuple[int, ...]
    attention: GroupedQuery | Latent
    rope: Rope
    window: int | None  # sliding window in tokens, the current one included
    experts: int
    expert_intermediate: int
    shared_intermediate: int  # all shared experts as one MLP; 0 when there are none
    dense_intermediate: int
    router: Router
    norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    torch_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    extra_layers: int = 0  # layers stored after the last one that prefill does not use (MTP)
    names: Names = Names()

    @property
    def top_k(self) -> int:
        return self.router.top_k

    def is_moe(self, layer: int) -> bool:
        return layer in self.moe_layers

    def sliding_window(self, layer: int) -> int | None:
        """How many tokens up to and including itself a token of `layer` sees; None for all."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of {self.layers}")
        return self.window

    @property
    def kv_parts(self) -> dict[str, tuple[int, ...]]:
        """What a layer caches of each token: name of the part to its shape."""
        if isinstance(self.attention, Latent):
            return {"latent": (self.attention.kv_rank,), "rope": (self.attention.rope_dim,)}
        shape = (self.attention.kv_heads, self.attention.head_dim)
        return {"key": shape, "value": shape}
