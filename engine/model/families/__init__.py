"""One file for each model type: how its config.json becomes a ModelConfig. No torch here.

A new family is a new file with `read(fields) -> ModelConfig` and a line in `READERS`.
"""

from collections.abc import Callable

from engine.model.architecture import ModelConfig
from engine.model.families import deepseek_v3, mixtral, qwen3_moe
from engine.model.fields import Fields

READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    "deepseek_v3": deepseek_v3.read,
    "mixtral": mixtral.read,
    "qwen3_moe": qwen3_moe.read,
}
