"""The operators that a device does better than the plain torch code of engine.model.

A field that is None means the plain code. A device registers its operators when it is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertTables:
    """The local experts' weights of every MoE layer, and where each layer's lie.

    layers: the model's layer ids. gate_up: [E_local, 2 I, H] a layer. down: [E_local, H, I].
    """

    layers: tuple[int, ...]
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    place: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", {layer: i for i, layer in enumerate(self.layers)})

    @cached_property
    def addresses(self) -> Tensor:
        """[layers of the model, 2] int64 on the weights' device: of gate_up and of down, by the
        model's layer id; 0 where a layer has no experts. The weights must not move afterwards.
        """
        rows = [[0, 0] for _ in range(max(self.layers, default=-1) + 1)]
        for layer, gate_up, down in zip(self.layers, self.gate_up, self.down, strict=True):
            rows[layer] = [gate_up.data_ptr(), down.data_ptr()]
        device = self.gate_up[0].device if self.gate_up else None
        return torch.tensor(rows, dtype=torch.int64, device=device)


# tables, layer (a number, or a tensor of one on the device), hidden [n, H], counts [E_local] int32,
# row_index [p] int32, weights [p] float32, out [n, H]: as engine.model.experts' serve.
ExpertOperator: TypeAlias = Callable[
    [ExpertTables, "int | Tensor", Tensor, Tensor, Tensor, Tensor, Tensor], None
]


@dataclass(frozen=True)
class FusedOperators:
    """rms_norm: x [..., H], weight [H], eps. rotate: x [N, heads, d], cos and sin [N, d / 2],
    interleaved; laid out as engine.model.rope's. attend: query [n, heads, d], key [m, kv_heads, d],
    value [m, kv_heads, dv], window, scale -> [n, heads, dv]. gate: logits [N, E] float32, router,
    selection bias or None -> experts [N, k] int64, weights [N, k] float32. gated: both [n, 2 I] ->
    silu of the first half times the second, [n, I]. All of these may return None for what they
    cannot do, which is then done in plain code. add_rows: out [n, H], places [p] int32, weights
    [p], x [p, H]: out[places[r]] += weights[r] * x[r]; False where it did nothing. prepare: to be
    called once with the weights where they stay, before any work: compiling may take seconds.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor | None] | None = None
    rotate: Callable[[Tensor, Tensor, Tensor, bool], Tensor | None] | None = None
    attend: Callable[[Tensor, Tensor, Tensor, int | None, float], Tensor | None] | None = None
    gate: Callable[..., tuple[Tensor, Tensor] | None] | None = None
    gated: Callable[[Tensor], Tensor | None] | None = None
    add_rows: Callable[[Tensor, Tensor, Tensor, Tensor], bool] | None = None
    experts: ExpertOperator | None = None
    prepare: Callable[[ExpertTables], None] | None = None


_PLAIN = FusedOperators()
_registered: dict[str, FusedOperators] = {}
_forced: FusedOperators | None = None


def fused(device: torch.device) -> FusedOperators:
    """What there is for tensors on `device`."""
    return _forced if _forced is not None else _registered.get(device.type, _PLAIN)


def register(device_type: str, operators: FusedOperators) -> None:
    _registered[device_type] = operators


@contextmanager
def using(operators: FusedOperators) -> Iterator[None]:
    """These for every tensor, wherever it is: how tests run a device's operators on a CPU."""
    global _forced
    before, _forced = _forced, operators
    try:
        yield
    finally:
        _forced = before
