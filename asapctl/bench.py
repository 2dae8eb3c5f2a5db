"""`asapctl bench`: the commands that measure."""

import typer

from asapctl.bench_offline import offline

COMMANDS = (offline,)

app = typer.Typer(
    name="bench",
    help="""Measure: prompts that are all there at once, or load on a server.

    Example: asapctl bench offline --repeat 5""",
    short_help="Measure: prompts that are all there at once, or load on a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
