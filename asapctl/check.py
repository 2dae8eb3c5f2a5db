"""`asapctl check`: would this topology run here, and what would run?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asapctl.options import Model, Overrides, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from engine.launch.budget import RankPlan
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON object.")
    ] = False,
) -> None:
    """Check a topology without starting anything.

    Prints the ranks, the experts that each holds and the memory that each needs. All problems are
    reported at once, and then the exit code is 2.

    Example: asapctl check cpu-2a2e --model ~/models/Mixtral-8x7B --set schedule.lanes=3
    """
    from engine.kv.folder import check_folder
    from engine.launch.checks import Problems, plan_of
    from engine.launch.listen import host_problem

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

    from engine.echo import encodable

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
                "lanes": plan.lanes,
                "min_batch_tokens": schedule.min_batch_tokens,
                "max_batch_tokens": schedule.max_batch_tokens,
                "window_tokens": plan.window_tokens,
                "transport": plan.topology.comm.transport,
                "ranks": [
                    {
                        "rank": str(rank.id),
                        "role": rank.id.role,
                        "device": "cpu",
                        "first_expert": rank.experts.start if rank.experts else None,
                        "experts": len(rank.experts),
                        "weights_bytes": rank.weights_bytes,
                        "windows_bytes": rank.windows_bytes,
                        "working_set_bytes": rank.working_set_bytes,
                        "kv_bytes": rank.kv_bytes,
                        "process_bytes": rank.process_bytes,
                        "total_bytes": rank.total,
                    }
                    for rank in plan.ranks
                ],
                "memory_needed_bytes": plan.memory_needed,
                "memory_available_bytes": plan.memory_available,
                "notes": notes,
            }
        )
    )


def _print(plan: Plan, notes: list[str]) -> None:
    from rich.console import Console

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
    say(
        "batches",
        f"{plan.lanes} a group, of {schedule.min_batch_tokens} to "
        f"{schedule.max_batch_tokens} tokens",
    )
    say("windows", f"{plan.window_tokens} tokens a dispatch, {plan.topology.comm.transport}")
    console.print(_table(plan.ranks))
    say(
        "memory",
        f"{show_bytes(plan.memory_needed)} with controller and zygote; "
        f"{plan.machine.memory_limit} has {show_bytes(plan.memory_available)} free",
    )
    for note in notes:
        say("note", note)


def _table(ranks: Sequence[RankPlan]) -> Table:
    from rich import box
    from rich.table import Table

    from engine.launch.budget import show_bytes

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("rank", no_wrap=True)
    table.add_column("on", no_wrap=True)
    table.add_column("experts", no_wrap=True)
    columns = ["weights", "windows", "working\nset", "KV", "process", "total"]
    if not any(rank.kv_bytes for rank in ranks):
        columns.remove("KV")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for rank in ranks:
        sizes = {
            "weights": rank.weights_bytes,
            "windows": rank.windows_bytes,
            "working\nset": rank.working_set_bytes,
            "KV": rank.kv_bytes,
            "process": rank.process_bytes,
            "total": rank.total,
        }
        table.add_row(
            str(rank.id),
            "cpu",
            _experts(rank.experts),
            *(show_bytes(sizes[column]) if sizes[column] else "-" for column in columns),
        )
    return table


def _experts(experts: range) -> str:
    if len(experts) < 2:
        return f"{experts.start} (1)" if experts else "-"
    return f"{experts.start}-{experts.stop - 1} ({len(experts)})"
