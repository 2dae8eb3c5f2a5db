"""The whole KV cache of a prompt whose heads are divided over an attention group."""

from torch import Tensor

from engine.comm.collectives import TensorParallel
from engine.model.architecture import GroupedQuery, ModelConfig
from engine.model.kv import PromptKV


def whole_parts(kv: PromptKV, team: TensorParallel, config: ModelConfig) -> dict[str, Tensor]:
    """On the group's first member what `kv.tensors()` of an undivided group is; {} on the others.

    config: of the whole model. Every member calls it for the same prompts in the same order. Key
    and value heads are brought together a layer at a time, and put into host memory; what `kv`
    held of a layer is given up. MLA's latents are whole on each member already.
    """
    shape = config.attention
    if team.size == 1 or not isinstance(shape, GroupedQuery):
        return kv.tensors() if team.member == 0 else {}
    found: dict[str, Tensor] = {}
    for layer in range(config.layers):
        for name, part in kv.take(layer).items():
            whole = team.gather_heads(part, shape.kv_heads)
            if team.member == 0:
                found[name] = whole.cpu()
    return found
