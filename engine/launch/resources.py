"""What a plan may count on: the machine's memory and devices, and the environment of ranks."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from engine.errors import UsageError
from engine.launch.accelerators import (
    Accelerators,
    Kind,
    Slot,
    assign,
    assumed,
    read_accelerators,
)
from engine.launch.budget import Layout, Limits, show_device_bytes
from engine.launch.fabric import communicator_bytes, plan_environment
from engine.launch.machine import Machine
from engine.launch.wiring import resolve_wiring
from engine.topology.ranks import Role
from engine.topology.schema import Topology

# What is taken to be there without looking: nothing; the devices (and host memory) that the
# topology asks for; or all that anybody could want, to look for other problems only.
Assume: TypeAlias = Literal["nothing", "devices", "everything"]

UNLIMITED = 2**62
ROLES: tuple[Role, Role] = ("attention", "expert")
_SECTIONS: dict[Role, str] = {"attention": "attention", "expert": "experts"}


@dataclass(frozen=True)
class NodeView:
    """Which of a launch's nodes this is. address: its own, as the others reach it; empty where that
    is not known yet.
    """

    nnodes: int = 1
    node_rank: int = 0
    address: str = ""


class Resources:
    """`limits` is the memory there is. `problems` and `notes` are for the user."""

    def __init__(
        self,
        topology: Topology,
        machine: Machine,
        accelerators: Mapping[Kind, Accelerators] | None = None,
        assume: Assume = "nothing",
        node: NodeView | None = None,
    ) -> None:
        """accelerators: what there is of each kind; kinds that it lacks are looked for here."""
        self.topology = topology
        self.machine = machine
        self.assume = assume
        self.node = node or NodeView()
        self.wiring = resolve_wiring(topology, self.node.nnodes)
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._accelerators = self._found(accelerators or {})
        self.limits = Limits(
            machine.memory_bytes if assume == "nothing" else UNLIMITED,
            *(self._device_memory(role) for role in ROLES),
        )
        self._environments: dict[tuple[int, int], tuple[dict[str, str], list[str]]] = {}

    @property
    def instances(self) -> int:
        return self.topology.instances.count

    def places(self, kind: Kind) -> int:
        """How many ranks can compute at the same time: cores, or devices that are visible."""
        return self.machine.cores if kind == "cpu" else len(self._accelerators[kind].visible)

    def slots(self, layout: Layout | None) -> tuple[Slot | None, ...]:
        """A device for each rank on this node, in the order of `Layout.here`; a problem when there
        are too few.
        """
        if layout is None:
            return ()
        kinds = [self.wiring.kind(rank.id.role) for _, rank in layout.here(1)]
        accelerators = self._accelerators
        if self.assume != "nothing":
            accelerators = {kind: assumed(kind, kinds.count(kind), None) for kind in accelerators}
        try:
            return assign(kinds, accelerators)
        except UsageError as error:
            source = self.topology.source
            self.problems += [f"{source}: {line}" for line in str(error).splitlines()]
            self.problems[-1] += "; `asapctl check --assume-devices` plans for another machine"
            return ()

    def wired(self, layout: Layout) -> Layout:
        """The layout, with what its communicators take."""
        environment, _ = self.environment(layout)
        ours = {**os.environ, **environment}
        transport, team = self.wiring.transport, self.wiring.collectives
        try:
            wiring = replace(
                self.wiring,
                communicator_bytes=communicator_bytes(transport, ours),
                team_bytes=communicator_bytes(team, ours) if team else 0,
            )
        except UsageError as error:
            self._problem(str(error))
            return layout
        return replace(layout, wiring=wiring)

    def environment(self, layout: Layout) -> tuple[dict[str, str], list[str]]:
        """What to set in each rank's process, and notes about it."""
        key = sum(layout.processes_here.values()), layout.message_bytes
        if key not in self._environments:
            ranks, window_bytes = key
            try:
                self._environments[key] = plan_environment(
                    transport=self.wiring.transport,
                    collectives=self.wiring.collectives,
                    ranks=ranks,
                    window_bytes=window_bytes,
                    connect_timeout_s=self.topology.comm.connect_timeout_s,
                    load_bytes=max(rank.weights_bytes for rank in layout.ranks(1)),
                    address=self.node.address if self.node.nnodes > 1 else None,
                )
            except UsageError as error:
                self._problem(str(error))
                self._environments[key] = {}, []
        return self._environments[key]

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def _found(self, accelerators: Mapping[Kind, Accelerators]) -> dict[Kind, Accelerators]:
        found = dict(accelerators)
        for kind in {self.wiring.attention, self.wiring.experts} - {"cpu"} - found.keys():
            try:
                found[kind] = read_accelerators(kind)
            except UsageError as error:
                if self.assume == "nothing":
                    self._problem(str(error))
                found[kind] = assumed(kind, 0, None)
        return found

    def _device_memory(self, role: Role) -> int | None:
        """Bytes of one device of that side; None on the CPU."""
        kind = self.wiring.kind(role)
        if kind == "cpu":
            return None
        if self.assume == "everything":
            return UNLIMITED
        section = _SECTIONS[role]
        given: float | None = getattr(self.topology, section).device_memory_gb
        there = self._accelerators[kind]
        if given is not None:
            asked = int(given * 1e9)
            if self.assume == "nothing" and there.memory_bytes and there.memory_bytes < asked:
                self.notes.append(
                    f"[{section}] device_memory_gb is {given:g}, and a {kind} device here has "
                    f"{show_device_bytes(there.memory_bytes)}: that is what counts"
                )
                return there.memory_bytes
            return asked
        if there.memory_bytes is None and (there.visible or self.assume == "devices"):
            self._problem(
                f"{self.topology.where(section, 'device_memory_gb')}: how much memory a {kind} "
                "device has is not known here; set it, in 10^9 bytes"
            )
        return there.memory_bytes or UNLIMITED
