"""`asapctl logs`: what the processes of an instance wrote."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asapctl.options import Name
from asapctl.standard_streams import ReaderGoneError

if TYPE_CHECKING:
    from engine.launch.logs import Line


def logs(
    name: Name = None,
    rank: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="Of one process: attention-0, expert-1, controller, http, ...; where there are "
            "several instances: instance-0-attention-0, ...",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the instance ends.")
    ] = False,
) -> None:
    """Print the logs of an instance: all its processes in order of time.

    Of an instance that is gone, the logs of its last failure.

    \b
    Examples:
      asapctl logs -f
      asapctl logs mine --rank expert-1

    Exit codes: 0 printed, 2 usage, 3 no such instance.
    """
    from engine.launch.logs import Logs

    folder, alive = _find(name)
    with Logs(folder, rank) as opened:
        _print(opened.follow(alive) if follow else opened.read(last=True), prefix=rank is None)


def _find(name: str | None) -> tuple[Path, Callable[[], bool]]:
    """The log folder, and whether its instance runs."""
    from engine.launch.kept_logs import find_kept
    from engine.launch.registry import NoInstanceError, find_instance
    from engine.launch.runtime_folder import is_held

    try:
        record = find_instance(name)
    except NoInstanceError:
        kept = find_kept(name) if name is not None else None
        if kept is None:
            raise
        typer.echo(f"{name} is not running; these are the logs of its failure: {kept}", err=True)
        return kept, lambda: False
    return record.logs, lambda: is_held(record.folder)


def _print(lines: Iterable[Line], prefix: bool) -> None:
    width = 11
    with suppress(ReaderGoneError):  # `| head` has seen enough
        for line in lines:
            width = max(width, len(line.source))
            start = f"{line.source:{width}} | " if prefix else ""
            sys.stdout.write(f"{start}{line.text}\n")
