"""`asapctl ps`: which instances of this user run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.launch.registry import InstanceRecord


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List your running instances: those launched, and prefill runs.

    Example: asapctl ps --json
    """
    import msgspec

    from engine.launch.registry import list_instances

    records = list_instances()
    if as_json:
        typer.echo(msgspec.json.encode(records).decode())
    elif records:
        _print(records, time.time())
    else:
        typer.echo("no instance is running", err=True)


def _print(records: list[InstanceRecord], now: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from asapctl.prefill_view import duration
    from engine.launch.attached import controllers_of

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("name", "pid", "command", "model", "url", "state", "uptime"):
        table.add_column(column, no_wrap=column != "model", overflow="fold")
    for record in records:
        instances = len(controllers_of(record))
        table.add_row(
            record.name,
            str(record.pid),
            f"{record.command} x{instances}" if instances > 1 else record.command,
            Path(record.model).name,
            record.url or "-",
            record.state if record.paced is None else f"{record.state}, paced",
            duration(max(0.0, now - record.started)),
        )
    Console(highlight=False).print(table)
