"""A small random checkpoint that any topology can divide."""

from pathlib import Path
from typing import Any

from engine.model.demo import CONFIG, write_random_model

VOCABULARY = 256
_LEAST_EXPERTS = 8
_DENSE_LAYER = 1


def small_config(expert_ranks: int, members: int) -> dict[str, Any]:
    """The demo model's config.json with 3 layers, one of them without experts, with experts for
    that many ranks, and with heads for groups of that many members.
    """
    heads = max(4, members) if members % 2 == 0 or members == 1 else 2 * members
    return CONFIG | {
        "vocab_size": VOCABULARY,
        "eos_token_id": 0,
        "num_hidden_layers": 3,
        "mlp_only_layers": [_DENSE_LAYER],
        "num_experts": max(_LEAST_EXPERTS, expert_ranks),
        "moe_intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": 2 if members % 2 == 0 or members == 1 else members,
    }


def write_small_checkpoint(folder: Path, expert_ranks: int, members: int) -> None:
    """Writes it to the existing `folder`; a few MB. Raises OSError."""
    write_random_model(folder, small_config(expert_ranks, members))
