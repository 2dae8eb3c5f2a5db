"""`asapctl bench`: the commands that measure."""

import typer

from asapctl.bench_offline import offline
from asapctl.bench_serve import serve

COMMANDS = (offline, serve)

app = typer.Typer(
    name="bench",
    help="""Measure: prompts that are all there at once, or load on a server.

    Examples: asapctl bench offline --repeat 5
              asapctl bench serve http://127.0.0.1:8000 --rate 2""",
    short_help="Measure: prompts that are all there at once, or load on a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
