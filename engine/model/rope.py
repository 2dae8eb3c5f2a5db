"""Rotary position embedding: angles of a batch, and turning features by them.

Frequencies and angles are computed in float32 in the order that transformers uses: at position
700 a last-bit difference in a frequency is already a difference of 4e-5 in the angle.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.fused import fused
from engine.model.architecture import Rope


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles: [N, dim / 2] each, in the compute dtype.

    unit: no value is beyond 1, as it may be where YaRN scales them; some operators ask for that.
    """

    cos: Tensor
    sin: Tensor
    unit: bool


def rotation(rope: Rope, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """The rotation of tokens at `positions` [N] (int64)."""
    frequencies = inverse_frequencies(rope).to(positions.device)
    angles = positions[:, None].float() * frequencies
    factor = rope.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return Rotation(cos.to(dtype), sin.to(dtype), unit=abs(factor) <= 1)


def rotate(x: Tensor, rotation: Rotation, interleaved: bool) -> Tensor:
    """Turns [N, heads, dim] feature by feature pair.

    A pair is (i, i + dim / 2), or (2i, 2i + 1) when interleaved; the result has the first of all
    pairs in its first half and the second in its second in both cases, since only dot products of
    queries with keys are taken and both are laid out alike.
    """
    if rotation.unit and (turn := fused(x.device).rotate) is not None:
        turned = turn(x, rotation.cos, rotation.sin, interleaved)
        if turned is not None:
            return turned
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out


def inverse_frequencies(rope: Rope) -> Tensor:
    """Radians a token of each feature pair: [dim / 2] float32."""
    periods = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float) / rope.dim)
    frequencies = 1.0 / periods
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, periods, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp between."""
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_positions / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(waves < shortest) & ~(waves > longest)
    return torch.where(between, ramp, stretched)


def _yarn(rope: Rope, periods: Tensor, frequencies: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over feature pairs from kept to stretched."""

    def pair_of(rotations: float) -> float:
        """The pair that turns `rotations` times within the original context."""
        length = rope.original_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + frequencies * kept
