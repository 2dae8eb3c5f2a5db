"""The members of an attention group as threads of this process, over real gloo groups."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore

from engine.comm.collectives import TensorParallel
from engine.device.cpu import gloo

T = TypeVar("T")


def in_team(size: int, work: Callable[[TensorParallel], T], timeout_s: float = 20) -> list[T]:
    """What `work` returns for each member; the first error, not those of who waited in vain."""
    store = HashStore()

    @torch.inference_mode()
    def member(index: int) -> T:
        if size == 1:
            return work(TensorParallel.solo())
        group = gloo(store, index, size, timedelta(seconds=timeout_s))
        return work(TensorParallel(group, index, size))

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(member, index) for index in range(size)]
        for future in as_completed(futures):
            future.result()
        return [future.result() for future in futures]
