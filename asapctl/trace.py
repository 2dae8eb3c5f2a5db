"""`asapctl trace`: a few seconds of an instance, as a file for Perfetto."""

from typing import Annotated

import typer

_HELP = """
Record what every rank of an instance does for some seconds, for a look in Perfetto.

Examples:

\b
  asapctl trace
  asapctl trace NAME --seconds 2 -o trace.json

Open the file at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.

Exit codes: 0 written, 1 it failed, 2 usage, 3 no such instance.
"""


def trace(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Which instance. Default: the only one there is."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=600.0, metavar="S", help="For how long.")
    ] = 5.0,
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="Where to; - is standard output.")
    ] = "trace.json",
) -> None:
    from asapctl.trace_file import record_trace
    from engine.launch.registry import find_instance

    typer.echo(record_trace(find_instance(name), seconds, output), err=True)


trace.__doc__ = _HELP
