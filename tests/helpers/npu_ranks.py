"""Ranks on stand-ins for NPUs: CPUs with torch-npu's operators, whose process groups keep HCCL's
rules.
"""

import os

from engine.device import base
from engine.device.fused import register
from engine.device.npu_operators import operators
from engine.topology.ranks import Role
from engine.worker import attention as attention_rank
from engine.worker import expert as expert_rank
from helpers.hccl_double import NpuDouble
from helpers.torch_npu_double import torch_npu_double

ENTRIES: dict[Role, str] = {
    "attention": "helpers.npu_ranks:attention",
    "expert": "helpers.npu_ranks:expert",
}


class VisibleNpu(NpuDouble):
    """Says in the rank's log which device it was left to see."""

    def __init__(self) -> None:
        super().__init__()
        torch_npu = torch_npu_double()
        torch_npu.npu.set_device(0)
        register("cpu", operators(torch_npu, triton=False))
        print(
            f"sees {os.environ['ASCEND_RT_VISIBLE_DEVICES']}, "
            f"waits {os.environ['HCCL_CONNECT_TIMEOUT']} s",
            flush=True,
        )


def attention(payload: bytes, fds: list[int]) -> None:
    base.MODULES["npu"] = "helpers.npu_ranks:VisibleNpu"
    attention_rank.main(payload, fds)


def expert(payload: bytes, fds: list[int]) -> None:
    base.MODULES["npu"] = "helpers.npu_ranks:VisibleNpu"
    expert_rank.main(payload, fds)
