"""`asapctl doctor`: what this machine has, what topologies need, and what to do about gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.doctor.facts import Report

_MARKS = {"ok": "ok", "absent": "-", "problem": "!!"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
) -> None:
    """Tell what this machine has, and what each topology that comes with asapctl lacks here.

    Software, drivers, accelerators and masks, memory, limits, interfaces and ports. Starts nothing
    and touches no device. The exit code is 0 when topologies without accelerators can run here, and
    1 otherwise.

    Example: asapctl doctor --json
    """
    from engine.doctor.examine import examine

    report = examine()
    if as_json:
        _print_json(report)
    else:
        _print(report)
    if not report.cpu_ready:
        raise typer.Exit(1)


def _print_json(report: Report) -> None:
    import json

    from engine.echo import encodable

    text = json.dumps(
        {
            "cpu_ready": report.cpu_ready,
            "sections": {
                section.name: [
                    {
                        "name": fact.name,
                        "state": fact.state,
                        "text": fact.text,
                        "value": fact.value,
                        "remedy": fact.remedy,
                    }
                    for fact in section.facts
                ]
                for section in report.sections
            },
            "topologies": [
                {
                    "name": verdict.topology,
                    "runs": verdict.runs,
                    "needs": verdict.needs,
                    "gaps": list(verdict.gaps),
                }
                for verdict in report.verdicts
            ],
            "remedies": [{"about": about, "remedy": remedy} for about, remedy in report.remedies()],
        }
    )
    typer.echo(encodable(text))


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    styles = {"ok": "green", "absent": "dim", "problem": "bold red"}

    def heading(text: str) -> None:
        console.print(Text(text, style="bold"))

    def rows() -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column(width=2)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        return table

    for section in report.sections:
        heading(section.name)
        table = rows()
        for fact in section.facts:
            mark = Text(_MARKS[fact.state], style=styles[fact.state])
            table.add_row(mark, Text(fact.name), Text(fact.text))
        console.print(Padding(table, (0, 0, 1, 2)))
    heading("topologies")
    table = rows()
    for verdict in report.verdicts:
        state = "ok" if verdict.runs else "problem" if verdict.on_cpu else "absent"
        mark = Text(_MARKS[state], style=styles[state])
        table.add_row(mark, Text(verdict.topology), Text(f"needs {verdict.needs}"))
        for gap in verdict.gaps:
            table.add_row("", "", Text(gap))
    console.print(Padding(table, (0, 0, 1, 2)))
    remedies = report.remedies()
    if remedies:
        heading("what to do")
        table = rows()
        for number, (about, remedy) in enumerate(remedies, start=1):
            table.add_row(str(number), Text(about), Text(remedy))
        console.print(Padding(table, (0, 0, 1, 2)))
    console.print(
        "Topologies without accelerators can run here."
        if report.cpu_ready
        else "No topology without accelerators can run here."
    )
