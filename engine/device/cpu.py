"""The CPU: no streams, and gloo for process groups."""

from __future__ import annotations

import os
import platform
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

import psutil
import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from engine.device.base import Device, Kind
from engine.device.fused import register
from engine.kernels.build import library
from engine.kernels.operators import CpuKernels


class Cpu(Device):
    kind: ClassVar[Kind] = "cpu"
    backend: ClassVar[str] = "gloo"

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.torch = torch.device("cpu")
        self.address = address

    def use(self) -> None:
        if (found := library()) is not None:
            register("cpu", CpuKernels(found).operators)

    def name(self) -> str:
        return platform.processor() or platform.machine()

    def memory(self) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def process_group(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        return gloo(store, rank, size, timeout, self.address)


def gloo(
    store: Store, rank: int, size: int, timeout: timedelta, address: str = "127.0.0.1"
) -> ProcessGroupGloo:
    """A gloo group whose connections are made to and from `address`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [_interface(address, os.getpid())]
    options._timeout = timeout
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)


@cache
def _interface(address: str, _pid: int) -> Any:
    """What all groups of a process share: one listening port and one thread. A forked process has
    neither of its parent's. GLOO_SOCKET_IFNAME goes before `address`, unless it is its interface.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name and address not in {each.address for each in psutil.net_if_addrs().get(name, ())}:
        return ProcessGroupGloo.create_device(interface=name)
    return ProcessGroupGloo.create_device(hostname=address)
