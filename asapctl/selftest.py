"""`asapctl selftest`: do the devices of a topology compute and carry what they should?"""

from __future__ import annotations

from typing import Annotated

import typer

from asapctl.options import Overrides, Topology


def selftest(
    topology: Topology = "cpu",
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
) -> None:
    """Try a topology on this machine: transport, operators, and a small model.

    Starts its ranks on their devices. Every pair exchanges messages whose values are known (10,000
    in all) and takes its time; every operator runs beside plain float32 on the CPU; a small random
    model, in place of the topology's own, runs beside the same model in one process. About half a
    minute on CPUs.

    Example: asapctl selftest cpu-2a2e --set comm.transport=gloo

    Exit codes: 0 all good, 1 something failed, 2 the topology cannot run here, 130 interrupted.
    """
    from asapctl.selftest_view import SelftestView, print_report, report_json
    from engine.selftest.job import Options, run_selftest

    with SelftestView() as view:
        report = run_selftest(Options(topology, tuple(overrides or ())), view)
    if as_json:
        typer.echo(report_json(report))
    else:
        print_report(report)
    if report.failures:
        raise typer.Exit(1)
