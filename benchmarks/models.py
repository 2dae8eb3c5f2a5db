"""The models and the prompts that are measured: random checkpoints made with transformers.

python -m benchmarks.models [NAME ...] [--cache DIR]    makes those that are not there
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine.bench.workload import STANDARD_LENGTHS, random_prompts

DEFAULT_CACHE = Path("~/.cache/asapctl-bench").expanduser()
NAMES = ("a", "b", "c", "d")
_SEED = 20260

_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The class of transformers' configuration, and what is not in _COMMON.
_RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen3-MoE, 110M parameters
    "a": (
        "Qwen3MoeConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1024,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    # Qwen3-MoE, 955M parameters
    "b": (
        "Qwen3MoeConfig",
        {
            "vocab_size": 8192,
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 2048,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
        },
    ),
    # DeepSeek-V3, 102M parameters
    "c": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "intermediate_size": 1024,
            "moe_intermediate_size": 256,
            "n_routed_experts": 32,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_mtp_layers": 0,
        },
    ),
    # Mixtral, 110M parameters
    "d": (
        "MixtralConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
}


def build(name: str, cache: Path = DEFAULT_CACHE) -> Path:
    """The checkpoint folder of model `name`, in float32. It is made when it is not there."""
    target = cache / "models" / name
    if target.is_dir():
        return target
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind, changes = _RECIPES[name]
    config = getattr(transformers, kind)(**_COMMON | changes)
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        model.save_pretrained(unfinished, max_shard_size="4GB")
        unfinished.chmod(0o755)
        # Of two that are made at once the first one stays.
        try:
            os.rename(unfinished, target)  # noqa: PTH104 - it says which error it was
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def workload() -> list[list[int]]:
    """The token ids of the 64 prompts; every model's vocabulary has them."""
    return random_prompts(STANDARD_LENGTHS, _COMMON["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the checkpoints that are measured.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help="a, b, c, d")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, metavar="DIR")
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"there is no model {name}; they are {', '.join(NAMES)}")
        print(build(name, options.cache))


if __name__ == "__main__":
    main()
