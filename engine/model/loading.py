"""Filling one role's half of the model with its own tensors, and no others.

Modules are built without memory and their parameters assigned once read, so that none can be left
uninitialised: what is missing or of the wrong shape is an error that names the tensor.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UsageError
from engine.model.architecture import ModelConfig
from engine.model.attention import AttentionModel
from engine.model.checkpoint import Checkpoint
from engine.model.experts import ExpertModel, stacked_shapes
from engine.model.sharding import Cut, Shard, cut, is_zero
from engine.model.weights import (
    FusedExperts,
    attention_parameters,
    expert_source,
    is_router,
    resolve_tie,
    stored_name,
    swap,
)

_CPU = torch.device("cpu")
_ALL_HEADS = Shard()


def load_attention(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    shard: Shard = _ALL_HEADS,
) -> AttentionModel:
    """Everything but the routed experts, in `dtype` (routers in float32), on `device`.

    config: of the whole model; the result has the heads of `shard` only.
    """
    checkpoint = Checkpoint(model_dir)
    config = resolve_tie(checkpoint.tensors, config)
    with torch.device("meta"):
        model = AttentionModel(config, shard.size)
    state: dict[str, Tensor] = {}
    for name, shape in attention_parameters(config).items():
        stored = stored_name(checkpoint.tensors, config, name)
        tensor = _read_part(checkpoint, stored, shape, cut(name, shape, config, shard))
        if is_zero(name, shard):
            tensor = torch.zeros_like(tensor)
        state[name] = tensor.to(device, torch.float32 if is_router(name) else dtype)
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False)


def load_experts(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    experts: range,
    device: torch.device = _CPU,
) -> ExpertModel:
    """The experts in `experts` of every MoE layer, in `dtype`, on `device`."""
    checkpoint = Checkpoint(model_dir)
    with torch.device("meta"):
        model = ExpertModel(config, experts)
    gate_up_shape, down_shape = stacked_shapes(config, len(experts))
    state: dict[str, Tensor] = {}
    for layer in config.moe_layers:
        source = expert_source(checkpoint.tensors, config, layer)
        if isinstance(source, FusedExperts):
            gate_up, down = _read_fused(checkpoint, source, config, experts)
        else:
            gate_up = torch.empty(gate_up_shape, dtype=dtype)
            down = torch.empty(down_shape, dtype=dtype)
            for local, expert in enumerate(experts):
                gate_name, up_name, down_name = source.names(expert)
                gate_out, up_out = gate_up[local].chunk(2)
                _read_into(checkpoint, gate_name, gate_out)
                _read_into(checkpoint, up_name, up_out)
                _read_into(checkpoint, down_name, down[local])
        state[f"layers.{layer}.gate_up_proj"] = gate_up.to(device, dtype)
        state[f"layers.{layer}.down_proj"] = down.to(device, dtype)
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(False)


def _read_fused(
    checkpoint: Checkpoint, source: FusedExperts, config: ModelConfig, experts: range
) -> tuple[Tensor, Tensor]:
    """Gate-up and down of `experts`, in the orientation that ExpertModel keeps."""
    rows = slice(experts.start, experts.stop)
    gate_up, down = stacked_shapes(config, config.experts)
    if not source.transposed:
        return (
            _read(checkpoint, source.gate_up, gate_up, rows),
            _read(checkpoint, source.down, down, rows),
        )
    return (
        _read(checkpoint, source.gate_up, swap(gate_up), rows).transpose(1, 2).contiguous(),
        _read(checkpoint, source.down, swap(down), rows).transpose(1, 2).contiguous(),
    )


def _read_part(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], part: Cut | None
) -> Tensor:
    """`part` of a tensor, holding no more memory than that; rows are read alone, columns are not,
    since they lie all over the file.
    """
    if part is None:
        return _read(checkpoint, name, shape)
    if part.dim == 0:
        return _read(checkpoint, name, shape, slice(part.begin, part.end))
    whole = _read(checkpoint, name, shape)
    return whole[:, part.begin : part.end].clone(memory_format=torch.contiguous_format)


def _read_into(checkpoint: Checkpoint, name: str, out: Tensor) -> None:
    out.copy_(_read(checkpoint, name, tuple(out.shape)))


def _read(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], rows: slice | None = None
) -> Tensor:
    """The tensor, once it is known to have the whole shape that the config asks for."""
    found = checkpoint.shape(name)
    if found != shape:
        raise UsageError(
            f"{checkpoint.tensors[name].file}: tensor {name} has shape {list(found)}, "
            f"the config asks for {list(shape)}"
        )
    return checkpoint.read(name, rows)
