"""What node 0 and the agents of the other nodes tell each other: typed msgpack, as all control."""

from typing import TypeAlias

import msgspec

from engine.topology.ranks import RankId
from engine.worker.spec import PeerSpec, RankSpec


class Death(msgspec.Struct, frozen=True):
    """A rank's process ended. batch: what it was computing, None when nothing. work_items: how many
    it had finished in this life.
    """

    instance: int
    id: RankId
    pid: int
    reason: str
    batch: int | None
    work_items: int


# --- agent -> node 0 -------------------------------------------------------------------------


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """fingerprint: what all nodes must agree on. bells: where each rank of this node will listen in
    its first life, by instance and rank.
    """

    node_rank: int
    address: str
    fingerprint: dict[str, str]
    bells: list[tuple[int, RankId, str]]


class RankExited(msgspec.Struct, frozen=True, tag=True):
    """bell: where its next life will listen."""

    death: Death
    bell: str


class NodeLeaves(msgspec.Struct, frozen=True, tag=True):
    """This node ends, and why."""

    reason: str


# --- node 0 -> agent -------------------------------------------------------------------------


class NodeWelcome(msgspec.Struct, frozen=True, tag=True):
    """max_model_len: as node 0 has decided."""

    max_model_len: int


class NodeRefused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class StartRank(msgspec.Struct, frozen=True, tag=True):
    instance: int
    spec: RankSpec


class TellPeer(msgspec.Struct, frozen=True, tag=True):
    """The rank `id` is to hear of another life of a peer."""

    instance: int
    id: RankId
    peer: PeerSpec


class EndRank(msgspec.Struct, frozen=True, tag=True):
    instance: int
    id: RankId


class EndNode(msgspec.Struct, frozen=True, tag=True):
    """The launch is over; reason: what it failed of, None when it did not."""

    reason: str | None = None


# --- both ways -------------------------------------------------------------------------------


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Still here."""


Order: TypeAlias = (
    NodeHello
    | RankExited
    | NodeLeaves
    | NodeWelcome
    | NodeRefused
    | StartRank
    | TellPeer
    | EndRank
    | EndNode
    | Beat
)

BEAT_S = 1.0


def reason_of(error: BaseException) -> str:
    """Why a node ends, for the others."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    if isinstance(error, SystemExit):
        return "it was told to end"
    return str(error) or type(error).__name__


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Order)


def decode(data: bytes) -> Order:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)
