"""What ranks compute on and what carries the payload between them; resolves "auto"."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.launch.accelerators import Kind
from engine.topology.ranks import Role
from engine.topology.schema import Topology

Transport: TypeAlias = Literal["shm", "gloo", "nccl", "hccl"]
Backend: TypeAlias = Literal["gloo", "nccl", "hccl"]

# The process groups that carry tensors of a device.
BACKENDS: dict[Kind, Backend] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
# The transports that need one kind of device at both ends; the others take any.
ENDS: dict[str, Kind] = {"nccl": "cuda", "hccl": "npu"}


@dataclass(frozen=True)
class Wiring:
    """attention, experts: what their ranks compute on. Memory in bytes, of one communicator at one
    end: between an attention rank and an expert rank (each pair has two, one a direction), and of
    a tensor-parallel group. paced: ranks wait instead of computing, and have no weights.
    """

    transport: Transport = "shm"
    attention: Kind = "cpu"
    experts: Kind = "cpu"
    tensor_parallel: int = 1
    communicator_bytes: int = 0
    team_bytes: int = 0
    paced: bool = False

    @property
    def on_device(self) -> bool:
        """Whether windows and communicators lie in the memory of devices."""
        return self.transport in ENDS

    @property
    def collectives(self) -> Backend | None:
        """What carries the sums of a tensor-parallel group; None: there are none."""
        return BACKENDS[self.attention] if self.tensor_parallel > 1 else None

    def kind(self, role: Role) -> Kind:
        return self.attention if role == "attention" else self.experts


def resolve_wiring(topology: Topology, nnodes: int = 1) -> Wiring:
    """As the topology has it; nothing is known yet of communicators."""
    attention, experts = topology.attention.kind, topology.experts.kind
    transport = topology.comm.transport
    if transport == "auto":
        transport = _transport_between(attention, experts, nnodes)
    return Wiring(
        transport, attention, experts, topology.attention.tensor_parallel, paced=topology.is_paced
    )


def wiring_problems(topology: Topology, nnodes: int = 1) -> list[str]:
    """A transport between devices, or nodes, that it cannot reach."""
    transport = topology.comm.transport
    if transport == "shm" and nnodes > 1:
        return [
            f"{topology.where('comm', 'transport')}: shm ends at one node, and this launch has "
            f'{nnodes}; take "auto" or "gloo"'
        ]
    end = ENDS.get(transport)
    sides = {"attention": topology.attention.device, "experts": topology.experts.device}
    wrong = [f"[{side}] device is {device}" for side, device in sides.items() if device != end]
    if end is None or not wrong:
        return []
    others = '"auto", "shm" or "gloo"' if nnodes == 1 else '"auto" or "gloo"'
    return [
        f"{topology.where('comm', 'transport')}: {transport} connects {end} devices only, and "
        f'{" and ".join(wrong)}; take {others}, or set both devices to "{end}"'
    ]


def _transport_between(attention: Kind, experts: Kind, nnodes: int) -> Transport:
    if attention == experts == "cuda":
        return "nccl"
    if attention == experts == "npu":
        return "hccl"
    return "shm" if nnodes == 1 else "gloo"
