"""`asapctl render`: a file that has a scheduler run a launch."""

from typing import Annotated, Literal

import typer

from asapctl.options import Model, Overrides

_EXAMPLES = """
Write a Slurm script or a Kubernetes manifest that launches on several nodes.

It goes to standard output, and runs `asapctl launch` on every node.

Examples:

\b
  asapctl render slurm my.toml --nnodes 2 --model /models/mine > job.sbatch
  asapctl render kubernetes my.toml --model /models/mine --image me/asapctl:1
"""


def render(
    scheduler: Annotated[
        Literal["slurm", "kubernetes"], typer.Argument(help="What runs the nodes.")
    ],
    topology: Annotated[
        str, typer.Argument(help="A topology file, or the name of a packaged one.")
    ] = "cpu",
    nnodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="On how many nodes. Default: as [[nodes]] say."),
    ] = None,
    model: Model = None,
    overrides: Overrides = None,
    image: Annotated[
        str, typer.Option(help="The container image that has asapctl.")
    ] = "asapctl:latest",
    name: Annotated[str, typer.Option(help="What to call the job.")] = "asapctl",
) -> None:
    from engine.launch.command import LaunchCommand
    from engine.render.job import make_job

    launch = LaunchCommand(
        topology=topology, model=model, overrides=tuple(overrides or ()), name=name
    )
    job = make_job(launch, nnodes)
    if scheduler == "slurm":
        from engine.render.slurm import render_slurm

        text = render_slurm(job)
    else:
        from engine.render.kubernetes import render_kubernetes

        text = render_kubernetes(job, image)
    typer.echo(text, nl=False)


render.__doc__ = _EXAMPLES
