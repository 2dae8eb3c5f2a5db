"""What the ranks of a self-test do alike: their start, and their answers to orders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import zmq

from engine.comm.attention_side import AttentionSide
from engine.comm.expert_side import ExpertSide
from engine.device.base import Device
from engine.errors import RunError
from engine.model.config import load_config
from engine.selftest.messages import Here, Operators, Orders, TryOperators
from engine.selftest.operators import try_operators
from engine.selftest.traffic import Traffic
from engine.worker.opening import close_windows, listening, peers_of, transport_of
from engine.worker.spec import RankSpec

Side = TypeVar("Side", AttentionSide, ExpertSide)

# Problems that a rank tells of; after that many, more would say nothing new.
MOST_PROBLEMS = 3
_WARM_UP_S = 0.5
# Beside the time that communicators have: the others may still be starting.
_START_S = 120.0


@dataclass(frozen=True, eq=False)
class Rank:
    """What a rank is given, and has opened."""

    spec: RankSpec
    device: Device
    orders: Orders
    dtype: torch.dtype
    layers: int

    def traffic(self, expert: int, device: torch.device) -> Traffic:
        peers = {peer.id.rank: peer.shape for peer in self.spec.peers}
        # The windows of an expert rank have one shape, whoever the attention rank is.
        shape = peers[expert] if self.spec.id.role == "attention" else self.spec.peers[0].shape
        return Traffic(shape, expert, self.layers, self.dtype, device)

    def warm_up(self, endpoint: AttentionSide | ExpertSide) -> None:
        """Returns when every peer has been heard of, and says so. RunError: one has not."""
        deadline = time.monotonic() + self.spec.connect_timeout_s + _START_S
        while cold := endpoint.warm_up(_WARM_UP_S):
            if time.monotonic() > deadline:
                raise RunError(f"nothing was heard of {', '.join(map(str, cold))}")
        self.orders.answer(Here(self.device.name()))

    def obey(self, order: object) -> None:
        """What every rank is told."""
        if not isinstance(order, TryOperators):
            raise RunError(f"{self.spec.id} cannot do this: {order}")
        self.orders.answer(Operators(try_operators(self.device.torch, self.dtype)))


@contextmanager
def opened(
    spec: RankSpec, device: Device, windows: list[int], kind: type[Side]
) -> Iterator[tuple[Rank, Side]]:
    """The rank, and its endpoint as `engine.worker` opens it."""
    dtype = getattr(torch, spec.agreement.dtype)
    layers = load_config(Path(spec.model_dir)).layers
    with zmq.Context() as context, listening(spec, context, windows) as ear:
        orders = Orders(context, spec.controller, spec.id)
        try:
            endpoint = kind(
                spec.id,
                ear,
                peers_of(spec, windows),
                transport_of(spec, dtype, device),
                dtype,
                layers,
                spec.shard.size,
                context,
            )
            try:
                close_windows(windows)
                yield Rank(spec, device, orders, dtype, layers), endpoint
            finally:
                endpoint.close()
        finally:
            orders.close()
