"""From a topology and a model to what exactly will run here, or every reason why it cannot."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from engine.comm.layout import WindowShape
from engine.errors import UsageError
from engine.launch.accelerators import Accelerators, Kind, Slot, mask_environment
from engine.launch.budget import Limits, RankPlan
from engine.launch.machine import Machine, read_machine
from engine.launch.model_dir import is_config_only
from engine.launch.planner import Planner
from engine.launch.resources import Assume, Resources
from engine.launch.wiring import Transport
from engine.model.architecture import ModelConfig
from engine.model.config import load_config
from engine.topology.schema import Topology

_SHOWN_TENSORS = 20


@dataclass(frozen=True)
class Plan:
    """An instance that can run here. Nothing is "auto" any more, in `topology` neither.

    groups: of `tensor_parallel` ranks each; rank g * tensor_parallel + m is member m of group g.
    experts: the experts of each expert rank. window_tokens: most tokens of one dispatch of a group.
    windows: the shape of the windows from an attention rank to each expert rank; their rows are
    the most that one member has of a dispatch. ranks: attention first. environment: what every
    rank's process has to have set before it opens its device, besides its mask (`environment_of`).
    limits, memory_needed (of the host), memory_available: in bytes.
    config_only: there are no weights, so that it can be looked at, and not run. assumed: devices
    and the host's memory were not looked at.
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
    config_only: bool = False
    assumed: bool = False

    def environment_of(self, device: Slot | None) -> dict[str, str]:
        """What a rank on `device` has to have set, its mask included."""
        return {**self.environment, **mask_environment(device)}


def make_plan(
    topology: Topology,
    model_dir: Path,
    keep_kv: bool = False,
    machine: Machine | None = None,
    accelerators: Mapping[Kind, Accelerators] | None = None,
    assume: Assume = "nothing",
) -> Plan:
    """keep_kv: prompts' caches will be exported, so that all layers of them are kept in memory.
    machine, accelerators: what there is; by default what is found.

    Raises UsageError with every problem, one a line.
    """
    config = load_config(model_dir)
    resources = Resources(topology, machine or read_machine(), accelerators, assume)
    planner = Planner(topology, config, keep_kv, resources)
    layout = planner.choose_layout()
    longest = planner.choose_longest(layout)
    slots = resources.slots(layout)
    config_only = is_config_only(model_dir)
    problems = resources.problems + planner.problems
    problems += [] if config_only else _audit(model_dir, config)
    if problems or layout is None or longest is None:
        raise UsageError("\n".join(problems))

    from engine.model.checkpoint import model_hash

    environment, about_it = resources.environment(layout)
    notes = [*planner.notes, *resources.notes, *about_it]
    if config_only:
        notes.append("there is only a config of this model: weights were not looked at")
    return Plan(
        topology=planner.resolved(layout, longest),
        config=config,
        model_dir=model_dir,
        model_hash="" if config_only else model_hash(model_dir),
        dtype=planner.dtype,
        max_model_len=longest,
        transport=layout.wiring.transport,
        groups=layout.groups,
        tensor_parallel=layout.members,
        experts=layout.experts,
        lanes=topology.schedule.lanes,
        window_tokens=layout.window_tokens,
        windows=layout.windows,
        ranks=tuple(
            replace(rank, device=slot)
            for rank, slot in zip(layout.ranks(longest), slots, strict=True)
        ),
        environment=environment,
        limits=resources.limits,
        memory_needed=layout.host_bytes(longest),
        memory_available=resources.limits.host,
        machine=resources.machine,
        notes=tuple(notes),
        config_only=config_only,
        assumed=assume != "nothing",
    )


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
