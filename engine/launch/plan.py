"""From a topology and a model to what exactly will run here, or every reason why it cannot."""

from dataclasses import dataclass
from pathlib import Path

from engine.comm.layout import WindowShape
from engine.errors import UsageError
from engine.launch.budget import RankPlan
from engine.launch.machine import Machine, read_machine
from engine.launch.planner import Planner
from engine.model.architecture import ModelConfig
from engine.model.config import load_config
from engine.topology.schema import Topology

_SHOWN_TENSORS = 20


@dataclass(frozen=True)
class Plan:
    """An instance that can run here. Nothing is "auto" any more, in `topology` neither.

    experts: the experts of each expert rank. windows: the shape of the windows to each of them.
    notes: what was decided, or is worth knowing, in sentences. Memory in bytes.
    """

    topology: Topology
    config: ModelConfig
    model_dir: Path
    model_hash: str
    dtype: str
    max_model_len: int
    groups: int
    experts: tuple[range, ...]
    lanes: int
    window_tokens: int
    windows: tuple[WindowShape, ...]
    ranks: tuple[RankPlan, ...]
    memory_needed: int
    memory_available: int
    machine: Machine
    notes: tuple[str, ...]


def make_plan(
    topology: Topology,
    model_dir: Path,
    keep_kv: bool = False,
    machine: Machine | None = None,
) -> Plan:
    """keep_kv: prompts' caches will be exported, so that all layers of them are kept in memory.

    Raises UsageError with every problem, one a line.
    """
    config = load_config(model_dir)
    planner = Planner(topology, config, keep_kv, machine or read_machine())
    layout = planner.choose_layout()
    longest = planner.choose_longest(layout)
    problems = planner.problems + _audit(model_dir, config)
    if problems or layout is None or longest is None:
        raise UsageError("\n".join(problems))

    from engine.model.checkpoint import model_hash

    return Plan(
        topology=planner.resolved(layout, longest),
        config=config,
        model_dir=model_dir,
        model_hash=model_hash(model_dir),
        dtype=planner.dtype,
        max_model_len=longest,
        groups=layout.groups,
        experts=layout.experts,
        lanes=topology.schedule.lanes,
        window_tokens=layout.window_tokens,
        windows=layout.windows,
        ranks=layout.ranks(longest),
        memory_needed=layout.total(longest),
        memory_available=planner.machine.memory_bytes,
        machine=planner.machine,
        notes=tuple(planner.notes),
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
