"""One `asapctl selftest` put together: plans, checkpoint, ranks, model, report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.errors import RunError, UsageError
from engine.launch.checks import plan_of
from engine.launch.signals import import_torch
from engine.selftest.report import Report
from engine.topology.load import DEFAULT_TOPOLOGY, TopologyError, load_topology
from engine.topology.ranks import Role
from engine.topology.schema import Topology

if TYPE_CHECKING:
    from engine.launch.plan import Plan

MESSAGES = 10_000
_MOST_WINDOW = 4096
# Small, so that a few short prompts make several batches, and a batch several tiles.
_TILE, _LEAST_BATCH, _MOST_BATCH = 64, 128, 256
_LONGEST = 512
# Experts of the small model where the topology says "auto", which takes no more ranks than that.
_AUTO_EXPERTS, _AUTO_EXPERTS_ON_DEVICES = 8, 64


class Options(msgspec.Struct, frozen=True):
    """What the user asked for; `messages` over all pairs, and how long one may take to come back.

    entries: what the ranks run in place of a self-test's own.
    """

    topology: str = DEFAULT_TOPOLOGY
    overrides: tuple[str, ...] = ()
    messages: int = MESSAGES
    stall_s: float = 60.0
    entries: Mapping[Role, str] | None = None


class Watcher(Protocol):
    """Whoever shows the run to the user."""

    def note(self, text: str) -> None: ...

    def step(self, text: str) -> None:
        """What is going on; often the same as before."""


def run_selftest(options: Options, watcher: Watcher) -> Report:
    """Everything; what failed is in the report. Raises UsageError where the topology cannot run
    here, with the plan's own messages.
    """
    start = time.monotonic()
    import_torch()
    from engine.selftest.checkpoint import write_small_checkpoint

    try:
        loaded = load_topology(options.topology, options.overrides)
    except TopologyError as error:
        loaded = error.usable  # what else is wrong is said along with it
    if loaded.is_paced:
        raise UsageError(
            f"{loaded.where('attention', 'device')}: paced ranks wait instead of computing, so "
            "there is nothing to check; take a topology whose ranks compute"
        )
    with tempfile.TemporaryDirectory(prefix="asapctl-selftest-") as folder:
        model_dir = Path(folder)
        try:
            write_small_checkpoint(model_dir, _expert_ranks(loaded), _members(loaded))
        except OSError as error:
            raise UsageError(
                f"{folder}: a small checkpoint cannot be written: {error.strerror}; give another "
                "folder with TMPDIR"
            ) from None
        plan = _plan(options, model_dir, _window(loaded))
        small = _plan(options, model_dir, _small(loaded))
        report = _begin(plan)
        for note in report.notes:
            watcher.note(note)
        _try_all(options, plan, small, report, watcher.step)
    report.seconds = round(time.monotonic() - start, 2)
    return report


def _try_all(
    options: Options, plan: Plan, small: Plan, report: Report, on_step: Callable[[str], None]
) -> None:
    from engine.selftest.model import try_model
    from engine.selftest.pairs import ENTRIES, try_ranks

    try:
        try_ranks(
            plan,
            report,
            options.messages,
            options.stall_s,
            on_step,
            options.entries or ENTRIES,
        )
        try_model(small, report, small.topology.schedule.stall_timeout_s + options.stall_s, on_step)
    except RunError as error:
        report.failures.append(str(error))


def _begin(plan: Plan) -> Report:
    config = plan.config
    return Report(
        topology=plan.topology.source,
        model=(
            f"small and random: {config.architecture}, {config.layers} layers, "
            f"{config.experts} experts, hidden size {config.hidden_size}"
        ),
        dtype=plan.dtype,
        transport=plan.transport,
        groups=plan.groups,
        tensor_parallel=plan.tensor_parallel,
        expert_ranks=len(plan.experts),
        window_tokens=plan.window_tokens,
        window_bytes=plan.windows[0].rows_bytes,
        notes=list(plan.notes),
    )


def _plan(options: Options, model_dir: Path, changes: Sequence[str]) -> Plan:
    limits = f"model.max_model_len={_LONGEST}"
    return plan_of(
        options.topology, [*options.overrides, "instances.count=1", limits, *changes], model_dir
    )


def _window(topology: Topology) -> list[str]:
    """The topology's own, or a smaller one that does not take long to fill."""
    asked = topology.comm.window_tokens
    tokens = topology.schedule.max_batch_tokens if asked == "auto" else asked
    return [f"comm.window_tokens={_MOST_WINDOW}"] if tokens > _MOST_WINDOW else []


def _small(topology: Topology) -> list[str]:
    return [
        f"comm.window_tokens={_TILE * _members(topology)}",
        f"schedule.min_batch_tokens={_LEAST_BATCH}",
        f"schedule.max_batch_tokens={_MOST_BATCH}",
    ]


def _members(topology: Topology) -> int:
    return topology.attention.tensor_parallel


def _expert_ranks(topology: Topology) -> int:
    ranks, device = topology.experts.ranks, topology.experts.kind
    if ranks != "auto":
        return ranks
    return _AUTO_EXPERTS if device == "cpu" else _AUTO_EXPERTS_ON_DEVICES
