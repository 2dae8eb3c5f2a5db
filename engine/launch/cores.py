"""Where two ranks stand for one device, the core that they share."""

import os

from engine.launch.plan import Plan
from engine.topology.ranks import RankId


def core_of(plan: Plan, instance: int, id_: RankId) -> int | None:
    """The only core that the rank may run on; None: any.

    Attention rank i and expert rank i of a colocated policy have one device's share of the machine
    and never more. With more of them than cores, or ranks that only wait, cores are no devices.
    """
    ranks = len(plan.experts)
    cores = sorted(os.sched_getaffinity(0))
    schedule = plan.topology.schedule
    if not schedule.is_colocated or plan.topology.is_paced or plan.instances * ranks > len(cores):
        return None
    return cores[instance * ranks + id_.rank]
