"""What each shipped topology needs, and whether this machine has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.doctor.facts import Section, Verdict, in_units
from engine.echo import plain
from engine.errors import UsageError
from engine.launch.model_dir import DEMO
from engine.topology.load import load_topology, packaged_topologies

if TYPE_CHECKING:
    from engine.launch.plan import Plan
    from engine.topology.schema import Topology

_LARGE_MODEL = "qwen3-235b-a22b"  # whose config comes with asapctl

# By what a topology asks for: the facts of `software` that have to be "ok", and the remedies.
_SOFTWARE = {
    "cuda": {"CUDA": "install a torch that is built for CUDA, with NCCL"},
    "npu": {
        "torch-npu": "install torch-npu of the same release as torch (pip install asapctl[npu])",
        "CANN": "install CANN, and source its set_env.sh",
    },
    "nccl": {"NCCL": "install a torch that is built for CUDA, with NCCL"},
    "hccl": {"HCCL": "install CANN, and source its set_env.sh"},
    "gloo": {"gloo": "install a torch that is built with gloo"},
}


def judge_all(software: Section) -> tuple[Verdict, ...]:
    """Every packaged topology, with the model that it names; where it names none, with the demo on
    CPUs and with a large one on accelerators.
    """
    return tuple(_judge(name, software) for name in packaged_topologies())


def _judge(name: str, software: Section) -> Verdict:
    try:
        topology = load_topology(name)
    except Exception as error:
        return Verdict(name, "cannot be read", (plain(str(error), 300),))
    on_cpu = _kinds(topology) == {"cpu"}
    needs = ", ".join(
        f"{count} {kind} device" + ("s" if count > 1 else "") for kind, count in _wanted(topology)
    )
    torch = software.find("torch")
    if torch is None or torch.state != "ok":
        return Verdict(name, needs or "torch", ("torch cannot be imported",), on_cpu)
    model = None if on_cpu or topology.model.path != DEMO else _LARGE_MODEL
    gaps: list[str] = []
    try:
        needs = _describe(_plan(name, model, assume_devices=True))
    except Exception:  # the same is said below
        pass
    try:
        plan = _plan(name, model)
        transport: str = plan.transport
    except UsageError as error:
        gaps += [line.removeprefix(f"{topology.source}: ") for line in str(error).splitlines()]
        transport = topology.comm.transport
    except Exception as error:
        gaps.append(plain(str(error) or type(error).__name__, 300))
        transport = topology.comm.transport
    gaps += _missing_software({*_kinds(topology), transport, *_teams(topology)}, software)
    return Verdict(name, needs, tuple(gaps), on_cpu)


def _plan(name: str, model: str | None, assume_devices: bool = False) -> Plan:
    from engine.launch.checks import plan_of

    return plan_of(name, [], model, only_to_look=True, assume_devices=assume_devices)


def _kinds(topology: Topology) -> set[str]:
    return {topology.attention.kind, topology.experts.kind}


def _teams(topology: Topology) -> Iterator[str]:
    """The backend of tensor-parallel groups."""
    if topology.attention.tensor_parallel > 1:
        yield {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[topology.attention.kind]


def _wanted(topology: Topology) -> list[tuple[str, int]]:
    """Devices by kind, without a plan: where numbers are left to asapctl, one."""
    groups, ranks = topology.attention.groups, topology.experts.ranks
    counts: Counter[str] = Counter()
    counts[topology.attention.kind] += (
        1 if groups == "auto" else groups
    ) * topology.attention.tensor_parallel
    counts[topology.experts.kind] += 1 if ranks == "auto" else ranks
    return sorted((kind, count) for kind, count in counts.items() if kind != "cpu")


def _describe(plan: Plan) -> str:
    devices: dict[str, list[int]] = {}
    for rank in plan.ranks:
        if rank.device is not None:
            devices.setdefault(rank.device.kind, []).append(rank.device_bytes)
    parts = [
        f"{len(sizes)} {kind} device{'s' if len(sizes) > 1 else ''} (up to {in_units(max(sizes))} "
        "of each)"
        for kind, sizes in devices.items()
    ]
    parts.append(f"{len(plan.ranks)} ranks, {in_units(plan.memory_needed)} of memory")
    return f"{', '.join(parts)}, with {plan.model_dir.name}"


def _missing_software(wanted: set[str], software: Section) -> list[str]:
    """One line for each remedy, as several things may come with one."""
    gaps = []
    missing: dict[str, list[str]] = {}
    for what, needed in _SOFTWARE.items():
        for name, remedy in needed.items() if what in wanted else ():
            fact = software.find(name)
            if fact is not None and fact.state == "problem":
                gaps.append(f"{name} does not work; see there")
            elif fact is None or fact.state == "absent":
                missing.setdefault(remedy, []).append(name)
    return gaps + [f"no {' and no '.join(names)}; {remedy}" for remedy, names in missing.items()]
