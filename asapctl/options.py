"""The arguments and options that several commands have, each the same everywhere."""

from typing import Annotated, TypeAlias

import typer

# Typer finds out about an option from what it is annotated with; the default is the command's.
Topology: TypeAlias = Annotated[
    str, typer.Argument(help="A topology file, or the name of a packaged one.")
]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Checkpoint folder. Default: the topology's, or a demo."),
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the topology; repeatable."),
]
Name: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="Which instance. Default: the only one there is."),
]
