"""`asapctl bench serve`: load on an endpoint, by a trace or at random, and its highest rate."""

import signal
from typing import Annotated

import typer

_HELP = """
Measure the time to first token of an OpenAI-compatible endpoint under load: ours, or vLLM's.

Prompts are sent at their times, whatever became of those before. Each is of random token ids and
asks for one token. Lengths and times come from a trace (Mooncake's JSONL, Azure's or BurstGPT's
CSV), or are drawn: Poisson arrivals of a rate.

Examples:

\b
  asapctl bench serve http://127.0.0.1:8000 --rate 2 --lengths uniform:50-500 --duration 60
  asapctl bench serve http://127.0.0.1:8000 --trace trace.jsonl --scale-lengths 0.1 --slo ttft=0.5
  asapctl bench serve http://127.0.0.1:8000 --rate 2 --slo ttft=0.5 --find-rate --plot rates.png

Ctrl-C prints what was measured so far. Exit codes: 0 measured, 1 the endpoint does not answer, 2
usage, 130 interrupted.
"""


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="What /v1/completions is under.")],
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replay it: its times and lengths.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(metavar="R", help="Prompts a second, Poisson arrivals.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|SPEC",
            help="With --rate. fixed:512, uniform:10-20, lognormal:mean=512,sigma=1.0,max=4096, or "
            "a file of lengths or a trace. Default: those of bench offline.",
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="How long prompts come, in seconds, in each trial. Default: 30; a trace without "
            "--find-rate: all of it.",
        ),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=S", help="The TTFT that is good enough, in seconds.")
    ] = None,
    find_rate: Annotated[
        bool,
        typer.Option("--find-rate", help="The highest rate whose mean, and whose p99, meet --slo."),
    ] = False,
    scale_lengths: Annotated[
        float, typer.Option(metavar="X", help="Prompts X times as long.")
    ] = 1.0,
    scale_rate: Annotated[float, typer.Option(metavar="X", help="X times as many a second.")] = 1.0,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Leave longer prompts out. Default: the model's."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of times, lengths and tokens.")] = 0,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the first that is served.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="ASAPCTL_API_KEY", help="Sent as Authorization: Bearer KEY."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE.png", help='Draw them; needs pip install "asapctl[plot]".'),
    ] = None,
) -> None:
    from asapctl.bench_serve_plot import check_plot, write_plot
    from asapctl.bench_serve_view import ServeView, print_report
    from engine.bench.offered import parse_offered
    from engine.bench.serve import TRIAL_S, Options, run_serve
    from engine.bench.slo import parse_slo

    slo_s = None if slo is None else parse_slo(slo)
    path = None if plot is None else check_plot(plot)
    if duration is None and (trace is None or find_rate):
        duration = TRIAL_S
    offered = parse_offered(trace, rate, lengths, duration, scale_lengths, scale_rate, seed)
    options = Options(
        url=url,
        model=model,
        api_key=api_key,
        slo_s=slo_s,
        find_rate=find_rate,
        trial_s=TRIAL_S if duration is None else duration,
        max_length=max_length,
        seed=seed,
    )
    with ServeView() as view:
        result = run_serve(options, offered, view)
    print_report(result.report, as_json)
    if path is not None and not write_plot(result, path):
        typer.echo(f"{path} was not written: no prompt was answered", err=True)
    if result.report.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


serve.__doc__ = _HELP
