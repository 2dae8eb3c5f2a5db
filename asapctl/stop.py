"""`asapctl stop`: end an instance."""

from typing import Annotated

import typer

from asapctl.options import Name


def stop(
    name: Name = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not let it finish the requests that it has.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Give up waiting after so many seconds."),
    ] = None,
) -> None:
    """Stop an instance, once it has finished the requests that it has.

    It takes no more of them. Returns when it is gone. A prefill run ends at once; its results so
    far stay.

    Example: asapctl stop mine --timeout 60 || asapctl stop mine --now

    Exit codes: 0 it is gone, 1 it is not, 2 usage, 3 no such instance.
    """
    from engine.launch.registry import find_instance
    from engine.launch.stopping import stop_instance

    record = find_instance(name)
    stop_instance(record, now, timeout)
    typer.echo(f"{record.name} has ended", err=True)
