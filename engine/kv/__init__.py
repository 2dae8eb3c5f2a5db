"""The KV cache of a finished prompt: written to a file, listed in a manifest, loaded again.

`load_dynamic_cache` gives a file back as a transformers cache. Imports no worker and no socket;
torch and transformers only when something is written or loaded.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.kv.load import load_dynamic_cache

__all__ = ["load_dynamic_cache"]


def __getattr__(name: str) -> Any:
    if name == "load_dynamic_cache":
        from engine.kv.load import load_dynamic_cache

        return load_dynamic_cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
