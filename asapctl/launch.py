"""`asapctl launch`: an instance that stays up and serves HTTP; on several nodes, a part of it."""

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
  asapctl launch my.toml --nnodes 2 --node-rank 1 --rdzv-endpoint 10.0.0.1 --secret-file f

With several nodes, run it on each. torchrun's and Slurm's environments are read
where --nnodes, --node-rank and --rdzv-endpoint are not given. Node 0 serves HTTP.

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
    nnodes: Annotated[
        str | None, typer.Option(metavar="N", help="On how many nodes. Default: 1.")
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", help="Which of them this is, from 0.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(metavar="H:P", help="Node 0's HOST:PORT. Default port: 29400."),
    ] = None,
    secret_file: Annotated[
        str | None,
        typer.Option(metavar="F", help="A secret, the same on each. Or set ASAPCTL_SECRET."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started, where, and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: print one JSON object.")
    ] = False,
) -> None:
    if dry_run:
        from asapctl.dry_run_view import print_dry_run, print_json
        from engine.launch.command import SOME_ENDPOINT, SOME_SECRET, LaunchCommand
        from engine.launch.dry_run import dry_run as look
        from engine.launch.endpoint import endpoint
        from engine.launch.nodes import stated_nodes

        stated = stated_nodes(nnodes, rdzv_endpoint)
        command = LaunchCommand(
            topology=topology,
            model=model,
            overrides=tuple(overrides or ()),
            host=host,
            port=port,
            name=name,
            nnodes=stated.nnodes,
            rdzv_endpoint=endpoint(stated.host, stated.port) if stated.host else SOME_ENDPOINT,
            secret_file=secret_file or SOME_SECRET,
        )
        found = look(command, lambda note: typer.echo(note, err=True))
        (print_json if as_json else print_dry_run)(found)
        return
    if as_json:
        from engine.errors import UsageError

        raise UsageError("--json belongs to --dry-run; `asapctl status --json` asks an instance")
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
    from engine.launch.nodes import node_options

    with LaunchView(settle) as view:
        nodes = node_options(nnodes, node_rank, rdzv_endpoint, secret_file, on_note=view.note)
        options = Options(
            topology=topology, model=model, overrides=tuple(changes), name=name, nodes=nodes
        )
        run_launch(options, view)


launch.__doc__ = _EXAMPLES
