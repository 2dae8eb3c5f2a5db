"""`asapctl check`: would this topology run here, and what would run?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asapctl.options import Model, Overrides, Topology

if TYPE_CHECKING:
    from engine.launch.plan import Plan


def check(
    topology: Topology = "cpu",
    model: Model = None,
    overrides: Overrides = None,
    kv_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Plan for KV caches that are written to this folder, as prefill's."
        ),
    ] = None,
    assume_devices: Annotated[
        bool,
        typer.Option(
            "--assume-devices",
            help="As if this machine had the devices, and the memory, that the topology asks for.",
        ),
    ] = False,
    nnodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Plan for one of so many nodes.")
    ] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, metavar="R", help="Which of the nodes this is.")
    ] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON object.")
    ] = False,
) -> None:
    """Check a topology without starting anything.

    Prints the ranks, the experts that each holds and the memory that each needs. All problems are
    reported at once, and then the exit code is 2. With several nodes, memory and devices are one
    node's. The configs of deepseek-v3 and qwen3-235b-a22b come with asapctl, to plan with.

    Example: asapctl check cpu-2a2e --model ~/models/Mixtral-8x7B --set schedule.lanes=3

    Example: asapctl check atlas-a3 --model qwen3-235b-a22b --assume-devices
    """
    from engine.errors import UsageError
    from engine.kv.folder import check_folder
    from engine.launch.checks import Problems, plan_of
    from engine.launch.listen import host_problem
    from engine.launch.resources import NodeView

    if node_rank >= nnodes:
        raise UsageError(
            f"--node-rank {node_rank}: nodes are numbered from 0, so with --nnodes {nnodes} the "
            f"last one is {nnodes - 1}"
        )
    problems = Problems()
    plan = None
    with problems.gathered():
        if kv_dir is not None:
            check_folder(kv_dir)
    with problems.gathered():
        plan = plan_of(
            topology,
            overrides or [],
            model,
            keep_kv=lambda loaded: kv_dir is not None or loaded.serve.kv_dir is not None,
            on_note=lambda note: typer.echo(note, err=True),
            only_to_look=True,
            assume_devices=assume_devices,
            node=NodeView(nnodes, node_rank),
        )
    problems.raise_all()
    assert plan is not None
    notes = list(plan.notes)
    if problem := host_problem(plan.topology):
        notes.append(f"for `asapctl launch`: {problem}")
    if as_json:
        _print_json(plan, notes)
    else:
        _print(plan, notes)


def _print_json(plan: Plan, notes: list[str]) -> None:
    import json

    from asapctl.check_view import homes_of
    from engine.echo import encodable

    homes = homes_of(plan)
    schedule = plan.topology.schedule
    typer.echo(
        json.dumps(
            {
                "topology": encodable(plan.topology.source),
                "model": str(plan.model_dir),
                "architecture": plan.config.architecture,
                "layers": plan.config.layers,
                "experts": plan.config.experts,
                "top_k": plan.config.top_k,
                "dtype": plan.dtype,
                "max_model_len": plan.max_model_len,
                "groups": plan.groups,
                "tensor_parallel": plan.tensor_parallel,
                "lanes": plan.lanes,
                "min_batch_tokens": schedule.min_batch_tokens,
                "max_batch_tokens": schedule.max_batch_tokens,
                "window_tokens": plan.window_tokens,
                "transport": plan.transport,
                "instances": plan.instances,
                "nnodes": plan.nnodes,
                "node_rank": plan.node_rank,
                "environment": {name: encodable(text) for name, text in plan.environment.items()},
                "ranks": [
                    {
                        "rank": str(rank.id),
                        "role": rank.id.role,
                        "node": homes[rank.id],
                        "device": rank.place if homes[rank.id] == plan.node_rank else None,
                        "first_expert": rank.experts.start if rank.experts else None,
                        "experts": len(rank.experts),
                        "weights_bytes": rank.weights_bytes,
                        "windows_bytes": rank.windows_bytes,
                        "working_set_bytes": rank.working_set_bytes,
                        "kv_bytes": rank.kv_bytes,
                        "gathered_kv_bytes": rank.gathered_bytes,
                        "communicators_bytes": rank.communicators_bytes,
                        "driver_bytes": rank.driver_bytes,
                        "process_bytes": rank.process_bytes,
                        "host_bytes": rank.host_bytes,
                        "device_bytes": rank.device_bytes,
                        "device_limit_bytes": plan.limits.device(rank.id.role),
                        "total_bytes": rank.total,
                    }
                    for rank in plan.ranks
                ],
                "here": [
                    {"instance": instance, "rank": str(rank.id), "device": rank.place}
                    for instance, rank in plan.here
                ],
                "memory_needed_bytes": plan.memory_needed,
                "memory_available_bytes": None if plan.assumed else plan.memory_available,
                "config_only": plan.config_only,
                "paced": plan.paced,
                "assumed": plan.assumed,
                "notes": notes,
            }
        )
    )


def _print(plan: Plan, notes: list[str]) -> None:
    from rich.console import Console

    from asapctl.check_view import device_lines, elsewhere, node_lines, rank_table
    from engine.launch.budget import show_bytes

    def say(label: str, text: str) -> None:
        console.print(f"{label:9} {text}", soft_wrap=True, markup=False, highlight=False)

    console = Console()
    config, schedule = plan.config, plan.topology.schedule
    say("topology", plan.topology.source)
    say("model", str(plan.model_dir))
    say(
        "",
        f"{config.architecture}: {config.layers} layers, {config.experts} experts, "
        f"top {config.top_k}, computed in {plan.dtype}",
    )
    if plan.tensor_parallel > 1:
        say("groups", f"{plan.groups}, of {plan.tensor_parallel} attention ranks each")
    if schedule.in_lockstep:
        batches = f"1 a group, of up to {schedule.batch_limit} tokens, in lockstep"
        say("batches", f"{batches} ({schedule.policy})")
    else:
        batches = f"{schedule.min_batch_tokens} to {schedule.max_batch_tokens} tokens"
        if schedule.min_batch_tokens == "auto":
            batches = f"up to {schedule.max_batch_tokens} tokens (the fewest: measured at start)"
        say("batches", f"{plan.lanes} a group, of {batches}")
    tokens = "1 token" if plan.window_tokens == 1 else f"{plan.window_tokens} tokens"
    say("windows", f"{tokens} a dispatch, {plan.transport}")
    for label, text in node_lines(plan):
        say(label, text)
    console.print(rank_table(plan.ranks, elsewhere(plan)))
    free = "not looked at here"
    if not plan.assumed:
        free = f"{plan.machine.memory_limit} has {show_bytes(plan.memory_available)} free"
    base = "controller and zygote"
    if plan.node_rank > 0:
        base = "zygote"
    elif plan.instances > 1:
        base = "controllers and zygote"
    say("memory", f"{show_bytes(plan.memory_needed)} with {base}; {free}")
    for line in device_lines(plan):
        say("devices", line)
    for name, value in plan.environment.items():
        say("set", f"{name}={value}")
    for note in notes:
        say("note", note)
