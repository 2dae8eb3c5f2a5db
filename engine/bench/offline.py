"""`asapctl bench offline`: how fast an instance is with all prompts at hand, and why."""

import itertools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.bench.breakdown import breakdown, mean_of
from engine.bench.peak import Peak
from engine.bench.rounds import Round, run_round
from engine.bench.workload import STANDARD_LENGTHS, random_prompts
from engine.control.client import Client
from engine.control.messages import Snapshot, TraceReport
from engine.errors import RunError, UsageError
from engine.offline.job import window_of
from engine.topology.load import DEFAULT_TOPOLOGY

if TYPE_CHECKING:
    from engine.launch.plan import Plan
    from engine.model.architecture import ModelConfig

# Ranks report five times a second: in less, a round would end without what they did.
_REPORT_LAG_S = 0.25
_ANSWER_S = 5.0
# A rank may be in a long step when a trace ends; the controller waits 10 s for it.
_GRACE_S = 12.0


class Options(msgspec.Struct, frozen=True):
    """lengths: None for the standard workload; else a file or a specification of lengths, of which
    `prompts` are drawn with `seed`. repeat: measured rounds, after one that warms up.
    """

    model: str | None = None
    topology: str | None = None
    overrides: tuple[str, ...] = ()
    lengths: str | None = None
    prompts: int = 64
    repeat: int = 3
    seed: int = 0


class Spread(msgspec.Struct, frozen=True):
    """Of all rounds."""

    median: float
    lowest: float
    highest: float


class RoleShares(msgspec.Struct, frozen=True):
    """Means over the ranks of a role. busy: share of the measured rounds that they computed, by
    their own meters. parts: where the time of one more round went, by their spans.
    """

    role: str
    ranks: int
    busy: float
    parts: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """gflop: operations of a round, counted from the model's sizes, in 1e9. peak_gflop_per_s: of
    float32 matrix products in `cores` processes of one thread, measured between the rounds; None
    where not all ranks compute on the CPU. paced: as in engine.control.messages.Snapshot.
    """

    model: str
    dtype: str
    topology: str
    layout: str
    paced: str | None
    prompts: int
    tokens: int
    longest: int
    rounds: int
    load_seconds: float
    seconds: Spread
    tokens_per_s: Spread
    gflop: float
    gflop_per_s: Spread
    cores: int
    peak_gflop_per_s: Spread | None
    share_of_peak: Spread | None
    roles: list[RoleShares]
    dropped_spans: int


class Watcher(Protocol):
    """Whoever shows the run to the user."""

    def note(self, text: str) -> None: ...

    def loading(self, snapshot: Snapshot) -> None: ...

    def step(self, text: str) -> None: ...


def run_offline(options: Options, watcher: Watcher) -> Report:
    """Starts an instance and measures it. Raises UsageError before it starts, RunError after."""
    from engine.launch.checks import Problems, plan_of
    from engine.launch.running import start_instance

    problems = Problems()
    lengths, plan = list(STANDARD_LENGTHS), None
    with problems.gathered():
        if options.lengths is not None:
            lengths = _sample(options.lengths, options.prompts, options.seed)
    with problems.gathered():
        plan = plan_of(
            options.topology or DEFAULT_TOPOLOGY,
            [*options.overrides, "instances.count=1"],
            options.model,
            on_note=watcher.note,
        )
        _check_lengths(lengths, plan)
    problems.raise_all()
    assert plan is not None
    for note in plan.notes:
        watcher.note(note)
    with ExitStack() as stack:
        started = time.monotonic()
        client = stack.enter_context(start_instance(plan, watcher.loading))
        load_seconds = time.monotonic() - started
        peak = None
        if {plan.topology.attention.device, plan.topology.experts.device} == {"cpu"}:
            peak = stack.enter_context(Peak(len(os.sched_getaffinity(0))))
        prompts = random_prompts(lengths, plan.config.vocab_size, options.seed)
        return _measure(plan, client, peak, prompts, options.repeat, load_seconds, watcher)


def prompts_flop(config: "ModelConfig", lengths: Sequence[int]) -> float:
    """Floating-point operations of prompts of these lengths, their first tokens included."""
    from engine.model.work import prefill_flops
    from engine.serve.spec import prompt_cost

    cost, token = prompt_cost(config), prefill_flops(config).token
    head = 2.0 * config.hidden_size * config.vocab_size
    return token * sum(map(cost.of, lengths)) + head * len(lengths)


def _sample(spec: str, count: int, seed: int) -> list[int]:
    from engine.traffic.lengths import parse_lengths

    lengths, rng = parse_lengths(spec), random.Random(seed)
    return list(lengths.sample(rng, count))


def _check_lengths(lengths: Sequence[int], plan: "Plan") -> None:
    if (longest := max(lengths)) > plan.max_model_len:
        raise UsageError(
            f"the longest prompt has {longest:,} tokens, and this model in this topology takes "
            f"{plan.max_model_len:,} ([model] max_model_len): give other --lengths"
        )


def _measure(
    plan: "Plan",
    client: Client,
    peak: Peak | None,
    prompts: list[list[int]],
    repeat: int,
    load_seconds: float,
    watcher: Watcher,
) -> Report:
    window = window_of(plan)
    watcher.step("warming up")
    run_round(client, prompts, window)
    before = _settled(client)
    rounds: list[Round] = []
    peaks: list[float] = [] if peak is None else [peak.measure()]
    for number in range(repeat):
        watcher.step(f"round {number + 1} of {repeat}")
        rounds.append(run_round(client, prompts, window))
        if peak is not None:
            peaks.append(peak.measure())
    after = _settled(client)
    if any(rank.deaths for rank in after.ranks):
        raise RunError("a rank ended and was started again while it was measured; see its log")
    watcher.step("one more round, with a trace")
    seconds = [round_.seconds for round_ in rounds]
    trace, traced = _traced(client, prompts, plan, max(seconds))

    lengths = [len(prompt) for prompt in prompts]
    tokens, flop = sum(lengths), prompts_flop(plan.config, lengths)
    # The peak beside a round: of the measurements right before and right after it.
    beside = [(a + b) / 2 for a, b in itertools.pairwise(peaks)]
    return Report(
        model=str(plan.model_dir),
        dtype=plan.dtype,
        topology=plan.topology.source,
        layout=_layout(plan, after.min_batch_tokens),
        paced=plan.paced,
        prompts=len(prompts),
        tokens=tokens,
        longest=max(lengths),
        rounds=repeat,
        load_seconds=load_seconds,
        seconds=_spread(seconds),
        tokens_per_s=_spread([tokens / each for each in seconds]),
        gflop=flop / 1e9,
        gflop_per_s=_spread([flop / 1e9 / each for each in seconds]),
        cores=len(os.sched_getaffinity(0)),
        peak_gflop_per_s=_spread([each / 1e9 for each in peaks]) if peaks else None,
        share_of_peak=(
            _spread([flop / each / top for each, top in zip(seconds, beside, strict=True)])
            if beside
            else None
        ),
        roles=_roles(before, after, sum(seconds), trace, traced),
        dropped_spans=sum(rank.dropped for rank in trace.ranks),
    )


def _settled(client: Client) -> Snapshot:
    """A snapshot with all that the ranks did."""
    client.receive(_REPORT_LAG_S)
    snapshot = client.fresh_snapshot(_ANSWER_S)
    if snapshot is None:
        raise RunError(f"the controller did not answer within {_ANSWER_S:.0f} s")
    return snapshot


def _traced(
    client: Client, prompts: list[list[int]], plan: "Plan", longest_s: float
) -> tuple[TraceReport, Round]:
    """One round, recorded by every rank: long enough for one that is slower than all before."""
    seconds = 1.5 * longest_s + 0.5
    client.start_trace(seconds)
    done = run_round(client, prompts, window_of(plan))
    trace = client.await_trace(seconds + _GRACE_S)
    if trace is None or len(trace.ranks) < len(plan.ranks):
        raise RunError("not every rank sent what it recorded in time")
    return trace, done


def _roles(
    before: Snapshot, after: Snapshot, seconds: float, trace: TraceReport, traced: Round
) -> list[RoleShares]:
    earlier = {rank.id: rank.busy_seconds for rank in before.ranks}
    busy: dict[str, list[float]] = defaultdict(list)
    for rank in after.ranks:
        busy[rank.id.role].append((rank.busy_seconds - earlier[rank.id]) / seconds)
    end = min(traced.end, trace.end)
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for recorded in trace.ranks:
        parts[recorded.id.role].append(breakdown(recorded.spans, traced.start, end))
    return [
        RoleShares(role, len(shares), statistics.mean(shares), mean_of(parts[role]))
        for role, shares in sorted(busy.items())
    ]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _layout(plan: "Plan", min_batch_tokens: int | None) -> str:
    schedule = plan.topology.schedule
    return (
        f"attention {plan.groups} x {plan.tensor_parallel}, experts {len(plan.experts)}, "
        f"{plan.lanes} lanes, batches of {min_batch_tokens} to "
        f"{schedule.max_batch_tokens} tokens, policy {schedule.policy}"
    )
