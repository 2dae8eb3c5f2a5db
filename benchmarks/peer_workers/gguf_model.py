"""Writes a checkpoint of the measured kinds as GGUF, without a vocabulary, for llama.cpp."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "deepseek_v3": "deepseek2"}
_TYPES = {"f16": np.float16, "f32": np.float32}

# By what follows "model.layers.N." in the checkpoint and "blk.N." in GGUF.
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_EXPERT_PARTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(model: Path, target: Path, kind: str) -> None:
    """kind: "f16" or "f32", of matrices; gates, norms and biases stay float32."""
    config = json.loads((model / "config.json").read_text())
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, _ARCHITECTURES[config["model_type"]])
    _describe(writer, config)
    experts: dict[str, dict[int, Any]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                _add(writer, config, name, tensors.get_tensor(name), kind, experts)
    if experts:
        raise ValueError(f"experts are missing of {', '.join(experts)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads, rope_theta = config["num_attention_heads"], config["rope_parameters"]["rope_theta"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_tokenizer_model("no_vocab")
    experts = config.get("num_local_experts") or config["n_routed_experts"]
    writer.add_expert_count(experts)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "deepseek_v3":
        _describe_latent(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _describe_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    # llama.cpp reads latent attention as attention with one KV head.
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add(
    writer: gguf.GGUFWriter,
    config: dict[str, Any],
    name: str,
    tensor: Any,
    kind: str,
    experts: dict[str, dict[int, Any]],
) -> None:
    """experts: those of stacks that are not complete yet, by the stack's name."""

    def write(target: str, value: Any) -> None:
        small = value.ndim == 1 or "ffn_gate_inp" in target
        writer.add_tensor(target, value.astype(np.float32 if small else _TYPES[kind]))

    whole, _, suffix = name.rpartition(".")
    if whole in _TOP:
        write(f"{_TOP[whole]}.weight", tensor)
        return
    _, _, layer, part = whole.split(".", 3)
    block = f"blk.{layer}."
    if ".experts." in part:
        number, piece = part.split(".experts.")[1].split(".")
        stack = f"{block}{_EXPERT_PARTS[piece]}.weight"
        held = experts.setdefault(stack, {})
        held[int(number)] = tensor
        if len(held) == (config.get("num_local_experts") or config["n_routed_experts"]):
            del experts[stack]
            write(stack, np.stack([held[number] for number in sorted(held)]))
    elif suffix == "e_score_correction_bias":
        write(f"{block}exp_probs_b.bias", tensor)
    elif part == "self_attn.kv_b_proj":
        nope = config["qk_nope_head_dim"]
        both = tensor.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
        write(f"{block}attn_k_b.weight", np.ascontiguousarray(both[:, :nope].swapaxes(1, 2)))
        write(f"{block}attn_v_b.weight", np.ascontiguousarray(both[:, nope:]))
    else:
        if config["model_type"] == "mixtral" and part.endswith(("q_proj", "k_proj")):
            tensor = _interleaved(tensor, config["head_dim"])
        write(f"{block}{_NAMES[part]}.weight", tensor)


def _interleaved(weight: Any, head_dim: int) -> Any:
    """Rows of each head from halves (transformers' rotation) to pairs (llama.cpp's)."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
