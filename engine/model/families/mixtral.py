"""Mixtral: grouped-query attention, an optional sliding window, normalised softmax routing."""

from engine.model.architecture import ModelConfig, Names, Router
from engine.model.families import common
from engine.model.fields import Fields


def read(fields: Fields) -> ModelConfig:
    common.check_common(fields)
    attention = common.grouped_query(fields, bias=False, qk_norm=False)
    layers = fields.layers()
    experts = fields.count("num_local_experts", fields.count("num_experts", 8))
    top_k = fields.count("num_experts_per_tok", 2)
    common.check_top_k(fields, top_k, experts)
    return ModelConfig(
        architecture="mixtral",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        moe_layers=tuple(range(layers)),
        attention=attention,
        rope=common.rope(fields, attention.head_dim, default_theta=1_000_000.0),
        window=fields.tokens("sliding_window") if fields.has("sliding_window") else None,
        experts=experts,
        expert_intermediate=fields.integer("intermediate_size"),
        shared_intermediate=0,
        dense_intermediate=0,
        router=Router("softmax", top_k, normalize=True),
        norm_eps=common.norm_eps(fields, 1e-5),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.tokens("max_position_embeddings"),
        torch_dtype=common.torch_dtype(fields),
        eos_token_ids=common.eos_token_ids(fields, default=(2,)),
        names=Names(("block_sparse_moe", "mlp"), ("w1", "w3", "w2")),
    )
