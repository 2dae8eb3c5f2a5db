"""Tiny checkpoints of every family, and what transformers computes with them.

Every parameter and buffer is moved away from the value at which leaving it out would not show
(norm weights off 1, biases off 0). Checkpoints and references are made once a test session.
"""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.utils import logging

logging.disable_progress_bar()

TIE = 1e-6
VOCABULARY = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def _qwen3_moe(**changes: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        **_COMMON
        | {
            "head_dim": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }
        | changes
    )


def _mixtral(**changes: Any) -> PreTrainedConfig:
    return MixtralConfig(
        **_COMMON
        | {
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        }
        | changes
    )


def _deepseek_v3(**changes: Any) -> PreTrainedConfig:
    return DeepseekV3Config(
        **_COMMON
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "intermediate_size": 48,
            "moe_intermediate_size": 20,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "rms_norm_eps": 1e-5,
            "num_mtp_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        }
        | changes
    )


_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_moe_tied": lambda: _qwen3_moe(
        norm_topk_prob=False,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_window": lambda: _qwen3_moe(
        use_sliding_window=True, sliding_window=33, max_window_layers=1
    ),
    "mixtral": _mixtral,
    "mixtral_window": lambda: _mixtral(sliding_window=40),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_plain": lambda: _deepseek_v3(
        q_lora_rank=None,
        norm_topk_prob=False,
        attention_bias=True,
        rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
}

FAMILIES: list[str] = list(_CONFIGS)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="checkpoints-")


@functools.cache
def checkpoint(name: str) -> Path:
    """The directory of a tiny checkpoint of one of FAMILIES, as transformers saves it."""
    torch.manual_seed(10 + FAMILIES.index(name))
    model = AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.float32)
    perturb(model)
    target = Path(_folder().name) / name
    model.save_pretrained(target)
    return target


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@functools.cache
def reference_model(model_dir: Path) -> PreTrainedModel:
    """transformers' model in float32, with its plainest attention and experts."""
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def reference_logits(model_dir: Path, token_ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of every position."""
    return _reference(model_dir, tuple(token_ids))[0]


def reference_cache(model_dir: Path, token_ids: list[int]) -> DynamicCache:
    """The KV cache that transformers holds after the prompt."""
    return _reference(model_dir, tuple(token_ids))[2]


def tied_positions(model_dir: Path, token_ids: list[int]) -> set[int]:
    """Positions where the reference's choice of experts or of the next token hangs on less than
    TIE, so that another order of summation may rightly choose otherwise.
    """
    logits, gaps, _ = _reference(model_dir, tuple(token_ids))
    best = logits.topk(2).values
    tied = (torch.stack([best[:, 0] - best[:, 1], *gaps]) <= TIE).any(0)
    return set(tied.nonzero().flatten().tolist())


@functools.cache
@torch.inference_mode()
def _reference(model_dir: Path, ids: tuple[int, ...]) -> tuple[Tensor, list[Tensor], DynamicCache]:
    model = reference_model(model_dir)
    gaps: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda gate, _, out: gaps.extend(_routing_gaps(gate, out[0])))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    try:
        out = model(torch.tensor([ids]), use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    cache = getattr(out, "cache", None)  # its name since transformers 5.2x
    return out.logits[0], gaps, out.past_key_values if cache is None else cache


def _routing_gaps(gate: Any, logits: Tensor) -> list[Tensor]:
    """How far each token is from another choice of experts, and of groups: [tokens] each."""
    if not hasattr(gate, "e_score_correction_bias"):
        return [_gap(logits.softmax(-1), gate.top_k)]
    scores = logits.sigmoid() + gate.e_score_correction_bias
    grouped = scores.view(len(scores), gate.num_group, -1)
    sums = grouped.topk(2).values.sum(-1)
    best = sums.topk(gate.topk_group).indices
    eligible = grouped.gather(1, best[..., None].expand(-1, -1, grouped.shape[-1]))
    return [_gap(sums, gate.topk_group), _gap(eligible.flatten(1), gate.top_k)]


def _gap(scores: Tensor, chosen: int) -> Tensor:
    ordered = scores.sort(descending=True).values
    return ordered[:, chosen - 1] - ordered[:, chosen]


@torch.no_grad()
def perturb(model: PreTrainedModel) -> None:
    """Random values for everything, scaled so that logits are of order one."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn_like(tensor)
        if "inv_freq" in name:
            continue  # follows from the config
        if name == "model.norm.weight" and model.config.tie_word_embeddings:
            tensor.copy_(0.13 + 0.04 * noise)  # the embedding is a large head
        elif name.endswith("norm.weight"):
            tensor.copy_(1 + 0.3 * noise)
        elif tensor.dim() == 1:
            tensor.copy_(0.1 * noise)
        elif "embed_tokens" in name:
            tensor.copy_(noise)
        else:
            gain = 0.7 if name.startswith("lm_head") else 2.0 if name.endswith("gate.weight") else 1
            tensor.copy_(noise * gain / tensor.shape[-1] ** 0.5)
