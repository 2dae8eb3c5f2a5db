"""`asapctl launch`: an instance that stays up and serves HTTP."""

import json
from typing import Annotated

import typer

from asapctl.options import Model, Overrides, Topology

_EXAMPLES = """
Start an instance that serves prefill over OpenAI-compatible HTTP.

Examples:

\b
  asapctl launch
  asapctl launch cpu-2a2e --model ~/models/Qwen3-30B-A3B --port 9000
  asapctl launch my.toml --name mine --detach
  ASAPCTL_API_KEY=secret asapctl launch --host 0.0.0.0

Ctrl-C ends it at once; `asapctl stop` lets it finish what it has.

Exit codes: 0 stopped (or, with --detach, ready), 1 it failed, 2 usage, 130 interrupted,
143 terminated.
"""


def launch(
    topology: Topology = "cpu",
    model: Model = None,
    overrides: Overrides = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="H", help="Serve on this address. Beyond loopback needs an API key."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", help="Serve on this port; 0 is any that is free.")
    ] = None,
    name: Annotated[str, typer.Option(help="What to call the instance.")] = "default",
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is ready, and leave it running.")
    ] = False,
) -> None:
    changes = list(overrides or ())
    if host is not None:
        changes.append(f"serve.host={json.dumps(host)}")  # a TOML string, whatever is in it
    if port is not None:
        changes.append(f"serve.port={port}")
    settle = None
    if detach:
        from engine.launch.detach import detach as fork  # before anything heavy is imported

        settle = fork()

    from asapctl.launch_view import LaunchView
    from engine.launch.job import Options, run_launch

    options = Options(topology=topology, model=model, overrides=tuple(changes), name=name)
    with LaunchView(settle) as view:
        run_launch(options, view)


launch.__doc__ = _EXAMPLES
