"""What a rank process is told at its start, as one msgpack struct."""

from typing import Literal

import msgspec

from engine.comm.layout import WindowShape
from engine.control.messages import Agreement
from engine.curve import Keys
from engine.hardware.table import Hardware
from engine.topology.ranks import RankId
from engine.topology.shard import Shard


class PeerSpec(msgspec.Struct, frozen=True):
    """A rank of the other role; where there are windows, its own is the file descriptor at the
    same index.
    """

    id: RankId
    bell: str
    shape: WindowShape


class RankSpec(msgspec.Struct, frozen=True):
    """bell: the address that this rank listens on. experts: [start, stop) of each expert rank.

    shard: which member of its group an attention rank is; for an expert rank, only the size of
    groups counts. turns: where each member of the group hears whose turn it is. environment: to be
    set before the device is opened, its mask included. listens: the first descriptor after the
    black box is a socket that is bound at `bell`. keys: of a launch over several nodes. address: of
    this node. hardware: by whose times to wait instead of computing. senders: how many attention
    ranks' dispatches are one work item. core: the only one that this rank may run on.
    find_inflection: the most tokens of a batch, where an expert rank measures from how many on
    they pay.
    """

    id: RankId
    model_dir: str
    agreement: Agreement
    controller: str
    bell: str
    peers: list[PeerSpec]
    experts: list[tuple[int, int]]
    threads: int = 1
    shard: Shard = Shard()
    turns: list[str] = []
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    environment: dict[str, str] = {}
    transport: Literal["shm", "gloo", "nccl", "hccl"] = "shm"
    overlap: bool = True
    connect_timeout_s: float = 300.0
    listens: bool = False
    keys: Keys | None = None
    address: str = "127.0.0.1"
    hardware: Hardware | None = None
    senders: int = 1
    core: int | None = None
    find_inflection: int | None = None
