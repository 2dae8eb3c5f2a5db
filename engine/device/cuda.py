"""NVIDIA GPUs, with NCCL for process groups. Written to torch's documentation; not run on one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import Store

from engine.device import grouped_mlp
from engine.device.base import Device, Kind
from engine.device.fused import FusedOperators, register
from engine.errors import RunError


class Cuda(Device):
    kind: ClassVar[Kind] = "cuda"
    backend: ClassVar[str] = "nccl"

    def __init__(self) -> None:
        if not torch.backends.cuda.is_built():
            raise RunError(
                f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
            )
        try:
            torch.cuda.set_device(0)
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            raise RunError(
                f"no CUDA device can be used: {error}; `asapctl doctor` says what is missing"
            ) from None
        self.torch = torch.device("cuda", 0)
        if grouped_mlp.available():
            register("cuda", FusedOperators(experts=grouped_mlp.serve, prepare=grouped_mlp.prepare))

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.torch)

    def on_stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> Any:
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    def wait_event(self, event: Any | None) -> None:
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def synchronize(self, event: Any | None) -> None:
        if event is not None:
            event.synchronize()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch)

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        from torch.distributed.distributed_c10d import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self.torch)
        return group
