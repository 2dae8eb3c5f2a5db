"""DeepSeek-V3 (arXiv 2412.19437): latent attention, shared experts, group-limited routing."""

from engine.model.architecture import Latent, ModelConfig, Rope, Router
from engine.model.families import common
from engine.model.fields import Fields


def read(fields: Fields) -> ModelConfig:
    common.check_common(fields)
    _check_variant(fields)
    rope = common.rope(
        fields,
        fields.count("qk_rope_head_dim"),
        default_theta=10_000.0,
        interleaved=fields.flag("rope_interleave", True),
    )
    layers = fields.layers()
    first_moe = min(layers, fields.count("first_k_dense_replace", 3, minimum=0))
    experts = fields.count("n_routed_experts")
    expert_intermediate = fields.integer("moe_intermediate_size")
    return ModelConfig(
        architecture="deepseek_v3",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        moe_layers=tuple(range(first_moe, layers)),
        attention=_attention(fields, rope),
        rope=rope,
        window=None,
        experts=experts,
        expert_intermediate=expert_intermediate,
        shared_intermediate=expert_intermediate * fields.count("n_shared_experts", 1, minimum=0),
        dense_intermediate=fields.integer("intermediate_size") if first_moe else 0,
        router=_router(fields, experts),
        norm_eps=common.norm_eps(fields, 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.tokens("max_position_embeddings"),
        torch_dtype=common.torch_dtype(fields),
        eos_token_ids=common.eos_token_ids(fields, default=(1,)),
        extra_layers=fields.count("num_nextn_predict_layers", 0, minimum=0),
    )


def _attention(fields: Fields, rope: Rope) -> Latent:
    nope_dim = fields.count("qk_nope_head_dim")
    return Latent(
        heads=fields.count("num_attention_heads"),
        q_rank=fields.integer_or_null("q_lora_rank"),
        kv_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        value_dim=fields.count("v_head_dim"),
        bias=fields.flag("attention_bias", False),
        scale=(nope_dim + rope.dim) ** -0.5 * _scale_correction(fields, rope),
    )


def _scale_correction(fields: Fields, rope: Rope) -> float:
    """YaRN's second correction: the softmax scale grows with the square of mscale_all_dim's."""
    section = fields.section("rope_scaling", "rope_parameters")
    if rope.kind == "default" or not section.raw.get("mscale_all_dim"):
        return 1.0
    return common.yarn_mscale(rope.factor, section.number("mscale_all_dim")) ** 2


def _router(fields: Fields, experts: int) -> Router:
    top_k = fields.count("num_experts_per_tok", 8)
    groups = fields.count("n_group", 8)
    top_groups = fields.count("topk_group", 4)
    common.check_top_k(fields, top_k, experts)
    if experts % groups or experts // groups < 2:
        fields.conflict(f"{experts} experts cannot form {groups} equal groups of two or more")
    elif top_groups > groups or top_k > top_groups * (experts // groups):
        fields.conflict(f"topk_group {top_groups} of {groups} groups cannot give {top_k} experts")
    return Router(
        "sigmoid",
        top_k,
        normalize=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 2.5),
        groups=groups,
        top_groups=top_groups,
    )


def _check_variant(fields: Fields) -> None:
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if fields.count("moe_layer_freq", 1) != 1:
        fields.problem("moe_layer_freq other than 1 is not supported")
