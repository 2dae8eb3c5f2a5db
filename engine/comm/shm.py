"""The shared-memory transport: both ranks map one window, so the payload is there when written."""

from __future__ import annotations

import torch

from engine.comm.channel import Region
from engine.comm.doorbell import Bell
from engine.comm.layout import WindowShape
from engine.comm.primitives import Peer
from engine.comm.windows import Window


class ShmTransport:
    """dtype: the payload's."""

    notices = None
    memory = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def open(self, peer: Peer) -> ShmChannel:
        if peer.fd is None:
            raise ValueError(f"{peer.id} came without a window")
        return ShmChannel(Window(peer.fd, peer.shape, self._dtype))

    def close(self) -> None:
        """Nothing is held beside the channels."""


class ShmChannel:
    connected = True

    def __init__(self, window: Window) -> None:
        self._window = window

    @property
    def shape(self) -> WindowShape:
        return self._window.shape

    def region(self, lane: int, n: int, p: int) -> Region:
        whole = self._window.region(lane)
        return Region(
            hidden=whole.hidden[:n],
            counts=whole.counts,
            row_index=whole.row_index[:p],
            weights=whole.weights[:p],
            out=whole.out[:n],
        )

    def send(self, bell: Bell) -> None:
        """The peer sees what was written."""

    def receive(self, bell: Bell) -> bool:
        return True

    def settle(self, lane: int) -> None:
        """It is here."""

    def close(self) -> None:
        self._window.close()
