"""Paced ranks: what a topology may say of them, their plan, and how their time goes."""

import json
import time
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from asapctl.cli import app
from engine.comm.routing import plan_dispatch
from engine.control.messages import Progress, RankStatus
from engine.control.statistics import Statistics
from engine.errors import UsageError
from engine.hardware.load import load_hardware
from engine.launch.checks import plan_of
from engine.launch.pacing import LABEL, read_pacing
from engine.launch.registry import InstanceRecord
from engine.model.config import load_config
from engine.model.spans import Span
from engine.offline.stats import Tally, summarize
from engine.paced.attention import PacedAttention
from engine.paced.experts import PacedExperts, tokens_a_pair
from engine.paced.pacer import Pacer
from engine.topology.load import load_topology
from engine.topology.placement import place_experts
from engine.topology.ranks import RankId

MODEL = Path(__file__).parents[2] / "topologies/models/paced"
CONFIG = load_config(MODEL)
CLOUD = load_hardware("cloudmatrix384")


class Clock:
    """Notes the ends that steps wait for."""

    def __init__(self) -> None:
        self.counted: list[float] = []
        self.ends: list[float] = []
        self.pacer = Pacer(self.counted.append, self.ends.append)


def test_attention_takes_what_the_table_says_and_chooses_experts_evenly() -> None:
    clock = Clock()
    model = PacedAttention(CONFIG, CLOUD, torch.float32, clock.pacer)
    spans = [Span(0, 1000), Span(500, 300)]
    hidden = model.embed(torch.zeros(1300, dtype=torch.int64))
    before = time.monotonic()
    mixed = model.mix(2, model.norm_input(2, hidden), model.rope(torch.arange(1300)), spans, [])
    assert clock.counted == [CLOUD.attention_s(spans)]
    assert before <= clock.ends[0] - clock.counted[0] <= time.monotonic()
    assert mixed.shape == (1300, CONFIG.hidden_size)
    routed = model.route(2, mixed)
    for ranks in (1, 3, 4, 8):
        bounds = place_experts(CONFIG.experts, ranks)
        parts = plan_dispatch(routed.experts, routed.weights, bounds)
        pairs = [part.p for part in parts]
        assert sum(pairs) == 1300 * CONFIG.top_k
        assert max(pairs) - min(pairs) <= 1300 * CONFIG.top_k / ranks * 0.1
    assert int(model.logits(mixed[-1:]).argmax()) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_expert_rank_takes_its_share_of_the_batch(ranks: int) -> None:
    clock = Clock()
    experts = PacedExperts(CONFIG, ranks, CLOUD, clock.pacer)
    tokens = 8000
    pairs = tokens * CONFIG.top_k // ranks
    out = torch.ones(5, CONFIG.hidden_size)
    nothing = torch.zeros(pairs, dtype=torch.int32)
    experts.serve(0, out, nothing, nothing, nothing, out)
    assert clock.counted == [pytest.approx(CLOUD.experts_s(tokens) * 4 / ranks)]
    assert not out.any()
    assert pairs * tokens_a_pair(CONFIG, ranks) == tokens
    assert experts.flops(pairs) == pytest.approx(clock.counted[0] * 1e9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["attention.device=cpu"], 'attention.device: the other side\'s is "paced"'),
        (["experts.device=cuda"], 'experts.device: the other side\'s is "paced"'),
        (["attention.tensor_parallel=2"], "a paced rank stands for a whole group; leave it at 1"),
        (["paced.scale=0"], "expected a number from 0.0001 to 1000000"),
    ],
)
def test_topologies_that_cannot_be_paced(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_topology("paced-d4e4", overrides)
    assert message in str(caught.value)


def test_the_policy_decides_how_slow_links_are() -> None:
    topology = load_topology("paced-d4e4", ["paced.scale=2"])
    pacing = read_pacing(topology)
    assert pacing is not None
    assert pacing.hardware == CLOUD.scaled(2)
    assert LABEL in pacing.note
    assert "cloudmatrix384 x 2" in pacing.note
    for policy in ("sync", "sync-chunked", "sync-afd"):
        in_step = f"schedule.policy={policy}"
        lockstep = read_pacing(load_topology("paced-d4e4", ["paced.scale=2", in_step]))
        assert lockstep is not None
        assert lockstep.hardware.links == CLOUD.scaled(2).sync_links != pacing.hardware.links
        assert lockstep.hardware.attention == pacing.hardware.attention
    assert read_pacing(load_topology()) is None


def test_a_wrong_table_is_a_problem_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[paced]\nhardware = "slow.toml"\n')
    (tmp_path / "slow.toml").write_text("layers = 3\n")
    topology = tmp_path / "paced.toml"
    topology.write_text(
        '[attention]\ndevice = "paced"\n[experts]\ndevice = "paced"\n'
        '[paced]\nhardware = "slow.toml"\n'
    )
    with pytest.raises(UsageError) as caught:
        plan_of(str(topology), [], MODEL)
    place = f"{topology}: [paced] hardware: slow.toml"
    assert f"{place}: about is missing; set it" in str(caught.value).splitlines()


def test_a_plan_needs_a_config_alone_and_counts_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    for model in (None, tmp_path):
        plan = plan_of("paced-d4e4", [], model)
        assert all(rank.weights_bytes == 0 for rank in plan.ranks)
        assert plan.pacing is not None
        assert plan.notes[0] == plan.pacing.note == plan.paced
        assert {rank.place for rank in plan.ranks} == {"paced"}
        assert not plan.config_only
    with pytest.raises(UsageError, match="safetensors"):
        plan_of("cpu", [], tmp_path)
    with pytest.raises(UsageError, match="paced ranks have no KV caches"):
        plan_of("paced-d4e4", [], None, keep_kv=True)


def test_statistics_keep_what_was_to_be_spent_over_lives() -> None:
    statistics, id_ = Statistics(), RankId("expert", 0)
    statistics.progress(id_, Progress(2.0, 0, 0, paced_seconds=1.5), 10.0)
    statistics.progress(RankId("expert", 0, 1), Progress(1.0, 0, 0, paced_seconds=0.5), 12.0)
    status = statistics.complete_rank(RankStatus(id_, 1, True), 12.0, 4.0)
    assert (status.busy_seconds, status.paced_seconds) == (3.0, 2.0)


def test_a_list_of_instances_says_that_ranks_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = InstanceRecord("one", 1, "launch", "/m", "t", 0.0, "ipc:///c", state="ready")
    records = [computing, msgspec.structs.replace(computing, name="two", paced=LABEL)]
    monkeypatch.setattr("engine.launch.registry.list_instances", lambda: records)
    lines = CliRunner().invoke(app, ["ps"]).stdout.splitlines()
    states = {line.split()[0]: "ready, paced" in line for line in lines if " launch " in line}
    assert states == {"one": False, "two": True}
    found = json.loads(CliRunner().invoke(app, ["ps", "--json"]).stdout)
    assert [each["paced"] for each in found] == [None, LABEL]


def test_a_summary_says_that_ranks_were_paced() -> None:
    from asapctl.prefill_view import summary_text

    names = {"model": "m", "dtype": "float32", "topology": "t", "output": "o"}
    tally = Tally()
    tally.prompts, tally.ok = 1, 1
    text = summary_text(summarize(tally, [], **names, paced=LABEL))
    assert text.splitlines()[0] == LABEL
    assert LABEL not in summary_text(summarize(tally, [], **names))
