"""What a load benchmark shows: how it goes, and its figures."""

import sys
from collections.abc import Sequence

import msgspec
import typer

from asapctl.live_lines import LiveLines
from asapctl.units import seconds
from engine.bench.endpoint import Endpoint
from engine.bench.recorder import Recorder
from engine.bench.serve_report import Highest, Measurement, Prompts, Report
from engine.bench.summary import Summary, Times
from engine.echo import plain
from engine.offline.stats import plural

_REDRAW_S = 0.2
_NAME = 18
_CELL = 9
_FEW = 100  # of fewer, the p99 is the slowest one


class ServeView(LiveLines):
    """Notes go to standard error; steps too, on a terminal."""

    def __init__(self) -> None:
        super().__init__(_REDRAW_S)
        self._mark = ""

    def step(self, text: str) -> None:
        self.draw(text)

    def progress(self, duration_s: float, recorder: Recorder) -> None:
        done = recorder.outcomes
        answered = [each.ttft_s for each in done if each.answered]
        text = f"{self._mark}{recorder.elapsed_s:.0f} of {duration_s:.0f} s: {recorder.sent} sent, "
        text += f"{len(answered)} answered, {len(done) - len(answered)} failed"
        if answered:
            text += f"; TTFT {seconds(sum(answered) / len(answered))} in the mean"
        self.draw(text)

    def endpoint(self, endpoint: Endpoint, prompts: Prompts) -> None:
        self._mark = "" if endpoint.paced is None else "paced, "
        if prompts == "text":
            self.note("the endpoint takes no token ids: lengths are those of text, and not exact")

    def trial(self, measurement: Measurement) -> None:
        ttft = measurement.summary.ttft
        what = "all failed" if ttft is None else f"{_ms(ttft.mean)} mean, {_ms(ttft.p99)} p99"
        met = " and ".join(measurement.meets)
        verdict = f"the {met} within the SLO" if met else "too much"
        self.note(f"{self._mark}{_rate(measurement.rate)}: {what}: {verdict}")


def print_report(report: Report, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        typer.echo(report_text(report))


def report_text(report: Report) -> str:
    lines = [] if report.paced is None else [plain(report.paced, 400)]
    kind = "" if report.prompts == "token ids" else ", prompts of text"
    lines.append(f"endpoint  {report.url}, {plain(report.model)}{kind}")
    if report.interrupted:
        last = " in the last trial" if len(report.trials) > 1 else ""
        lines.append(f"interrupted: what was not answered by then{last} counts as given up")
    if not report.trials:
        lines.append("nothing was measured")
    elif report.is_search:
        lines += _search_lines(report)
    else:
        lines += _measurement_lines(report.trials[0])
    return "\n".join(lines)


def _measurement_lines(measurement: Measurement) -> list[str]:
    summary = measurement.summary
    lines = [
        f"offered   {plural(summary.requests, 'prompt')}, {_rate(measurement.rate)}",
        f"answered  {summary.answered:,} in {seconds(summary.seconds)}: "
        f"{summary.requests_per_s:,.2f} prompts/s, {summary.tokens_per_s:,.0f} tokens/s",
    ]
    lines += _problem_lines([measurement])
    lines += ["", *_table(summary), ""]
    if summary.goodput is not None and summary.slo_s is not None:
        lines.append(
            f"goodput   {summary.goodput:,.2f} prompts/s with a TTFT of at most "
            f"{_ms(summary.slo_s)}, {summary.within_slo:.1%} of all"
        )
    lines.append(
        f"driver    late by {_ms(summary.late_median_s)} (median), "
        f"{_ms(summary.late_most_s)} at most"
    )
    return lines


def _table(summary: Summary) -> list[str]:
    """TTFT of all, and of each class of length."""
    has_slo = summary.slo_s is not None
    rows = [_row("TTFT", ["mean", "p50", "p90", "p99", *["in time"] * has_slo])]
    rows.append(_row("all", [*_cells(summary.ttft), *_share(summary.within_slo)]))
    if summary.by_length[0].least == summary.by_length[-1].most:  # one length
        return rows
    rows.append("by length in tokens, quarters of the prompts")
    for each in summary.by_length:
        name = f"{each.least:,} to {each.most:,}"
        rows.append(_row(name, [*_cells(each.ttft), *_share(each.within_slo)]))
    return rows


def _search_lines(report: Report) -> list[str]:
    lines = _problem_lines(report.trials)
    lines += ["", _row("rate", ["prompts", "mean", "p50", "p90", "p99", "in time", "meets"])]
    for trial in sorted(report.trials, key=lambda trial: trial.rate):
        summary = trial.summary
        cells = [f"{summary.requests:,}", *_cells(summary.ttft), *_share(summary.within_slo)]
        late = "  (late)" if trial.late else ""
        lines.append(_row(_rate(trial.rate), [*cells, "+".join(trial.meets) or "-"]) + late)
    return [*lines, "", *(_highest_line(each, report) for each in report.highest)]


def _highest_line(highest: Highest, report: Report) -> str:
    assert report.slo_s is not None
    what = f"highest rate with {highest.judge} TTFT within {_ms(report.slo_s)}: "
    if highest.rate == 0:
        return f"{what}none that was tried"
    line = f"{what}{_rate(highest.rate)}"
    if highest.too_high is not None:
        line += f"; {_rate(highest.too_high)} was too much"
    requests = max(t.summary.requests for t in report.trials if t.rate == highest.rate)
    if highest.judge == "p99" and requests < _FEW:
        line += f" (p99 of {plural(requests, 'prompt')}, the slowest: give a longer --duration)"
    return line


def _problem_lines(trials: Sequence[Measurement]) -> list[str]:
    lines = []
    too_long = sum(trial.too_long for trial in trials)
    if too_long:
        lines.append(f"left out  {plural(too_long, 'prompt')}, longer than may be sent")
    given_up = sum(trial.summary.given_up for trial in trials)
    if given_up:
        lines.append(
            f"given up  {plural(given_up, 'prompt')}; they count with the time that they waited"
        )
    failed = sum(trial.summary.failed for trial in trials)
    if failed:
        lines.append(f"failed    {plural(failed, 'prompt')}:")
        counts: dict[str, int] = {}
        for failure in (failure for trial in trials for failure in trial.failures):
            counts[failure.reason] = counts.get(failure.reason, 0) + failure.count
        lines += [f"          {count:,} x {plain(why, 200)}" for why, count in counts.items()]
    late = [trial.summary for trial in trials if trial.late]
    if late:
        most = max(summary.late_most_s for summary in late)
        where = f" in {plural(len(late), 'trial')}" if len(trials) > 1 else ""
        lines.append(
            f"warning: prompts were sent up to {_ms(most)} late{where}, as this machine was too "
            "busy; TTFT holds that, so take these figures with care"
        )
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:{_NAME}}" + "".join(f"{cell:>{_CELL}}" for cell in cells)


def _cells(times: Times | None) -> list[str]:
    if times is None:
        return ["-"] * 4
    return [_ms(value) for value in (times.mean, times.p50, times.p90, times.p99)]


def _share(share: float | None) -> list[str]:
    return [] if share is None else [f"{share:.1%}"]


def _ms(value: float) -> str:
    """Finer than `seconds` where it is short."""
    return f"{value * 1000:.1f} ms" if value < 0.1 else seconds(value)


def _rate(rate: float) -> str:
    return f"{rate:,.3g}/s" if rate < 100 else f"{rate:,.0f}/s"
