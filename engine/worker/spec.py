"""What a rank process is told at its start, as one msgpack struct."""

import msgspec

from engine.comm.layout import WindowShape
from engine.control.messages import Agreement
from engine.topology.ranks import RankId


class PeerSpec(msgspec.Struct, frozen=True):
    """A rank of the other role; its window is the file descriptor at the same index."""

    id: RankId
    bell: str
    shape: WindowShape


class RankSpec(msgspec.Struct, frozen=True):
    """bell: the address that this rank listens on. experts: [start, stop) of each expert rank."""

    id: RankId
    model_dir: str
    agreement: Agreement
    controller: str
    bell: str
    peers: list[PeerSpec]
    experts: list[tuple[int, int]]
    threads: int = 1
