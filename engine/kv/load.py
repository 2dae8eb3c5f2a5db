"""A KV file -> the cache that transformers itself would hold after the same prompt."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UsageError

if TYPE_CHECKING:
    from transformers import DynamicCache


def load_dynamic_cache(path: str | Path, model_dir: str | Path) -> "DynamicCache":
    """The cache of one prompt, batch size 1, in the dtype of the file.

    To continue: feed the prompt's first token (`token_ids` of its result) at position `tokens`,
    or call `generate` with the prompt's ids plus that token and this cache. Layers with a sliding
    window keep what transformers keeps of them. Raises UsageError: transformers is missing, the
    file cannot be read, or it is of another model.
    """
    try:
        from transformers import AutoConfig, DynamicCache
    except ImportError:
        raise UsageError(
            "load_dynamic_cache needs transformers; install it with pip install "
            "'asapctl[transformers]'"
        ) from None
    path, model_dir = Path(path), Path(model_dir)
    tensors, metadata = _read(path)
    _check_model(path, metadata, model_dir)
    config = AutoConfig.from_pretrained(str(model_dir), local_files_only=True)
    layers = int(config.num_hidden_layers)
    latent = "layers.0.latent" in tensors
    parts = ("latent", "rope") if latent else ("key", "value")
    expected = {f"layers.{layer}.{part}" for layer in range(layers) for part in parts}
    if tensors.keys() != expected:
        odd = sorted(tensors.keys() ^ expected)[0]
        raise UsageError(f"{path}: does not fit {model_dir} with {layers} layers ({odd})")

    expand = _Expander(config, model_dir) if latent and not _caches_latents() else None
    cache = DynamicCache(config=config)
    for layer in range(layers):
        first, second = (tensors[f"layers.{layer}.{part}"] for part in parts)
        if expand is not None:
            first, second = expand(layer, first, second)
        cache.update(_per_head(first), _per_head(second), layer)
    return cache


def _per_head(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim], or [tokens, dim] for one head -> [1, heads, tokens, dim]."""
    if rows.dim() == 2:
        rows = rows.unsqueeze(1)
    return rows.transpose(0, 1).unsqueeze(0)


def _caches_latents() -> bool:
    """Newer transformers keep MLA's latents and expand them at each step; older ones expand once.

    Both are within the range of versions that are supported, so the module itself is asked.
    """
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    return hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv")


class _Expander:
    """MLA's latents -> the keys and values of every head, through the checkpoint's kv_b_proj."""

    def __init__(self, config: Any, model_dir: Path) -> None:
        from engine.model.checkpoint import Checkpoint

        self._checkpoint = Checkpoint(model_dir)
        self._heads = int(config.num_attention_heads)
        self._nope = int(config.qk_nope_head_dim)
        self._value = int(config.v_head_dim)

    def __call__(
        self, layer: int, latent: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [tokens, rank], rope [tokens, rope_dim] -> key, value [tokens, heads, dim]."""
        weight = self._checkpoint.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight", None)
        key, value = expand_latent(latent, rope, weight.to(latent.dtype), self._nope, self._value)
        return key, value


def expand_latent(
    latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, nope_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of multi-head latent attention (DeepSeek-V2, section 2.1.2).

    latent [tokens, rank], rope [tokens, rope_dim], weight [heads * (nope_dim + value_dim), rank]
    -> key [tokens, heads, nope_dim + rope_dim], value [tokens, heads, value_dim].
    """
    expanded = torch.nn.functional.linear(latent, weight)
    expanded = expanded.view(latent.shape[0], -1, nope_dim + value_dim)
    nope, value = torch.split(expanded, [nope_dim, value_dim], dim=-1)
    shared = rope.unsqueeze(1).expand(-1, nope.shape[1], -1)
    return torch.cat([nope, shared], dim=-1), value


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.is_file():
        raise UsageError(f"{path}: no such KV file")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path}: not a complete safetensors file: {error}") from None


def _check_model(path: Path, metadata: dict[str, str], model_dir: Path) -> None:
    if not (model_dir / "config.json").is_file():
        raise UsageError(f"{model_dir}: no config.json; give the folder of the checkpoint")
    written_by = metadata.get("model_hash")
    if written_by is None:
        return
    from engine.model.checkpoint import model_hash

    if model_hash(model_dir) != written_by:
        raise UsageError(
            f"{path} was computed with another checkpoint ({metadata.get('model', 'unknown')}) "
            f"than {model_dir}"
        )
