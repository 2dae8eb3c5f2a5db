"""How long this rank's experts take, by the number of tokens in a batch."""

import time
from collections.abc import Callable

import torch

from engine.device.base import Device
from engine.model.experts import ExpertModel

_TRIES = 3


def expert_times(model: ExpertModel, dtype: torch.dtype, device: Device) -> Callable[[int], float]:
    """A function that measures, in seconds: `n` tokens that choose among all of the model's experts
    evenly go through this rank's experts of one layer. On a CPU what other processes take does not
    count.
    """
    config, place = model.config, device.torch
    layer = config.moe_layers[-1]
    experts = len(model.experts)
    clock = time.thread_time if device.kind == "cpu" else time.perf_counter

    def seconds(n: int) -> float:
        each, more = divmod(max(1, n * config.top_k * experts // config.experts), experts)
        counts = torch.tensor([each + (e < more) for e in range(experts)], dtype=torch.int32)
        rows = torch.arange(int(counts.sum()), dtype=torch.int32) % n
        hidden = torch.randn(n, config.hidden_size).to(place, dtype)
        out = torch.empty_like(hidden)
        work = counts.to(place), rows.to(place), torch.ones(len(rows), device=place), out
        times = []
        for _ in range(_TRIES):
            device.synchronize(device.record())
            start = clock()
            model.serve(layer, hidden, *work)
            device.synchronize(device.record())
            times.append(clock() - start)
        return min(times)

    return seconds
