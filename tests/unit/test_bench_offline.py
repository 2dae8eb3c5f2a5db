"""Offline benchmarks: where time goes, what is counted, what is shown, and a whole small run."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asapctl.bench_offline_view import report_text
from engine.bench import offline
from engine.bench.breakdown import breakdown, mean_of
from engine.bench.offline import (
    Options,
    Report,
    RoleShares,
    Spread,
    prompts_flop,
    run_offline,
)
from engine.bench.peak import Peak
from engine.bench.rounds import run_round
from engine.bench.workload import STANDARD_LENGTHS, random_prompts
from engine.control.messages import PrefillRequest, PrefillResult, Snapshot, Span
from engine.errors import RunError, UsageError
from engine.model.config import load_config
from engine.model.work import prefill_flops
from engine.offline.runner import Window
from helpers.checkpoints import checkpoint


def test_the_standard_workload() -> None:
    lengths = STANDARD_LENGTHS
    assert (len(lengths), sum(lengths)) == (64, 33_929)
    assert (min(lengths), max(lengths), lengths.count(2048)) == (23, 2048, 5)


def test_prompts_are_the_same_each_time() -> None:
    prompts = random_prompts([3, 50], 10)
    assert [len(prompt) for prompt in prompts] == [3, 50]
    assert {token for prompt in prompts for token in prompt} <= set(range(4, 10))
    assert prompts == random_prompts([3, 50], 10) != random_prompts([3, 50], 10, seed=1)
    assert random_prompts([2], 1) == [[0, 0]]


def test_time_inside_a_span_is_the_inner_ones() -> None:
    spans = [
        Span("attend", 10.0, 14.0),
        Span("core", 11.0, 12.0),
        Span("core", 12.0, 13.5),
        Span("combine", 15.0, 16.0),
        Span("dispatch", 15.5, 16.0),
        Span("wait", 16.0, 18.0),
    ]
    assert breakdown(spans, 10.0, 20.0) == pytest.approx(
        {"attention": 0.25, "projections": 0.15, "combine": 0.05, "dispatch": 0.05, "idle": 0.5}
    )


def test_only_time_in_the_round_counts() -> None:
    spans = [
        Span("serve", 8.0, 11.0),
        Span("experts", 9.0, 10.5),
        Span("serve", 13.0, 19.0),
        Span("experts", 13.5, 15.0),
        Span("serve", 19.0, 20.0),
    ]
    assert breakdown(spans, 10.0, 14.0) == pytest.approx(
        {"expert GEMM": 0.25, "combine": 0.25, "idle": 0.5}
    )


def test_parts_of_ranks_are_averaged() -> None:
    means = mean_of([{"idle": 0.6, "gate": 0.4}, {"idle": 0.2, "gate": 0.1, "head": 0.7}])
    assert means == pytest.approx({"head": 0.35, "gate": 0.25, "idle": 0.4})
    assert list(means) == ["head", "gate", "idle"]


def test_operations_are_those_of_every_prompt() -> None:
    config = load_config(checkpoint("qwen3_moe"))
    token, pair = prefill_flops(config)
    head = 2.0 * config.hidden_size * config.vocab_size
    expected = 300 * token + pair * (100**2 + 200**2) / 2 + 2 * head
    assert prompts_flop(config, [100, 200]) == pytest.approx(expected, rel=1e-3)


def test_the_peak_grows_with_processes_that_answer() -> None:
    with Peak(1) as peak:
        assert peak.measure(0.02) > 1e8
        peak._processes[0].kill()
        peak._processes[0].join()
        with pytest.raises(RunError, match="peak of matrix products ended"):
            peak.measure(0.02)


@dataclass
class _Instance:
    """Answers the prompt that came last, and remembers how much it held."""

    held: dict[int, PrefillRequest] = field(default_factory=dict)
    most: int = 0
    drained: int = 0
    error: str | None = None

    def submit(self, requests: list[PrefillRequest]) -> None:
        self.held |= {request.key: request for request in requests}
        self.most = max(self.most, sum(len(r.token_ids) for r in self.held.values()))

    def drain(self) -> None:
        self.drained += 1

    def receive(self, timeout_s: float) -> list[PrefillResult]:
        key, request = self.held.popitem()
        return [PrefillResult(key, token_id=request.token_ids[0], error=self.error)]


def test_a_round_keeps_to_its_window_and_gets_every_token() -> None:
    instance = _Instance()
    prompts = [[number] * 10 for number in range(9)]
    done = run_round(instance, prompts, Window(tokens=30))  # type: ignore[arg-type]
    assert done.token_ids == list(range(9))
    assert (instance.most, instance.drained, instance.held) == (30, 1, {})
    assert done.start <= done.first <= done.end


def test_a_prompt_that_fails_fails_the_round() -> None:
    with pytest.raises(RunError, match="prompt 0 failed: no room"):
        run_round(_Instance(error="no room"), [[1]], Window(tokens=30))  # type: ignore[arg-type]


def _report(paced: str | None) -> Report:
    one, many = Spread(1.0, 1.0, 1.0), Spread(2500.0, 2000.0, 3000.0)
    speed, share = Spread(80.0, 70.0, 90.0), Spread(0.5, 0.4, 0.6)
    peaks = (None, None) if paced else (Spread(160.0, 150.0, 170.0), share)
    roles = [RoleShares("attention", 2, 0.9, {"attention": 0.8, "idle": 0.2})]
    return Report(
        *("/models/a", "float32", "cpu.toml", "attention 2 x 1", paced, 64, 33_929, 2048, 3),
        *(1.5, one, many, 1500.0, speed, 2, *peaks, roles, 7),
    )


def test_the_figures_are_told() -> None:
    text = report_text(_report(None))
    assert "2,500 (2,000 to 3,000) tokens/s" in text
    assert "80.0 (70.0 to 90.0) GFLOP/s, of 1,500 GFLOP" in text
    assert "160.0 (150.0 to 170.0) GFLOP/s of float32 products on 2 cores" in text
    assert "reached 50% (40% to 60%)" in text
    assert "attention 2 ranks, busy 90%: attention 80.0%, idle 20.0%" in text
    assert "7 spans were too many to keep" in text


def test_paced_figures_are_told_as_such() -> None:
    text = report_text(_report("paced: waits instead of computing"))
    assert text.startswith("paced: waits")
    assert "GFLOP" not in text


class _Silent:
    def __init__(self) -> None:
        self.steps: list[str] = []

    def note(self, text: str) -> None: ...

    def loading(self, snapshot: Snapshot) -> None: ...

    def step(self, text: str) -> None:
        self.steps.append(text)


def test_what_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"2,048 tokens.*1,024.*--lengths") as caught:
        run_offline(Options(model=str(checkpoint("qwen3_moe")), topology="cpu"), _Silent())
    assert "\n" not in str(caught.value)

    def refuse(*_: object) -> list[int]:
        raise UsageError("--lengths: not like this")

    monkeypatch.setattr(offline, "_sample", refuse)
    with pytest.raises(UsageError, match="not like this") as caught:
        run_offline(Options(model=str(tmp_path / "none"), lengths="nothing:1"), _Silent())
    assert len(str(caught.value).splitlines()) == 2


def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "STANDARD_LENGTHS", range(5, 60, 5))
    watcher = _Silent()
    options = Options(str(checkpoint("qwen3_moe")), "cpu-2a2e", repeat=2)
    report = run_offline(options, watcher)
    assert (report.prompts, report.tokens, report.longest) == (11, 330, 55)
    assert (report.rounds, report.dropped_spans) == (2, 0)
    assert report.tokens_per_s.median == pytest.approx(
        report.tokens / report.seconds.median, rel=0.5
    )
    assert report.share_of_peak is not None
    assert 0 < report.share_of_peak.lowest <= report.share_of_peak.highest < 1
    roles = {role.role: role for role in report.roles}
    assert {name: role.ranks for name, role in roles.items()} == {"attention": 2, "expert": 2}
    for role in report.roles:
        assert 0 < role.busy < 1
        assert sum(role.parts.values()) == pytest.approx(1)
    assert {"attention", "projections", "gate", "dispatch", "combine", "head", "idle"} <= set(
        roles["attention"].parts
    )
    assert set(roles["expert"].parts) == {"expert GEMM", "combine", "idle"}
    assert [step for step, _ in itertools.groupby(watcher.steps)] == [
        "warming up",
        "round 1 of 2",
        "round 2 of 2",
        "one more round, with a trace",
    ]
