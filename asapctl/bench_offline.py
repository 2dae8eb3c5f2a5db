"""`asapctl bench offline`: how fast an instance prefills prompts that are all there at once."""

from typing import Annotated

import typer

from asapctl.options import Model, Overrides

_HELP = """
Measure how fast prompts are prefilled that are all there at once, and where the time goes.

Starts an instance, runs all prompts once to warm up, then in measured rounds, and once more while
every rank records what it does. Between the rounds it measures the machine's own peak of float32
matrix products. The default prompts are 64 of 33,929 tokens together, 23 to 2,048 each.

Examples:

\b
  asapctl bench offline
  asapctl bench offline --model ~/models/Qwen3-30B-A3B --topology cpu-2a2e --repeat 5
  asapctl bench offline --lengths lognormal:mean=512,sigma=1.0,max=4096 --prompts 200 --json

Exit codes: 0 measured, 1 the run failed, 2 usage, 130 interrupted.
"""


def offline(
    model: Model = None,
    topology: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Topology file, or the name of one that is packaged."),
    ] = None,
    overrides: Overrides = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEC",
            help="Lengths of prompts: fixed:512, uniform:10-20, lognormal:mean=512,sigma=1.0,"
            "max=4096, or a file of one length a line, to draw from.",
        ),
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many, with --lengths.")
    ] = 64,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Measured rounds.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of random tokens and lengths.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object.")
    ] = False,
) -> None:
    from asapctl.bench_offline_view import OfflineView, print_report
    from engine.bench.offline import Options, run_offline

    options = Options(model, topology, tuple(overrides or ()), lengths, prompts, repeat, seed)
    with OfflineView() as view:
        report = run_offline(options, view)
    print_report(report, as_json)


offline.__doc__ = _HELP
