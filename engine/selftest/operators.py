"""Every operator of a device, beside the plain code of engine.model in float32 on the CPU.

Inputs are rounded to the dtype first and are the same on both sides, so what differs is what the
device does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.device.fused import FusedOperators, fused, using
from engine.model.architecture import GroupedQuery, ModelConfig, Rope, Router
from engine.model.experts import ExpertModel
from engine.model.layers import RMSNorm
from engine.model.rope import Rotation, rotate, rotation
from engine.model.router import Gate
from engine.model.spans import attend
from engine.selftest.messages import OperatorResult
from engine.selftest.report import operator_tolerance

_SEED = 20260301
_HIDDEN, _INTERMEDIATE, _EXPERTS = 128, 64, 16


class _Side(NamedTuple):
    """Where a side of the comparison computes, and in what."""

    device: torch.device
    dtype: torch.dtype

    def put(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors whose values the dtype holds exactly."""
        return [tensor.to(self.device, self.dtype) for tensor in tensors]


# From seeded inputs to one result, which is compared: [...] float.
Operator: TypeAlias = Callable[[_Side, torch.Generator, torch.dtype], Tensor]


def try_operators(device: torch.device, dtype: torch.dtype) -> list[OperatorResult]:
    """One result an operator of engine.device.fused, in its order. Never raises for what an
    operator does.
    """
    return [_try(name, device, dtype) for name in OPERATORS]


def _try(name: str, device: torch.device, dtype: torch.dtype) -> OperatorResult:
    own = getattr(fused(device), name) is not None
    tolerance = operator_tolerance(dtype, device.type)
    try:
        error = 0.0
        for case in OPERATORS[name]:
            with using(FusedOperators()):
                wanted = case(_Side(torch.device("cpu"), torch.float32), _generator(), dtype)
            got = case(_Side(device, dtype), _generator(), dtype).float().cpu()
            if not bool(got.isfinite().all()):
                return OperatorResult(name, own, tolerance, problem="gave what is not finite")
            error = max(error, float(((got - wanted).abs() / wanted.abs().clamp(min=1)).max()))
    except Exception as problem:  # a kernel that does not compile, a library that is not there
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        return OperatorResult(name, own, tolerance, problem=f"{type(problem).__name__}: {first}")
    return OperatorResult(name, own, tolerance, error)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _random(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _rms_norm(side: _Side, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    x, weight = side.put(*(_random(generator, dtype, *shape) for shape in ((33, 128), (128,))))
    norm = RMSNorm(128, 1e-6)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    normed: Tensor = norm(x)
    return normed


def _rotate(interleaved: bool) -> Operator:
    def run(side: _Side, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        angles = rotation(Rope(dim=32, theta=1e4), torch.arange(7, 40), dtype)
        x, cos, sin = side.put(_random(generator, dtype, 33, 4, 32), angles.cos, angles.sin)
        return rotate(x, Rotation(cos, sin, unit=True), interleaved)

    return run


def _attend(
    rows: int, keys: int, heads: tuple[int, int], widths: tuple[int, int], window: int | None
) -> Operator:
    def run(side: _Side, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        shapes = (
            (rows, heads[0], widths[0]),
            (keys, heads[1], widths[0]),
            (keys, heads[1], widths[1]),
        )
        query, key, value = side.put(*(_random(generator, dtype, *shape) for shape in shapes))
        return attend(query, key, value, window, widths[0] ** -0.5)

    return run


def _gate(router: Router) -> Operator:
    """[tokens, experts]: the weight of each chosen one, and 0."""

    def run(side: _Side, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        weight = torch.randn(_EXPERTS, _HIDDEN, generator=generator) / _HIDDEN**0.5
        bias = torch.randn(_EXPERTS, generator=generator) * 0.1
        (x,) = side.put(_random(generator, dtype, 64, _HIDDEN))
        gate = Gate(_config(router))
        gate.weight = torch.nn.Parameter(weight, requires_grad=False)
        if router.kind == "sigmoid":
            gate.e_score_correction_bias.copy_(bias)
        chosen, weights = gate.to(side.device)(x)
        return torch.zeros(64, _EXPERTS, device=x.device).scatter_(1, chosen, weights)

    return run


def _experts(side: _Side, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Two layers of 4 experts, one of which has no tokens."""
    config, tokens = _config(_SOFTMAX), 48
    with torch.device("meta"):
        model = ExpertModel(config, range(4))
    state = {
        name: _random(generator, torch.float32, *parameter.shape) / parameter.shape[-1] ** 0.5
        for name, parameter in model.state_dict().items()
    }
    state = {name: side.put(value.to(dtype))[0] for name, value in state.items()}
    model.load_state_dict(state, strict=True, assign=True)
    (hidden,) = side.put(_random(generator, dtype, tokens, _HIDDEN))
    counts = torch.tensor([40, 0, 48, 17], dtype=torch.int32)
    order = (torch.randperm(tokens, generator=generator)[:n].sort().values for n in counts.tolist())
    row_index = torch.cat(list(order)).to(torch.int32)
    weights = torch.rand(len(row_index), generator=generator)
    device = side.device
    outs = [torch.empty_like(hidden) for _ in config.moe_layers]
    for layer, out in zip(config.moe_layers, outs, strict=True):
        routing = (counts.to(device), row_index.to(device), weights.to(device))
        model.serve(layer, hidden, *routing, out)
    return torch.cat(outs)


_SOFTMAX = Router("softmax", top_k=2, normalize=True)
_SIGMOID = Router("sigmoid", top_k=3, normalize=True, scaling=2.5, groups=4, top_groups=2)

OPERATORS: dict[str, Sequence[Operator]] = {
    "rms_norm": (_rms_norm,),
    "rotate": (_rotate(interleaved=False), _rotate(interleaved=True)),
    # A whole prompt, a later part of one, a sliding window, and MLA's narrower values.
    "attend": (
        _attend(65, 65, (4, 2), (32, 32), None),
        _attend(17, 65, (4, 2), (32, 32), None),
        _attend(65, 65, (4, 2), (32, 32), 16),
        _attend(40, 40, (4, 4), (48, 32), None),
    ),
    "gate": (_gate(_SOFTMAX), _gate(_SIGMOID)),
    "experts": (_experts,),
}


def _config(router: Router) -> ModelConfig:
    return ModelConfig(
        architecture="selftest",
        vocab_size=1,
        hidden_size=_HIDDEN,
        layers=4,
        moe_layers=(1, 3),
        attention=GroupedQuery(1, 1, 32, bias=False, qk_norm=False, scale=1.0),
        rope=Rope(dim=32, theta=1e4),
        window=None,
        experts=_EXPERTS,
        expert_intermediate=_INTERMEDIATE,
        shared_intermediate=0,
        dense_intermediate=1,
        router=router,
        norm_eps=1e-6,
        tied_embeddings=False,
        max_position_embeddings=128,
        torch_dtype="float32",
    )
