"""Config fields that all families spell alike."""

import math
from typing import cast

from engine.echo import plain
from engine.model.architecture import GroupedQuery, Rope, RopeKind
from engine.model.fields import MOST_COUNT, Fields

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def grouped_query(fields: Fields, *, bias: bool, qk_norm: bool) -> GroupedQuery:
    heads = fields.count("num_attention_heads")
    kv_heads = fields.integer_or_null("num_key_value_heads", MOST_COUNT) or heads
    if heads % kv_heads:
        fields.conflict(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    head_dim = fields.count("head_dim", max(1, fields.integer("hidden_size") // heads))
    return GroupedQuery(heads, kv_heads, head_dim, bias, qk_norm, scale=head_dim**-0.5)


def rope(fields: Fields, dim: int, default_theta: float, *, interleaved: bool = False) -> Rope:
    """Rotary parameters from either shape of config: `rope_parameters` (transformers 5), or
    `rope_theta` beside `rope_scaling`. `type` is the old spelling of `rope_type`.
    """
    if dim % 2:
        fields.conflict(f"a rotary dimension of {dim} is odd")
    section = fields.section("rope_scaling", "rope_parameters")
    if any(isinstance(value, dict) for value in section.raw.values()):
        fields.problem("rotary parameters that differ between layers are not supported")
    kind = section.choice(
        "rope_type" if section.has("rope_type") else "type", _ROPE_KINDS, "default"
    )
    for place in (fields, section):
        if place.has("partial_rotary_factor") and place.number("partial_rotary_factor") != 1.0:
            fields.problem("partial_rotary_factor other than 1 is not supported")
    theta = section.number("rope_theta", fields.number("rope_theta", default_theta))
    if kind == "default":
        return Rope(dim, theta, interleaved=interleaved)

    positions = fields.tokens("max_position_embeddings")
    original = fields.tokens(
        "original_max_position_embeddings",
        section.tokens("original_max_position_embeddings", positions),
    )
    if kind == "yarn" and not section.has("factor"):
        factor = positions / original
    else:
        factor = section.number("factor")
    return Rope(
        dim,
        theta,
        kind=cast(RopeKind, kind),
        factor=factor,
        original_positions=original,
        low_freq_factor=section.number("low_freq_factor", 1.0),
        high_freq_factor=section.number("high_freq_factor", 4.0),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        attention_factor=_yarn_attention_factor(section, factor) if kind == "yarn" else 1.0,
        interleaved=interleaved,
    )


def _yarn_attention_factor(section: Fields, factor: float) -> float:
    """What YaRN multiplies cosine and sine by (arXiv 2309.00071, section 3.4)."""
    if section.has("attention_factor"):
        return section.number("attention_factor")
    mscale, mscale_all = section.raw.get("mscale"), section.raw.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, section.number("mscale")) / yarn_mscale(
            factor, section.number("mscale_all_dim")
        )
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 m ln(s) + 1 for a context stretched s times; 1 when it is not stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def norm_eps(fields: Fields, default: float) -> float:
    return fields.number("rms_norm_eps", default)


def check_common(fields: Fields) -> None:
    """Notes what no family here can honour."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    if fields.has("quantization_config"):
        given = fields.section("quantization_config").raw.get("quant_method", "unknown method")
        method = plain(str(given))
        fields.problem(
            f"quantised weights ({method}) are not supported; use a float32, float16 or bfloat16 "
            "checkpoint"
        )


def torch_dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(key, ("float32", "float16", "bfloat16"), "float32")


def eos_token_ids(fields: Fields, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    return fields.integers("eos_token_id") if "eos_token_id" in fields.raw else default


def check_top_k(fields: Fields, top_k: int, experts: int) -> None:
    if top_k > experts:
        fields.conflict(f"num_experts_per_tok {top_k} is more than the {experts} experts")
