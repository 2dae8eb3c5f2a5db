"""Figures of a load benchmark as a picture, by matplotlib where it is installed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import RunError, UsageError
from engine.files import absolute

if TYPE_CHECKING:
    from engine.bench.serve_report import Report, Result

_SIZE_INCHES = (9.0, 4.0)
_DPI = 150


def check_plot(text: str) -> Path:
    """The file to write. Raises UsageError when that would fail, before anything is measured."""
    path = absolute(text, "--plot")
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: give the name of a .png")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--plot {path}: it is a folder, or there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError('--plot needs matplotlib: pip install "asapctl[plot]"') from None
    return path


def write_plot(result: "Result", path: Path) -> bool:
    """Writes a PNG. False: nothing was answered, so there is nothing to draw. Raises RunError."""
    from matplotlib.figure import Figure

    report = result.report
    if not any(trial.summary.answered for trial in report.trials):
        return False
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    if report.paced is not None:
        figure.suptitle(report.paced, fontsize="x-small", wrap=True)
    if report.is_search:
        _draw_rates(figure.subplots(), report)
    else:
        left, right = figure.subplots(1, 2)
        _draw_shares(left, result)
        _draw_lengths(right, result)
    try:
        figure.savefig(path, dpi=_DPI, format="png")
    except OSError as error:
        raise RunError(f"--plot {path}: cannot be written: {error.strerror}") from None
    return True


def _draw_shares(axes: Any, result: "Result") -> None:
    """The share of the answered prompts whose TTFT is at most so long."""
    times = sorted(each.ttft_s for each in result.outcomes if each.answered)
    axes.step(times, [(i + 1) / len(times) for i in range(len(times))], where="post")
    axes.set(xlabel="TTFT (s)", ylabel="share of answered prompts", ylim=(0, 1))
    if result.report.slo_s is not None:
        axes.axvline(result.report.slo_s, color="gray", linestyle="--", label="SLO")
        axes.legend()


def _draw_lengths(axes: Any, result: "Result") -> None:
    answered = [each for each in result.outcomes if each.answered]
    axes.scatter([each.tokens for each in answered], [each.ttft_s for each in answered], s=6)
    axes.set(xlabel="prompt (tokens)", ylabel="TTFT (s)", xscale="log")
    _label(axes.xaxis)
    axes.set_ylim(bottom=0)


def _draw_rates(axes: Any, report: "Report") -> None:
    trials = sorted(report.trials, key=lambda trial: trial.rate)
    for name in ("mean", "p99"):
        points = [
            (trial.rate, getattr(trial.summary.ttft, name))
            for trial in trials
            if trial.summary.ttft is not None
        ]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.axhline(report.slo_s, color="gray", linestyle="--", label="SLO")
    axes.set(xlabel="prompts/s", ylabel="TTFT (s)", xscale="log", yscale="log")
    _label(axes.xaxis)
    _label(axes.yaxis)
    axes.legend()


def _label(axis: Any) -> None:
    """Plain numbers on an axis of logarithms, few enough to be read."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())
