"""The keys and values of one prompt, over all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.architecture import ModelConfig


class PromptKV:
    """What later tokens of one prompt (and an export) need of its earlier ones.

    length: tokens of the whole prompt. keep: hold everything for `tensors`; otherwise a prompt
    that comes in one span retains nothing, so that memory stays flat over the layers.
    """

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, keep: bool):
        self.length = length
        self.keep = keep
        self._dtype = dtype
        self._shapes = config.kv_parts
        self._stored: dict[int, tuple[Tensor, ...]] = {}
        self._filled = [0] * config.layers

    def extend(self, layer: int, start: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Adds the rows [n, ...] of positions start.. to each part of `layer`.

        Returns views of all rows so far, [start + n, ...]. Spans of a layer come in order and
        without gaps.
        """
        count = parts[0].shape[0]
        if start != self._filled[layer] or start + count > self.length:
            raise ValueError(
                f"layer {layer} holds {self._filled[layer]} of {self.length} tokens, "
                f"got {count} from {start}"
            )
        self._filled[layer] = start + count
        if count == self.length and not self.keep:
            return parts
        if layer not in self._stored:
            self._stored[layer] = tuple(
                torch.empty(self.length, *shape, dtype=self._dtype, device=parts[0].device)
                for shape in self._shapes.values()
            )
        stored = self._stored[layer]
        for whole, part in zip(stored, parts, strict=True):
            whole[start : start + count] = part
        return tuple(whole[: start + count] for whole in stored)

    @property
    def nbytes(self) -> int:
        """Bytes that are held, over all layers."""
        return sum(part.nbytes for parts in self._stored.values() for part in parts)

    def tensors(self) -> dict[str, Tensor]:
        """Everything kept: "layers.{i}.{part}" to [length, ...]."""
        self._check_whole()
        return {
            f"layers.{layer}.{name}": part
            for layer, parts in sorted(self._stored.items())
            for name, part in zip(self._shapes, parts, strict=True)
        }

    def take(self, layer: int) -> dict[str, Tensor]:
        """The parts of one layer [length, ...], named as in `tensors`, and no longer held here."""
        self._check_whole()
        parts = self._stored.pop(layer)
        return {
            f"layers.{layer}.{name}": part for name, part in zip(self._shapes, parts, strict=True)
        }

    def _check_whole(self) -> None:
        if any(filled != self.length for filled in self._filled) or not self.keep:
            raise ValueError("the prompt is not finished or its KV cache was not kept")
