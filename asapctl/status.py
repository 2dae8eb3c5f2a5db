"""`asapctl status`: what an instance is doing, live, as one picture or as JSON."""

from typing import Annotated

import typer

_HELP = """
Watch an instance: what its ranks do, and how fast prompts get through.

Examples:

\b
  asapctl status
  asapctl status NAME --once
  asapctl status --json | jq .tokens_per_s

Keys: q quits, s sorts by the next column, arrows scroll; of several instances, tab or its number
chooses the one whose ranks are shown.

Without a terminal one picture is printed. A running `asapctl prefill` can be watched too.

Exit codes: 0 healthy, 1 stalled, degraded or silent, 2 usage, 3 no such instance.
"""


def status(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Which instance. Default: the only one there is."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one snapshot as JSON and end.")
    ] = False,
) -> None:
    from rich.console import Console

    from asapctl.status_live import watch
    from asapctl.status_print import print_json, print_picture
    from engine.launch.registry import find_instance

    record = find_instance(name)
    console = Console(highlight=False)
    if as_json:
        good = print_json(record)
    elif once or not console.is_terminal or console.is_dumb_terminal:
        good = print_picture(record, console)
    else:
        good = watch(record, console)
    raise typer.Exit(0 if good else 1)


status.__doc__ = _HELP
