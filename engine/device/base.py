"""A device as the rest of the engine sees it. A rank sees one accelerator: its mask names it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch.distributed.distributed_c10d import Store

Kind: TypeAlias = Literal["cpu", "cuda", "npu"]

MODULES: dict[str, str] = {
    "cpu": "engine.device.cpu:Cpu",
    "cuda": "engine.device.cuda:Cuda",
    "npu": "engine.device.npu:Npu",
}


class Device(ABC):
    """Streams and events are opaque; a device without streams has None for both.

    torch: where tensors go. backend: the process groups that carry tensors of this device. address:
    this machine's own, as the other ranks reach it.
    """

    kind: ClassVar[Kind]
    backend: ClassVar[str]
    torch: torch.device
    address: str = "127.0.0.1"

    def new_stream(self) -> Any | None:
        """A stream beside the current one; None: this device has none."""
        return None

    def on_stream(self, stream: Any | None) -> AbstractContextManager[Any]:
        """For a `with`: what is launched inside goes to `stream`."""
        return nullcontext()

    def record(self) -> Any | None:
        """An event after everything launched on the current stream so far."""
        return None

    def wait_event(self, event: Any | None) -> None:
        """Makes the current stream wait for `event`, not the host."""
        assert event is None

    def synchronize(self, event: Any | None) -> None:
        """Blocks the host until `event` has happened; other threads go on."""
        assert event is None

    def use(self) -> None:  # noqa: B027  (most devices need nothing)
        """Once, before anything is computed: registers what this device does better than torch."""

    @abstractmethod
    def name(self) -> str:
        """The hardware's own name."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""

    @abstractmethod
    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        """A communicator of `size` processes that meet through `store`: here, or, over HCCL, in
        its first operation. Either blocks until all are there.

        Has the methods of torch.distributed.Backend. Raises RuntimeError when they do not come.
        """


def open_device(kind: Kind) -> Device:
    """Makes this process one that computes on `kind`. To be called once, after the last fork.

    Raises RunError that names what is missing (a driver, a library, the device).
    """
    module, name = MODULES[kind].split(":")
    device: Device = getattr(import_module(module), name)()
    device.use()
    return device
