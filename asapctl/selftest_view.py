"""What a self-test shows: the step that it is at, and its report."""

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asapctl.live_lines import LiveLines
from engine.echo import encodable
from engine.selftest.messages import OperatorResult
from engine.selftest.report import Pair, RankOperators, Report

_REDRAW_S = 0.2


class SelftestView(LiveLines):
    """Notes go to standard error; steps too, on a terminal."""

    def __init__(self) -> None:
        super().__init__(_REDRAW_S)

    def step(self, text: str) -> None:
        self.draw(text)


def report_json(report: Report) -> str:
    return encodable(
        msgspec.json.encode(
            {"good": not report.failures, **msgspec.structs.asdict(report)}
        ).decode()
    )


def print_report(report: Report) -> None:
    """Tables on standard output; the last lines say whether all is good."""
    console = Console(highlight=False)

    def say(label: str, text: str) -> None:
        console.print(Text(f"{label:9} {text}"), soft_wrap=True)

    groups = f"{report.groups} groups" if report.groups > 1 else "1 group"
    say("topology", report.topology)
    say(
        "",
        f"attention: {groups} of {report.tensor_parallel}; experts: {report.expert_ranks}; "
        f"{report.transport}, windows of {report.window_tokens} tokens "
        f"({report.window_bytes / 1e6:.1f} MB each way)",
    )
    say("model", f"{report.model}, computed in {report.dtype}")
    if report.exchange is not None:
        exchange = report.exchange
        say("messages", f"{exchange.good:,} of {exchange.sent:,} right in every value")
    if report.pairs:
        console.print()
        console.print(pair_table(report.pairs))
    if report.operators:
        console.print()
        console.print(operator_table(report.operators))
    if report.logprobs is not None:
        console.print()
        say("logits", _model_text(report))
    console.print()
    for failure in report.failures:
        console.print(Text(f"failed: {failure}"), soft_wrap=True)
    if not report.failures:
        console.print(Text(f"all good, in {report.seconds:.0f} s"), soft_wrap=True)


def pair_table(pairs: list[Pair]) -> Table:
    """A row an attention rank would be too wide with many expert ranks: a row a pair."""
    table = _table()
    for heading in ("attention", "expert", "round trip", "bandwidth"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pair in pairs:
        table.add_row(
            str(pair.attention),
            str(pair.expert),
            f"{pair.latency_us:,.0f} us",
            f"{pair.bandwidth_gb_s:.2f} GB/s",
        )
    return table


def operator_table(ranks: list[RankOperators]) -> Table:
    """A row for what the operators of all ranks on one kind of device have in common; a rank whose
    operator fails has its own.
    """
    table = _table()
    for heading in ("device", "operator", "which", "ranks", "largest error", "tolerance", ""):
        right = heading in {"ranks", "largest error", "tolerance"}
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    rows: dict[tuple[str, str, bool, str], list[OperatorResult]] = {}
    for rank in ranks:
        for result in rank.results:
            where = "" if result.good else f"{rank.rank}: "
            rows.setdefault((rank.device, result.operator, result.fused, where), []).append(result)
    for (device, operator, own, where), results in rows.items():
        good = not where
        errors = [result.error for result in results if result.error is not None]
        table.add_row(
            Text(device),
            operator,
            "the device's" if own else "plain torch",
            str(len(results)),
            f"{max(errors):.1e}" if errors else "-",
            f"{results[0].tolerance:.0e}",
            Text("good", style="green") if good else Text(f"{where}failed", style="bold red"),
        )
    return table


def _model_text(report: Report) -> str:
    found = report.logprobs
    assert found is not None
    lengths = ", ".join(map(str, found.lengths))
    text = (
        f"{found.prompts} prompts of {lengths} tokens: log-probabilities of {found.positions:,} "
        f"positions differ from float32 on the CPU by at most {found.error:.1e} "
        f"(tolerance {found.tolerance.most:g})"
    )
    if found.tolerance.median != found.tolerance.most:
        text += f", median {found.median:.1e} (tolerance {found.tolerance.median:g})"
    if found.left_out:
        text += f"; {found.left_out:,} are left out, whose choice of experts hangs on a rounding"
    return text


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
