"""`asapctl check`: would this topology run here, and what would run?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from engine.launch.plan import Plan


def check(
    topology: Annotated[
        str, typer.Argument(help="A topology file, or the name of a packaged one.")
    ] = "cpu",
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The checkpoint, in place of the topology's.", show_default=False
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the topology, as often as needed."
        ),
    ] = None,
    keep_kv: Annotated[
        bool, typer.Option("--keep-kv", help="Plan for KV caches that are exported (--kv-dir).")
    ] = False,
) -> None:
    """Check a topology without starting anything.

    Prints the ranks, the experts that each holds and the memory that each needs. All problems are
    reported at once, and then the exit code is 2.

    Example: asapctl check cpu-2a2e --model ~/models/Mixtral-8x7B --set schedule.lanes=3
    """
    from engine.errors import UsageError
    from engine.launch.listen import host_problem
    from engine.launch.model_dir import find_model_dir
    from engine.topology.load import load_topology

    try:
        loaded = load_topology(topology, overrides or [])
    except UsageError as error:
        raise UsageError("\n".join([str(error), *_model_problems(model)])) from None
    model_dir = find_model_dir(loaded, model, lambda note: typer.echo(note, err=True))

    from engine.launch.plan import make_plan  # after the topology's errors: it imports torch

    keep_kv = keep_kv or loaded.serve.kv_dir is not None
    _print(make_plan(loaded, model_dir, keep_kv))
    if problem := host_problem(loaded):
        typer.echo(f"note      for `asapctl launch`: {problem}")


def _model_problems(model: Path | None) -> list[str]:
    """What is wrong with a model that can be told without a topology."""
    from engine.errors import UsageError
    from engine.model.config import load_config

    try:
        if model is not None and str(model) != "demo":
            load_config(model.expanduser())
    except UsageError as error:
        return [str(error)]
    return []


def _print(plan: Plan) -> None:
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
    console.print(_table(plan))
    say(
        "memory",
        f"{show_bytes(plan.memory_needed)} with controller and zygote; "
        f"{plan.machine.memory_limit} has {show_bytes(plan.memory_available)} free",
    )
    for note in plan.notes:
        say("note", note)


def _table(plan: Plan) -> Table:
    from rich import box
    from rich.table import Table

    from engine.launch.budget import show_bytes

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", no_wrap=True)
    table.add_column("on")
    table.add_column("experts")
    columns = ["weights", "windows", "working set", "KV", "process", "total"]
    if not any(rank.kv_bytes for rank in plan.ranks):
        columns.remove("KV")
    for column in columns:
        table.add_column(column, justify="right")
    for rank in plan.ranks:
        sizes = {
            "weights": rank.weights_bytes,
            "windows": rank.windows_bytes,
            "working set": rank.working_set_bytes,
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
