"""Load benchmarks: what is offered, a whole run against a small server, and what is shown."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asapctl.bench_serve_plot import check_plot, write_plot
from asapctl.bench_serve_view import ServeView, report_text
from asapctl.cli import app
from engine.bench.load import GIVEN_UP, Outcome
from engine.bench.offered import Offered, PoissonOffered, TraceOffered, parse_offered
from engine.bench.serve import Options, run_serve
from engine.bench.serve_report import Highest, Report, Result, measured
from engine.bench.slo import met_by, parse_slo
from engine.bench.summary import summarize
from engine.errors import UsageError
from engine.traffic.arrivals import Arrival, mean_rate
from engine.traffic.lengths import parse_lengths
from helpers.endpoints import ONE_TOKEN, FakeEndpoint, fake_endpoint, slowly

TRACE = [Arrival(0.0, 10), Arrival(1.0, 20), Arrival(4.0, 30)]


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as endpoint:
        yield endpoint


def offered(rate: float = 100, lengths: str = "fixed:5", duration_s: float = 0.3) -> Offered:
    return PoissonOffered(rate, parse_lengths(lengths), 0, duration_s, 1.0)


def trace(times: list[float], tokens: int = 5) -> Offered:
    return TraceOffered([Arrival(at, tokens) for at in times], 1.0, 10.0, 1.0)


def run(load: Offered, **options: Any) -> Result:
    with ServeView() as view:
        return run_serve(Options(**options), load, view)


def test_a_trace_as_it_is_or_scaled_or_cut() -> None:
    assert TraceOffered(TRACE, 1.0, 10.0, 1.0).own() == TRACE
    faster = TraceOffered(TRACE, 2.0, 1.0, 0.5)
    assert faster.own() == [Arrival(0.0, 5), Arrival(0.5, 10)]
    assert faster.rate == pytest.approx(1.0)


def test_a_trace_at_another_rate_lasts_as_long_as_is_asked() -> None:
    load = TraceOffered(TRACE, 1.0, 10.0, 1.0)
    some = load.at(0.5, 4.0)  # two of them
    assert some == [Arrival(0.0, 10), Arrival(4.0, 20)]
    many = load.at(5.0, 2.0)  # ten: three times, and one more
    assert [each.tokens for each in many] == [10, 20, 30] * 3 + [10]
    assert many[-1].at_s == pytest.approx(2.0)
    # The gaps of the trace are kept, and where it begins anew there is a mean one.
    gaps = [b.at_s - a.at_s for a, b in pairwise(many)]
    assert [gap / gaps[0] for gap in gaps[:4]] == pytest.approx([1, 3, 2, 1])


def test_poisson_arrivals_at_another_rate() -> None:
    load = offered(2, "uniform:5-50", 100)
    assert 1.5 < mean_rate(load.own()) < 2.5
    assert 15 < mean_rate(load.at(20, 30)) < 25


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --trace FILE or --rate R"),
        ({"rate": 1.0, "trace": "x"}, "give --trace FILE or --rate R"),
        ({"rate": 0.0}, "--rate 0: give a number above 0"),
        ({"rate": float("nan")}, "--rate nan"),
        ({"rate": 1.0, "duration_s": -1.0}, "--duration -1"),
        ({"rate": 1.0, "scale_rate": 0.0}, "--scale-rate 0"),
        ({"rate": 1.0, "scale_lengths": float("inf")}, "--scale-lengths inf"),
        ({"rate": 1e9}, "more than 5,000,000 prompts"),
        ({"rate": 1.0, "lengths": "x"}, "--lengths"),
        ({"trace": "/none"}, "/none: cannot be read"),
        ({"trace": "/none", "lengths": "fixed:5"}, "--lengths goes with --rate"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    given = {"trace": None, "rate": None, "lengths": None, "duration_s": 30.0}
    given |= {"scale_lengths": 1.0, "scale_rate": 1.0}
    with pytest.raises(UsageError, match=message):
        parse_offered(**(given | options), seed=0)


def test_the_slo() -> None:
    assert parse_slo("ttft=0.5") == 0.5
    for text in ("", "0.5", "ttft=", "ttft=0", "ttft=nan", "tpot=1", "ttft=1s"):
        with pytest.raises(UsageError, match="give seconds above 0"):
            parse_slo(text)


def test_who_finds_the_slo_met() -> None:
    def met(*ttfts: float, error: str | None = None, slo_s: float | None = 1.0) -> list[Any]:
        outcomes = [Outcome(0, 1, 0, ttft) for ttft in ttfts]
        if error:
            outcomes.append(Outcome(0, 1, 0, 0.1, error))
        return met_by(summarize(outcomes, slo_s))

    assert met(0.5) == ["mean", "p99"]
    assert met(*[0.5] * 98, 2, 2) == ["mean"]
    assert met(*[0.99] * 99, 10) == ["p99"]
    assert met(*[0.5] * 99, error="refused") == ["p99"]
    assert met(*[0.5] * 9, error=GIVEN_UP) == []
    assert met(0.5, slo_s=None) == []


def test_a_run(fake: FakeEndpoint) -> None:
    report = run(offered(lengths="uniform:1-9"), url=fake.url, slo_s=5.0).report
    (trial,) = report.trials
    assert (report.model, report.prompts, report.interrupted) == ("m", "token ids", False)
    assert trial.summary.requests == trial.summary.answered == len(fake.prompts) - 1
    assert trial.summary.within_slo == 1
    assert trial.rate == pytest.approx(100, rel=0.5)
    assert sorted({len(prompt) for prompt in fake.prompts[1:]})[0] >= 1


def test_prompts_that_are_too_long_are_left_out(fake: FakeEndpoint) -> None:
    fake.models = 200, {"data": [{"id": "m", "vocab_size": 50, "max_model_len": 11}]}
    load = TraceOffered([Arrival(0, 5), Arrival(0.01, 10), Arrival(0.02, 11)], 1.0, 1.0, 1.0)
    (trial,) = run(load, url=fake.url).report.trials
    assert (trial.too_long, trial.summary.requests) == (1, 2)
    (trial,) = run(load, url=fake.url, max_length=5).report.trials
    assert (trial.too_long, trial.summary.requests) == (2, 1)
    with pytest.raises(UsageError, match="3 prompts, all longer than 2 tokens"):
        run(load, url=fake.url, max_length=2)


def test_reasons_of_failures_are_counted(fake: FakeEndpoint) -> None:
    fake.complete = lambda body: (
        (200, ONE_TOKEN) if len(body["prompt"]) != 5 else (429, {"error": {"message": "full"}})
    )
    report = run(trace([0, 0.01, 0.02]), url=fake.url).report
    (failure,) = report.trials[0].failures
    assert (failure.reason, failure.count) == ("HTTP 429: full", 3)
    assert "failed    3 prompts:\n          3 x HTTP 429: full" in report_text(report)


def test_trials_differ_in_their_prompts(fake: FakeEndpoint) -> None:
    """Else an endpoint's cache of prefixes would know them."""
    run(offered(20, "fixed:20", 0.2), url=fake.url, slo_s=1e-9, find_rate=True, trial_s=0.2)
    sent = [tuple(prompt) for prompt in fake.prompts if len(prompt) == 20]
    assert len(sent) == len(set(sent)) > 1


def test_the_highest_rate_is_found(fake: FakeEndpoint) -> None:
    """Of an endpoint that takes six prompts in a trial, of 0.2 s."""
    taken = 0

    def complete(body: Any) -> Any:
        nonlocal taken
        if len(body["prompt"]) != 5:  # between trials
            taken = 0
            return 200, ONE_TOKEN
        with lock:
            taken += 1
            return (200, ONE_TOKEN) if taken <= 6 else (429, {})

    lock = threading.Lock()
    fake.complete = complete
    load = trace([0.0, 0.1])
    report = run(load, url=fake.url, slo_s=30.0, find_rate=True, trial_s=0.2).report
    assert [each.judge for each in report.highest] == ["mean", "p99"]
    for highest in report.highest:
        assert highest.too_high is not None
        assert 6.5 / 0.2 / 1.05 < highest.rate <= 6.5 / 0.2 < highest.too_high
    rates = [trial.rate for trial in report.trials]
    assert len(rates) == len(set(rates)), "a rate was tried twice"


def test_a_search_needs_an_slo_and_a_rate(fake: FakeEndpoint) -> None:
    with pytest.raises(UsageError, match="--find-rate needs --slo"):
        run(offered(), url=fake.url, find_rate=True)
    with pytest.raises(UsageError, match="come at once"):
        run(trace([0, 0]), url=fake.url, find_rate=True, slo_s=1.0)


def test_interrupted(fake: FakeEndpoint) -> None:
    """What was answered counts, and what was not counts as given up."""

    def complete(body: Any) -> Any:
        if len(fake.prompts) == 3:  # one warmed up
            os.kill(os.getpid(), signal.SIGINT)
            return slowly(0.3)(body)
        return 200, ONE_TOKEN

    fake.complete = complete
    result = run(trace([0.0, 0.1, 9.0]), url=fake.url)
    (trial,) = result.report.trials
    assert result.report.interrupted
    assert (trial.summary.answered, trial.summary.given_up) == (1, 1)
    assert report_text(result.report).splitlines()[1].startswith("interrupted: ")


def report(**changes: Any) -> Report:
    outcomes = [Outcome(i / 10, 10 + i, 1e-4, 0.1 + i / 50) for i in range(8)]
    given: dict[str, Any] = {
        "url": "http://x", "model": "m", "paced": None, "prompts": "token ids", "slo_s": 0.5,
        "is_search": False, "trials": [measured(outcomes, 10.0, 0, 0.5)], "highest": [],
        "interrupted": False,
    }  # fmt: skip
    return Report(**(given | changes))


def test_what_is_shown() -> None:
    assert report_text(report()).splitlines() == [
        "endpoint  http://x, m",
        "offered   8 prompts, 10/s",
        "answered  8 in 0.94 s: 8.51 prompts/s, 115 tokens/s",
        "",
        "TTFT                   mean      p50      p90      p99  in time",
        "all                  0.17 s   0.16 s   0.24 s   0.24 s   100.0%",
        "by length in tokens, quarters of the prompts",
        "10 to 11             0.11 s   0.10 s   0.12 s   0.12 s   100.0%",
        "12 to 13             0.15 s   0.14 s   0.16 s   0.16 s   100.0%",
        "14 to 15             0.19 s   0.18 s   0.20 s   0.20 s   100.0%",
        "16 to 17             0.23 s   0.22 s   0.24 s   0.24 s   100.0%",
        "",
        "goodput   8.51 prompts/s with a TTFT of at most 0.50 s, 100.0% of all",
        "driver    late by 0.1 ms (median), 0.1 ms at most",
    ]


def test_paced_comes_first_and_a_late_driver_is_told() -> None:
    late = measured([Outcome(0, 5, 0.3, 0.4)], 1.0, 2, None)
    text = report_text(report(paced="paced: waits", prompts="text", trials=[late]))
    assert text.startswith("paced: waits\nendpoint  http://x, m, prompts of text\n")
    assert "left out  2 prompts" in text
    assert "warning: prompts were sent up to 0.30 s late" in text
    assert report_text(report(trials=[])).endswith("nothing was measured")


def test_what_a_search_shows() -> None:
    slow = measured([Outcome(0, 5, 0, 2.0)], 8.0, 0, 0.5)
    highest = [Highest("mean", 10.0, 12.0), Highest("p99", 0.0, 8.0)]
    lines = report_text(
        report(is_search=True, trials=[*report().trials, slow], highest=highest)
    ).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["rate", "8/s", "10/s"]
    assert [line.split()[-1] for line in lines[3:5]] == ["-", "mean+p99"]
    assert lines[-2] == "highest rate with mean TTFT within 0.50 s: 10/s; 12/s was too much"
    assert lines[-1] == "highest rate with p99 TTFT within 0.50 s: none that was tried"


def test_pictures(tmp_path: Path) -> None:
    path = check_plot(str(tmp_path / "a.png"))
    for is_search in (False, True):
        assert write_plot(Result(report(is_search=is_search), [Outcome(0, 5, 0, 0.1)]), path)
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    failed = measured([Outcome(0, 5, 0, 0.1, "no")], 1.0, 0, 0.5)
    for trials in ([], [failed]):
        assert not write_plot(Result(report(is_search=True, trials=trials), []), path)
    assert not path.exists()


def test_pictures_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="give the name of a"):
        check_plot("x.svg")
    with pytest.raises(UsageError, match="no folder"):
        check_plot(str(tmp_path / "none" / "x.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r'pip install "asapctl\[plot\]"'):
        check_plot(str(tmp_path / "x.png"))


def test_the_command(fake: FakeEndpoint, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    options = ["--rate", "50", "--lengths", "fixed:3", "--duration", "0.2", "--slo", "ttft=5"]
    command = ["bench", "serve", f"{fake.url}/v1", *options]
    shown = CliRunner().invoke(app, [*command, "--json", "--api-key", "k", "--plot", str(path)])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["trials"][0]["summary"]["answered"] > 0
    assert msgspec.convert(found, Report).slo_s == 5
    assert {asked.authorization for asked in fake.asked} == {"Bearer k"}
    assert path.exists()
    wrong = CliRunner().invoke(app, [*command, "--trace", "x"])
    assert (wrong.exit_code, wrong.stderr.count("error: ")) == (2, 1)
