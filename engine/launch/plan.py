"""From a topology and a model to what exactly will run here, or every reason why it cannot."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine import __version__
from engine.comm.layout import WindowShape
from engine.errors import UsageError
from engine.launch.accelerators import Accelerators, Kind, Slot, mask_environment
from engine.launch.budget import Limits, RankPlan
from engine.launch.fabric import agreed
from engine.launch.machine import Machine, read_machine
from engine.launch.model_dir import is_config_only
from engine.launch.pacing import Pacing, read_pacing
from engine.launch.planner import Planner
from engine.launch.resources import Assume, NodeView, Resources
from engine.launch.wiring import BACKENDS, Transport
from engine.model.architecture import ModelConfig
from engine.model.config import load_config
from engine.topology.nodes import Placement
from engine.topology.ranks import RankId
from engine.topology.schema import Topology

_SHOWN_TENSORS = 20


@dataclass(frozen=True)
class Plan:
    """What can run here: instances, all alike, or of several nodes' this node's part of them.
    Nothing is "auto" any more, in `topology` neither.

    groups: of `tensor_parallel` ranks each; rank g * tensor_parallel + m is member m of group g.
    experts: the experts of each expert rank. window_tokens: most tokens of one dispatch of a group.
    windows: the shape of the windows from an attention rank to each expert rank; their rows are
    the most that one member has of a dispatch. ranks: of one instance, attention first; on another
    node, without a device. environment: what every rank's process on this node has to have set
    before it opens its device, besides its mask (`environment_of`).
    limits, memory_needed (of the host), memory_available: in bytes, of this node.
    placement: which rank is on which node. here: the ranks on this one, each with its instance and
    its device (`device_of`). address: this node's own, as the others reach it; empty with one node.
    asked_longest: max_model_len before it was decided. keep_kv: caches of prompts will be exported.
    config_only: there are no weights, so that it can be looked at, and not run. assumed: devices
    and the host's memory were not looked at.
    pacing: how ranks wait that do not compute; weights then do not count.
    notes: what was decided, or is worth knowing, in sentences.
    """

    topology: Topology
    config: ModelConfig
    model_dir: Path
    model_hash: str
    dtype: str
    max_model_len: int
    transport: Transport
    groups: int
    tensor_parallel: int
    experts: tuple[range, ...]
    lanes: int
    window_tokens: int
    windows: tuple[WindowShape, ...]
    ranks: tuple[RankPlan, ...]
    environment: dict[str, str]
    limits: Limits
    memory_needed: int
    memory_available: int
    machine: Machine
    notes: tuple[str, ...]
    placement: Placement
    here: tuple[tuple[int, RankPlan], ...]
    asked_longest: int | Literal["auto"] = "auto"
    keep_kv: bool = False
    instances: int = 1
    nnodes: int = 1
    node_rank: int = 0
    address: str = ""
    config_only: bool = False
    assumed: bool = False
    pacing: Pacing | None = None

    @property
    def senders(self) -> int:
        """How many attention ranks dispatch together, and live and die together: those of a group,
        or in lockstep all of them.
        """
        ranks = self.groups * self.tensor_parallel
        return ranks if self.topology.schedule.in_lockstep else self.tensor_parallel

    @property
    def paced(self) -> str | None:
        """What has to be said beside all figures, where ranks wait instead of computing."""
        return None if self.pacing is None else self.pacing.note

    def environment_of(self, device: Slot | None) -> dict[str, str]:
        """What a rank on `device` has to have set, its mask included."""
        return {**self.environment, **mask_environment(device)}

    def device_of(self, instance: int, rank: RankId) -> Slot | None:
        """The device of a rank on this node, whichever its incarnation; None: it has the CPU.
        Raises ValueError for a rank of another node.
        """
        for where, plan in self.here:
            if (where, plan.id.role, plan.id.rank) == (instance, rank.role, rank.rank):
                return plan.device
        raise ValueError(f"{rank} of instance {instance} is not on node {self.node_rank}")

    def fingerprint(self) -> dict[str, str]:
        """What nodes must agree on, by names for people. The longest prompt is not in it where node
        0 decides (`refusal`).
        """
        config, topology, schedule = self.config, self.topology, self.topology.schedule
        backends = {self.transport}
        if self.tensor_parallel > 1:
            backends.add(BACKENDS[topology.attention.kind])
        values: dict[str, object] = {
            "version of asapctl": __version__,
            "number of nodes": self.nnodes,
            "[instances] count": self.instances,
            "model": config.architecture,
            "hash of the model": self.model_hash,
            "layers": config.layers,
            "hidden size": config.hidden_size,
            "experts": config.experts,
            "experts a token": config.top_k,
            "[model] dtype": self.dtype,
            "[model] max_model_len": self.asked_longest,
            "[attention] groups": self.groups,
            "[attention] tensor_parallel": self.tensor_parallel,
            "[attention] device": topology.attention.device,
            "[attention] overlap": topology.attention.overlap,
            "[experts] ranks": len(self.experts),
            "[experts] device": topology.experts.device,
            "[comm] transport": self.transport,
            "[comm] window_tokens": self.window_tokens,
            "[comm] connect_timeout_s": topology.comm.connect_timeout_s,
            "[comm] node_timeout_s": topology.comm.node_timeout_s,
            "[paced] hardware, and its times": None if self.pacing is None else self.pacing.mark,
            "[schedule] policy": schedule.policy,
            "[schedule] lanes": self.lanes,
            "[schedule] min_batch_tokens": schedule.min_batch_tokens,
            "[schedule] max_batch_tokens": schedule.max_batch_tokens,
            "[schedule] exclusive_tokens": schedule.exclusive_tokens,
            "[schedule] chunk_tokens": schedule.chunk_tokens,
            "[serve] kv_dir is set": self.keep_kv,
            "ranks of each node": _shown(self.placement),
            **agreed({**os.environ, **self.environment}, backends),
        }
        return {name: str(value) for name, value in values.items()}

    def refusal(self, longest: int) -> str | None:
        """Why this node cannot have prompts of up to `longest` tokens, which node 0 has decided."""
        if longest <= self.max_model_len:
            return None
        return (
            f"node {self.node_rank} has room for prompts of up to {self.max_model_len} tokens, and "
            f"node 0 has decided for {longest}; set [model] max_model_len to {self.max_model_len}"
        )


def make_plan(
    topology: Topology,
    model_dir: Path,
    keep_kv: bool = False,
    machine: Machine | None = None,
    accelerators: Mapping[Kind, Accelerators] | None = None,
    assume: Assume = "nothing",
    node: NodeView | None = None,
) -> Plan:
    """keep_kv: prompts' caches will be exported, so that all layers of them are kept in memory.
    machine, accelerators: what there is; by default what is found. node: which one of several this
    is, whose memory and devices alone are looked at; by default the only one.

    Raises UsageError with every problem, one a line.
    """
    config = load_config(model_dir)
    node = node or NodeView()
    resources = Resources(topology, machine or read_machine(), accelerators, assume, node)
    planner = Planner(topology, config, keep_kv, resources)
    layout = planner.choose_layout()
    longest = planner.choose_longest(layout)
    slots = resources.slots(layout)
    problems = resources.problems + planner.problems
    pacing = None
    try:
        pacing = read_pacing(topology)
    except UsageError as error:
        problems += str(error).splitlines()
    if topology.is_paced and keep_kv:
        problems.append(
            f"{topology.where('attention', 'device')}: paced ranks have no KV caches; remove "
            "[serve] kv_dir or --kv-dir"
        )
    has_weights = not topology.is_paced and not is_config_only(model_dir)
    problems += _audit(model_dir, config) if has_weights else []
    if problems or layout is None or longest is None:
        raise UsageError("\n".join(problems))

    from engine.model.checkpoint import model_hash

    environment, about_it = resources.environment(layout)
    notes = [*planner.notes, *resources.notes, *about_it]
    config_only = not has_weights and pacing is None
    if pacing is not None:
        notes.insert(0, pacing.note)
    if config_only:
        notes.append("there is only a config of this model: weights were not looked at")
    placement = planner.placement(layout.groups, len(layout.experts))
    here = tuple(
        (instance, replace(rank, device=slot))
        for (instance, rank), slot in zip(layout.here(longest), slots, strict=True)
    )
    # Of the first instance that is here: the others' devices are in `here`.
    seen = {rank.id: rank for instance, rank in reversed(here) if instance == here[0][0]}
    return Plan(
        topology=planner.resolved(layout, longest),
        config=config,
        model_dir=model_dir,
        model_hash="" if config_only else model_hash(model_dir, has_weights),
        dtype=planner.dtype,
        max_model_len=longest,
        transport=layout.wiring.transport,
        groups=layout.groups,
        tensor_parallel=layout.members,
        experts=layout.experts,
        lanes=planner.topology.schedule.lanes,
        window_tokens=layout.window_tokens,
        windows=layout.windows,
        ranks=tuple(seen.get(rank.id, rank) for rank in layout.ranks(longest)),
        environment=environment,
        limits=resources.limits,
        memory_needed=layout.host_bytes(longest),
        memory_available=resources.limits.host,
        machine=resources.machine,
        notes=tuple(notes),
        placement=placement,
        here=here,
        asked_longest=topology.model.max_model_len,
        keep_kv=keep_kv,
        instances=placement.instances,
        nnodes=node.nnodes,
        node_rank=node.node_rank,
        address=node.address if node.nnodes > 1 else "",
        config_only=config_only,
        assumed=assume != "nothing",
        pacing=pacing,
    )


def _shown(placement: Placement) -> str:
    """Such as `attention 0, attention 1 | expert 0`."""
    return " | ".join(", ".join(map(str, ranks)) for ranks in placement.layout)


def _audit(model_dir: Path, config: ModelConfig) -> list[str]:
    from engine.model.checkpoint import Checkpoint, audit

    try:
        problems = audit(Checkpoint(model_dir), config)
    except UsageError as error:
        return [str(error)]
    if len(problems) > _SHOWN_TENSORS:
        more = len(problems) - _SHOWN_TENSORS
        problems = [*problems[:_SHOWN_TENSORS], f"{model_dir}: {more} more problems like these"]
    return problems
