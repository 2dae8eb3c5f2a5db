"""Qwen3-MoE: grouped-query attention with normed queries and keys, softmax routing."""

from engine.model.architecture import ModelConfig, Router
from engine.model.families import common
from engine.model.fields import Fields


def read(fields: Fields) -> ModelConfig:
    common.check_common(fields)
    attention = common.grouped_query(
        fields, bias=fields.flag("attention_bias", False), qk_norm=True
    )
    layers = fields.layers()
    experts = fields.count("num_experts", fields.count("num_local_experts", 128))
    top_k = fields.count("num_experts_per_tok", 8)
    common.check_top_k(fields, top_k, experts)
    moe_layers = _moe_layers(fields, layers)
    return ModelConfig(
        architecture="qwen3_moe",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        moe_layers=moe_layers,
        attention=attention,
        rope=common.rope(fields, attention.head_dim, default_theta=10_000.0),
        window=_window(fields),
        experts=experts,
        expert_intermediate=fields.integer("moe_intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=(fields.integer("intermediate_size") if len(moe_layers) < layers else 0),
        router=Router("softmax", top_k, normalize=fields.flag("norm_topk_prob", False)),
        norm_eps=common.norm_eps(fields, 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.tokens("max_position_embeddings"),
        torch_dtype=common.torch_dtype(fields),
        eos_token_ids=common.eos_token_ids(fields),
    )


def _moe_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    dense = frozenset(fields.integers("mlp_only_layers"))
    step = fields.count("decoder_sparse_step", 1)
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _window(fields: Fields) -> int | None:
    """transformers windows every layer once use_sliding_window is set: it reads
    max_window_layers nowhere in this family, so neither may we.
    """
    if not fields.flag("use_sliding_window", False):
        return None
    if "sliding_window" in fields.raw and not fields.has("sliding_window"):
        return None
    return fields.tokens("sliding_window", 4096)
