"""What an offline benchmark shows: the step that it is at, and its figures."""

import sys

import msgspec
import typer

from asapctl.live_lines import LiveLines
from engine.bench.offline import Report, RoleShares, Spread
from engine.control.messages import Snapshot
from engine.echo import encodable
from engine.offline.stats import plural

_REDRAW_S = 0.2


class OfflineView(LiveLines):
    """Notes go to standard error; steps too, on a terminal."""

    def __init__(self) -> None:
        super().__init__(_REDRAW_S)

    def loading(self, snapshot: Snapshot) -> None:
        ready = sum(rank.ready for rank in snapshot.ranks)
        self.draw(f"loading: {ready} of {len(snapshot.ranks)} ranks ready")

    def step(self, text: str) -> None:
        self.draw(text)


def print_report(report: Report, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(encodable(msgspec.json.encode(report).decode()) + "\n")
    else:
        typer.echo(report_text(report))


def report_text(report: Report) -> str:
    """The figures, a line each. Spreads are the median, and in brackets the range."""
    lines = [] if report.paced is None else [report.paced]
    lines += [
        f"model     {encodable(report.model)}, {report.dtype}",
        f"topology  {encodable(report.topology)}: {report.layout}",
        f"prompts   {report.prompts:,} of {report.tokens:,} tokens, the longest "
        f"{report.longest:,}; {plural(report.rounds, 'round')} after one that warmed up",
        f"speed     {_spread(report.tokens_per_s, ',.0f')} tokens/s",
    ]
    if report.paced is None:  # else nothing of the kind is computed
        lines.append(
            f"          {_spread(report.gflop_per_s, ',.1f')} GFLOP/s, of {report.gflop:,.0f} "
            "GFLOP counted from the model's sizes"
        )
    if report.peak_gflop_per_s is not None and report.share_of_peak is not None:
        lines.append(
            f"peak      {_spread(report.peak_gflop_per_s, ',.1f')} GFLOP/s of float32 products on "
            f"{plural(report.cores, 'core')}, measured in between; "
            f"reached {_spread(report.share_of_peak, '.0%')}"
        )
    lines += [_role_text(role) for role in report.roles]
    if report.dropped_spans:
        lines.append(
            f"{report.dropped_spans:,} spans were too many to keep: where time goes lacks them"
        )
    return "\n".join(lines)


def _role_text(role: RoleShares) -> str:
    parts = ", ".join(f"{name} {share:.1%}" for name, share in role.parts.items())
    return f"{role.role:9} {plural(role.ranks, 'rank')}, busy {role.busy:.0%}: {parts}"


def _spread(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.lowest:{form}} to {spread.highest:{form}})"
